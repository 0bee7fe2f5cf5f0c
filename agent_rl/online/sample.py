"""OnlineSample: one settled turn, and the row that the trainer gets of it.

    prompt 5 6, sampled 7 8, reward 1   ->   input_ids 5 6 7 8, loss_mask 0 0 1 1, rewards 1

The row is a group of its own: a baseline over groups has to come from other sessions.
"""

from __future__ import annotations

import time
from collections.abc import Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from agent_rl.online.methods import Lesson
from agent_rl.online.teacher import TeacherScores
from agent_rl.record.interaction import InteractionWithTokenLogpReward
from agent_rl.types import RolloutGroup, TensorDict

if TYPE_CHECKING:
    from torch import Tensor


class Owned(Protocol):
    """Something of a session, and of all users whom it named."""

    @property
    def session_id(self) -> str: ...

    @property
    def user_ids(self) -> Set[str]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class OnlineSample:
    """``index`` counts over all sessions, in the order of settling.

    ``user_ids`` is the session's own set: a user whom a later call names is in it too.
    """

    index: int
    session_id: str
    user_ids: Set[str]
    interaction: InteractionWithTokenLogpReward
    lesson: Lesson
    time_s: float = field(default_factory=time.time)

    @property
    def oldest_version(self) -> int | None:
        """Of its sampled tokens; None where none is trained."""
        return min(self.interaction.path.versions) if self.lesson.is_trained else None

    def to_trajectory(self) -> TensorDict:
        """Keys as of any rollout's row. ``rewards`` is nan without one; ``teacher_logprobs`` and
        ``teacher_topk_*`` are there when a teacher spoke: nan, or id 0, off the loss mask."""
        import torch

        lesson = self.lesson
        row = self.interaction.as_row(self.interaction.path.num_prompt).to_tensor_dict()
        reward = float("nan") if lesson.reward is None else lesson.reward
        row["rewards"] = torch.tensor([reward], dtype=torch.float32)
        if not lesson.is_trained:
            row["loss_mask"] = torch.zeros_like(row["loss_mask"])
        table: TensorDict = {**row}
        if lesson.teacher is not None:
            is_trained = row["loss_mask"].bool()
            table |= _teacher_keys(lesson.teacher, self.interaction.path.num_prompt, is_trained)
        table["rollout_group"] = RolloutGroup(row_counts=(1,), rewards=(lesson.reward,))
        return table


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptSample:
    """A sample of an earlier process: its row is all that is left of the turn."""

    index: int
    time_s: float
    session_id: str
    user_ids: Set[str]
    oldest_version: int | None
    trajectory: TensorDict

    def to_trajectory(self) -> TensorDict:
        return self.trajectory


def _teacher_keys(scores: TeacherScores, num_prompt: int, is_trained_1S: Tensor) -> TensorDict:
    import torch

    logprobs = torch.full(is_trained_1S.shape, torch.nan)
    logprobs[0, num_prompt:] = torch.tensor(scores.logprobs)
    table: TensorDict = {"teacher_logprobs": torch.where(is_trained_1S, logprobs, torch.nan)}
    if scores.top is not None:
        shape = (*is_trained_1S.shape, len(scores.top[0]))
        ids, values = torch.zeros(shape, dtype=torch.int64), torch.full(shape, torch.nan)
        ids[0, num_prompt:] = torch.tensor([[i for i, _ in place] for place in scores.top])
        values[0, num_prompt:] = torch.tensor([[v for _, v in place] for place in scores.top])
        table["teacher_topk_ids"] = torch.where(is_trained_1S[..., None], ids, 0)
        table["teacher_topk_logprobs"] = torch.where(is_trained_1S[..., None], values, torch.nan)
    return table
