"""One episode: a workflow call with a deadline, and its return value brought into one form.

Whatever the workflow does, the result is an Episode, None (rejected by the workflow), or a typed
error that says whose fault it was. What a failure means for its group is decided in group.py.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from agent_rl import workflow_context
from agent_rl.config import BudgetConfig
from agent_rl.engine.base import InferenceEngine
from agent_rl.errors import (
    AgentHostError,
    AgentRLError,
    BudgetSpentError,
    EngineError,
    EpisodeError,
    EpisodeRejectedError,
    EpisodeTimeoutError,
    RewardError,
    WorkflowContractError,
    boundary,
)
from agent_rl.record.interaction import InteractionWithTokenLogpReward
from agent_rl.record.reward import as_reward
from agent_rl.rollout.budget import BudgetedEngine
from agent_rl.rollout.clock import episode_clock
from agent_rl.rollout.workflow import RolloutWorkflow
from agent_rl.types import JsonObject, TensorDict

logger = logging.getLogger(__name__)

FAILURE_KINDS = ("agent", "client", "engine", "reward", "judge", "timeout")
_CANCEL_GRACE_S = 5.0
_MIN_WAIT_S = 0.01
_DTYPES = {
    "input_ids": torch.int32,
    "attention_mask": torch.bool,
    "loss_mask": torch.int32,
    "logprobs": torch.float32,
    "rewards": torch.float32,
    "versions": torch.int32,
}


class Exported(dict[str, InteractionWithTokenLogpReward]):
    """The interactions of an agent's episode, and what is only dumped and counted beside them:
    its orphans, and the error with which the agent ended where its turns are used all the same."""

    def __init__(
        self,
        interactions: Mapping[str, InteractionWithTokenLogpReward],
        orphans: Iterable[InteractionWithTokenLogpReward] = (),
        error: EpisodeError | None = None,
    ) -> None:
        super().__init__(interactions)
        self.orphans = tuple(orphans)
        self.error = error


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """One logical rollout: rows as tensors, or the interactions that become rows.

    ``reference`` is the explicit reward reference (``rollout_reward``), None where none was given.
    """

    value: TensorDict | dict[str, InteractionWithTokenLogpReward]
    num_rows: int
    reference: float | None
    orphans: tuple[InteractionWithTokenLogpReward, ...] = ()
    error: EpisodeError | None = None
    is_truncated: bool = False

    @property
    def interactions(self) -> dict[str, InteractionWithTokenLogpReward] | None:
        first = next(iter(self.value.values()))
        is_recorded = isinstance(first, InteractionWithTokenLogpReward)
        return self.value if is_recorded else None  # type: ignore[return-value]


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeRules:
    """
    Args:
        timeout_s: deadline of each episode, in seconds of ``clock`` in which it has its place.
        budget: of each episode; see ``BudgetedEngine``.
        on_error: "reject": a failed episode is an unusable slot; "raise": its error is raised once
            the other episodes of the group are cancelled.
    """

    timeout_s: float | None = None
    on_error: Literal["reject", "raise"] = "reject"
    clock: Callable[[], float] = time.monotonic
    budget: BudgetConfig = field(default_factory=BudgetConfig)


async def run_episode(
    workflow: RolloutWorkflow, engine: InferenceEngine, data: JsonObject, rules: EpisodeRules
) -> Episode | None:
    """Run the workflow once.

    Raises:
        EpisodeError: or another AgentRLError; it costs this episode only.
        WorkflowContractError: the return value breaks the contract for good.
    """
    if not rules.budget.is_limited:
        return await _run(workflow, engine, data, rules)
    budgeted = BudgetedEngine(engine, rules.budget)
    try:
        episode = await _run(workflow, budgeted, data, rules)
    except BudgetSpentError as error:
        raise EpisodeRejectedError(str(error), reason="truncated") from error
    return None if episode is None else replace(episode, is_truncated=budgeted.is_truncated)


async def _run(
    workflow: RolloutWorkflow, engine: InferenceEngine, data: JsonObject, rules: EpisodeRules
) -> Episode | None:
    clock = episode_clock(rules.clock)
    task = asyncio.create_task(_call(workflow, engine, data))
    try:
        await _wait(task, rules.timeout_s, clock.now)
    except asyncio.CancelledError:
        await _cancel(task)
        raise
    if not task.done():
        await _cancel(task)
        raise EpisodeTimeoutError(
            f"the episode ran past rollout.episode_timeout_s={rules.timeout_s:g} and was cancelled"
        )
    if task.cancelled():
        raise EpisodeError("the episode was cancelled from inside the agent")
    error = task.exception()
    if isinstance(error, AgentRLError):
        raise error
    if error is not None:  # a BaseException that no boundary may catch
        raise EpisodeError(f"agent raised {type(error).__name__}: {error}") from error
    return as_episode(task.result())


async def _call(workflow: RolloutWorkflow, engine: InferenceEngine, data: JsonObject) -> object:
    with boundary("agent"):
        return await workflow.arun_episode(engine, data)


async def _wait(
    task: asyncio.Task[object], timeout_s: float | None, now: Callable[[], float]
) -> None:
    """Until the task is done or its deadline has passed on the clock, which may stand still."""
    if timeout_s is None:
        await asyncio.wait({task})
        return
    deadline_s = now() + timeout_s
    while not task.done() and (left_s := deadline_s - now()) > 0:
        await asyncio.wait({task}, timeout=max(left_s, _MIN_WAIT_S))


async def _cancel(task: asyncio.Task[Any]) -> None:
    """Cancel and wait a moment; what it returns later is ignored."""
    task.cancel()
    await asyncio.wait({task}, timeout=_CANCEL_GRACE_S)
    if not task.done():
        logger.warning("an agent ignores its cancellation; it is left running and not counted")
        task.add_done_callback(lambda late: late.cancelled() or late.exception())
    elif not task.cancelled():
        task.exception()  # marks it as seen


def failure_kind(error: AgentRLError) -> str:
    """One of FAILURE_KINDS, for the metric ``failed/<kind>``."""
    if isinstance(error, EpisodeTimeoutError):
        return "timeout"
    if isinstance(error, EpisodeError):
        return error.boundary
    return "engine" if isinstance(error, (EngineError, AgentHostError)) else "client"


def as_episode(returned: object) -> Episode | None:
    """Check a workflow's return value; nothing of it is changed.

    Raises:
        EpisodeError: it is not one of the legal forms, or has no log-prob of a trained token.
        RewardError: a row's reward is not finite.
        WorkflowContractError: ``rollout_reward`` is not one finite number for the whole episode.
    """
    if returned is None:
        return None
    if not isinstance(returned, Mapping):
        raise EpisodeError(
            "arun_episode must return a dict of tensors, a dict of interactions or None, not "
            f"{type(returned).__name__}"
        )
    if not returned:
        return None
    is_recorded = [isinstance(v, InteractionWithTokenLogpReward) for v in returned.values()]
    if all(is_recorded):
        return _from_interactions(returned)
    if any(is_recorded):
        raise EpisodeError("arun_episode returned interactions and other values in one dict")
    return _from_tensors(dict(returned))


def _from_interactions(found: Mapping[str, InteractionWithTokenLogpReward]) -> Episode:
    for key, interaction in found.items():
        if interaction.reward is not None and not math.isfinite(interaction.reward):
            raise RewardError(f"the reward of interaction {key} is {interaction.reward}")
        if not workflow_context.get().is_eval and any(map(_holds_image, interaction.messages)):
            raise EpisodeError(
                f"interaction {key} holds images, which rows do not carry, so that it cannot be "
                "trained on; use images in evaluation only"
            )
    given = [i.rollout_reward for i in found.values() if i.rollout_reward is not None]
    references = {_as_reference(value) for value in given}
    if len(references) > 1:
        raise WorkflowContractError(
            f"one episode has several rollout_reward values: {sorted(references)}; all "
            "interactions of an episode must carry the same one"
        )
    return Episode(
        value=dict(found),
        num_rows=len(found),
        reference=next(iter(references), None),
        orphans=found.orphans if isinstance(found, Exported) else (),
        error=found.error if isinstance(found, Exported) else None,
    )


def _holds_image(message: JsonObject) -> bool:
    content = message.get("content")
    parts = content if isinstance(content, list) else ()
    return any(isinstance(part, dict) and part.get("type") == "image_url" for part in parts)


def _from_tensors(rows: TensorDict) -> Episode:
    if "rollout_group" in rows:
        raise EpisodeError("a grouped workflow cannot be an episode of another group")
    explicit = rows.pop("rollout_reward", None)
    reference = None if explicit is None else _as_reference(explicit)
    for key in ("input_ids", "attention_mask"):
        tensor = rows.get(key)
        if not isinstance(tensor, Tensor) or tensor.ndim != 2 or 0 in tensor.shape:
            raise EpisodeError(
                f"{key} must be a tensor of shape [rows, length], got {_show(tensor)}"
            )
    input_ids = rows["input_ids"]
    assert isinstance(input_ids, Tensor), "checked above"
    num_rows, length = input_ids.shape
    for key, dtype in _DTYPES.items():
        if key not in rows:
            continue
        tensor, shape = rows[key], (num_rows,) if key == "rewards" else (num_rows, length)
        if not isinstance(tensor, Tensor) or tuple(tensor.shape) != shape:
            raise EpisodeError(
                f"{key} must be a tensor of shape {list(shape)}, got {_show(tensor)}"
            )
        rows[key] = tensor.detach().to(device="cpu", dtype=dtype)
    mask, logprobs = rows.get("loss_mask"), rows.get("logprobs")
    if isinstance(mask, Tensor) and isinstance(logprobs, Tensor):
        trained = logprobs[mask.bool()]
        if not bool(torch.isfinite(trained).all()):
            raise EpisodeError(
                f"logprobs of trained tokens (loss_mask 1) must be finite, got {trained.tolist()}"
            )
    rewards = rows.get("rewards")
    if isinstance(rewards, Tensor) and not bool(torch.isfinite(rewards).all()):
        raise RewardError(f"rewards must be finite, got {rewards.tolist()}")
    return Episode(value=rows, num_rows=num_rows, reference=reference)


def _as_reference(value: object) -> float:
    try:
        if isinstance(value, bool):
            raise ValueError("a bool is not a reference")
        return as_reward(value.item() if isinstance(value, Tensor) else value)
    except (ValueError, RuntimeError) as error:  # RuntimeError: a tensor of several elements
        raise WorkflowContractError(
            f"rollout_reward must be one finite number for the episode, got {value!r}: {error}"
        ) from None


def _show(value: object) -> str:
    return f"shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
