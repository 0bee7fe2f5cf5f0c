"""GroupedRolloutWorkflow: the episodes of one datum that share a baseline.

The wrapper runs ``group_size`` episodes and nothing else: an unusable slot is neither run again nor
filled with a copy. Usable slots keep their order, and their *actual* number is the group's size:

    target 4, slots [ok, None, ok, ok]  -> 3 logical rollouts, RolloutGroup((1, 1, 1), ...)

This file alone decides what an unusable slot means for its siblings.
"""

from __future__ import annotations

import asyncio
import copy
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import cast

from agent_rl import workflow_context
from agent_rl.engine.base import InferenceEngine
from agent_rl.errors import AgentRLError, EpisodeRejectedError, WorkflowContractError
from agent_rl.record.interaction import InteractionWithTokenLogpReward
from agent_rl.record.rows import pad_concat
from agent_rl.rollout.dataloader import as_native
from agent_rl.rollout.episode import Episode, EpisodeRules, run_episode
from agent_rl.rollout.workflow import RolloutWorkflow
from agent_rl.stats import tracker as stats_tracker
from agent_rl.types import JsonObject, RolloutGroup, TensorDict

DEFAULT_RULES = EpisodeRules()

_NORM_EPS = 1e-8


class GroupedInteractions(dict[str, InteractionWithTokenLogpReward]):
    """The union of the interactions of all usable slots, in slot order."""

    def __init__(
        self, interactions: dict[str, InteractionWithTokenLogpReward], group: RolloutGroup
    ) -> None:
        super().__init__(interactions)
        self.rollout_group = group


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """What became of one episode: usable, rejected by the workflow (both None), or an error.

    Both are set where the agent failed and its turns are used all the same.
    """

    episode: Episode | None = None
    error: AgentRLError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupResult:
    value: TensorDict | GroupedInteractions | None
    slots: tuple[Slot, ...]


class GroupedRolloutWorkflow(RolloutWorkflow):
    """Run ``workflow`` ``group_size`` times on the same datum and merge what is usable.

    Args:
        min_usable_group_size: fewer usable episodes make the whole group None.
        drop_incomplete_group: one unusable slot makes the whole group None.
        reward_normalization: replace the rewards of interactions by (reward - mean) / std of the
            group; the raw value stays in ``original_reward``. Tensor rows are left alone.
        reward_normalization_use_std: False only subtracts the mean.
    """

    def __init__(
        self,
        workflow: RolloutWorkflow,
        group_size: int,
        *,
        min_usable_group_size: int = 1,
        drop_incomplete_group: bool = False,
        reward_normalization: bool = False,
        reward_normalization_use_std: bool = True,
    ) -> None:
        if group_size < 1:
            raise ValueError(f"group_size is {group_size}; it must be at least 1")
        if not 1 <= min_usable_group_size <= group_size:
            raise ValueError(
                f"min_usable_group_size is {min_usable_group_size}; it must lie between 1 and "
                f"group_size={group_size}"
            )
        self.workflow = workflow
        self.group_size = group_size
        self.min_usable_group_size = min_usable_group_size
        self.drop_incomplete_group = drop_incomplete_group
        self.reward_normalization = reward_normalization
        self.reward_normalization_use_std = reward_normalization_use_std

    async def arun_episode(
        self, engine: InferenceEngine, data: JsonObject
    ) -> TensorDict | GroupedInteractions | None:
        """The merged group: rows with ``rollout_group``, GroupedInteractions, or None."""
        return (await self.run_group(engine, data)).value

    async def run_group(
        self, engine: InferenceEngine, data: JsonObject, rules: EpisodeRules = DEFAULT_RULES
    ) -> GroupResult:
        """Like ``arun_episode``, with what became of each slot."""
        usable, value = 0, None
        try:
            slots = await self._run_slots(engine, data, rules)
            episodes = [slot.episode for slot in slots if slot.episode is not None]
            usable = len(episodes)
            value = self._merge(episodes)
        finally:
            self._record(usable=usable, is_trainable=value is not None)
        return GroupResult(value=value, slots=slots)

    async def _run_slots(
        self, engine: InferenceEngine, data: JsonObject, rules: EpisodeRules
    ) -> tuple[Slot, ...]:
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(run_slot(self.workflow, engine, data, rules, slot))
                    for slot in range(self.group_size)
                ]
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return tuple(task.result() for task in tasks)

    def _merge(self, episodes: Sequence[Episode]) -> TensorDict | GroupedInteractions | None:
        usable = len(episodes)
        if usable < self.min_usable_group_size:
            return None
        if self.drop_incomplete_group and usable < self.group_size:
            return None
        recorded = [e.interactions for e in episodes if e.interactions is not None]
        if self.reward_normalization and len(recorded) == usable:
            if any(i.reward is None for slot in recorded for i in slot.values()):
                return None
            episodes = normalize_rewards(episodes, use_std=self.reward_normalization_use_std)
        return merge(episodes)

    def _record(self, *, usable: int, is_trainable: bool) -> None:
        trainable = usable if is_trainable else 0
        stats_tracker.get(workflow_context.stat_scope()).scalar(
            target_slot_count=self.group_size,
            usable_slot_count=usable,
            trainable_slot_count=trainable,
            fully_masked_group=float(usable == 0),
            singleton_slot_group=float(usable == 1),
            pre_filter_usable_slot_yield=usable / self.group_size,
            pre_filter_trainable_slot_yield=trainable / self.group_size,
        )


async def run_slot(
    workflow: RolloutWorkflow,
    engine: InferenceEngine,
    data: JsonObject,
    rules: EpisodeRules,
    slot: int = 0,
) -> Slot:
    """One episode whose failure is data, unless the rules say otherwise.

    A broken contract is raised in either case: trying again cannot mend it. What the episode does
    to its datum (``data["messages"].append(...)``) is seen by no other of the group, nor by the
    journal, which knows a group by its datum.
    """
    workflow_context.enter_slot(slot)
    try:
        episode = await run_episode(workflow, engine, as_native(data), rules)
        return Slot(episode=episode, error=None if episode is None else episode.error)
    except WorkflowContractError:
        raise
    except EpisodeRejectedError as error:
        return Slot(error=error)
    except AgentRLError as error:
        if rules.on_error == "raise":
            raise
        return Slot(error=error)


def merge(episodes: Sequence[Episode]) -> TensorDict | GroupedInteractions:
    """Tensor rows below one another, or the union of all interactions; in the given order.

    Raises:
        WorkflowContractError: different kinds or keys, or an id that occurs twice.
    """
    recorded = [e.interactions for e in episodes if e.interactions is not None]
    group = RolloutGroup(
        row_counts=tuple(episode.num_rows for episode in episodes),
        rewards=tuple(episode.reference for episode in episodes),
        truncated=tuple(episode.is_truncated for episode in episodes),
    )
    if not recorded:
        tables = [cast(TensorDict, episode.value) for episode in episodes]
        with _contract("episodes of one group"):
            return {**pad_concat(tables), "rollout_group": group}
    if len(recorded) < len(episodes):
        raise WorkflowContractError(
            "one episode of a group returned tensors and another interactions; a workflow must "
            "return the same kind each time"
        )
    names = Counter(name for interactions in recorded for name in interactions)
    twice = [name for name, count in names.items() if count > 1]
    if twice:
        raise WorkflowContractError(f"two episodes of a group returned the interactions {twice}")
    union = {name: i for interactions in recorded for name, i in interactions.items()}
    return GroupedInteractions(union, group)


def as_rows(value: TensorDict | GroupedInteractions) -> TensorDict:
    """The merged group as one padded table with its ``rollout_group``."""
    if not isinstance(value, GroupedInteractions):
        return value
    with _contract("interactions of one group"):
        rows = pad_concat([interaction.to_tensor_dict() for interaction in value.values()])
    return {**rows, "rollout_group": value.rollout_group}


@contextmanager
def _contract(owner: str) -> Iterator[None]:
    """Rows that do not fit together are the workflow's fault, in every episode again."""
    try:
        yield
    except ValueError as error:
        raise WorkflowContractError(f"{owner}: {error}") from error


def normalize_rewards(episodes: Sequence[Episode], *, use_std: bool) -> list[Episode]:
    """Shift and scale every reward by the statistics of one reference per episode.

    Rows 1.0 and 2.0 of an episode with reference 1, a row 3.0 of another: references 1, 3 have
    mean 2 and population std 1, so the rows become -1, 0, +1 and the references -1, +1.

    Raises:
        WorkflowContractError: an episode has different rewards and no ``rollout_reward``.
    """
    references = [_reference(episode) for episode in episodes]
    mean = math.fsum(references) / len(references)
    std = math.sqrt(math.fsum((r - mean) ** 2 for r in references) / len(references))
    divisor = std + _NORM_EPS if use_std and std > _NORM_EPS else 1.0
    return [
        _with_rewards(episode, mean=mean, divisor=divisor, reference=reference)
        for episode, reference in zip(episodes, references, strict=True)
    ]


def _reference(episode: Episode) -> float:
    if episode.reference is not None:
        return episode.reference
    rewards = {interaction.reward for interaction in (episode.interactions or {}).values()}
    if len(rewards) > 1:
        raise WorkflowContractError(
            f"an episode has the row rewards {sorted(map(str, rewards))}; reward normalization "
            "needs one number for it: set an explicit rollout_reward"
        )
    reward = rewards.pop()
    assert reward is not None, "the caller dropped groups with a missing reward"
    return reward


def _with_rewards(episode: Episode, *, mean: float, divisor: float, reference: float) -> Episode:
    """Copies with the new rewards; the exported interactions themselves keep theirs."""
    normalized = {}
    for name, interaction in (episode.interactions or {}).items():
        assert interaction.reward is not None, "the caller dropped groups with a missing reward"
        row = copy.copy(interaction)
        row.original_reward = (
            interaction.reward if row.original_reward is None else row.original_reward
        )
        row.reward = (interaction.reward - mean) / divisor
        row.rollout_reward = (reference - mean) / divisor
        normalized[name] = row
    new_reference = (reference - mean) / divisor
    return replace(episode, value=normalized, reference=new_reference)
