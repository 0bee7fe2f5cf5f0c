"""One submitted group from start to verdict: run it, build its rows, dump, filter, count.

    workflow -> episodes -> rows with rollout_group -> dump -> should_accept_fn -> journal

Everything that can go wrong in foreign code on this way becomes a Finished; only a broken contract,
or any failure under ``on_error="raise"``, is raised.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

from agent_rl import workflow_context
from agent_rl.config import RolloutConfig
from agent_rl.engine.base import InferenceEngine
from agent_rl.errors import AgentRLError, EpisodeError, EpisodeRejectedError, boundary
from agent_rl.foreign_error import described, place_of
from agent_rl.record.dump import TrajectoryDump
from agent_rl.record.rows import pad_concat
from agent_rl.rollout.episode import FAILURE_KINDS, EpisodeRules, failure_kind
from agent_rl.rollout.group import (
    GroupedRolloutWorkflow,
    GroupResult,
    Slot,
    as_rows,
    merge,
    run_slot,
)
from agent_rl.rollout.lane import Finished, Status, Submission
from agent_rl.stats import tracker as stats_tracker
from agent_rl.types import TensorDict

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

_MAX_KINDS_LOGGED = 100


class TaskRunner:
    def __init__(
        self,
        engine: InferenceEngine,
        rules: EpisodeRules,
        dump: TrajectoryDump | None,
        keep: Callable[[Finished], None] | None = None,
        *,
        seed: int = 1,
    ) -> None:
        """``keep`` puts a verdict on disk before it counts.

        What is written has a thread of its own: agents may keep those of the loop busy.
        Episodes of one ``seed`` sample the same for the same draw, whatever runs beside them.
        """
        self._engine = engine
        self._rules = rules
        self._dump = dump
        self._keep = keep
        self._seed = seed
        self._logged: set[str] = set()
        self._disk = ThreadPoolExecutor(1, thread_name_prefix="agent-rl-disk")

    def close(self) -> None:
        """Once what was begun is written. May be called twice."""
        self._disk.shutdown()

    async def _on_disk(self, write: Callable[[], object]) -> None:
        await asyncio.get_running_loop().run_in_executor(self._disk, write)

    async def run(self, submission: Submission) -> Finished:
        draw = submission.draw
        workflow_context.set(
            workflow_context.WorkflowContext(
                is_eval=submission.is_eval,
                task_id=submission.task_id,
                seed=None if draw is None else f"{self._seed}/{draw}",
            )
        )
        result = await self._run_workflow(submission)
        for slot in result.slots:
            self._count_episode(slot, submission)
        trajectory = None if result.value is None else as_rows(result.value)
        await self._write(submission, trajectory, result.slots)
        finished = self._judge(submission, trajectory, result.slots)
        if self._keep is not None and submission.draw is not None:
            await self._on_disk(partial(self._keep, finished))
        stats_tracker.get(workflow_context.stat_scope()).scalar(
            accepted=finished.status == "accepted",
            rejected=finished.status == "rejected",
            failed=finished.status == "failed",
        )
        return finished

    async def _run_workflow(self, submission: Submission) -> GroupResult:
        workflow, data = submission.workflow, submission.data
        if isinstance(workflow, GroupedRolloutWorkflow):
            return await workflow.run_group(self._engine, data, self._rules)
        slot = await run_slot(workflow, self._engine, data, self._rules)
        value = None if slot.episode is None else merge([slot.episode])
        return GroupResult(value=value, slots=(slot,))

    def _judge(
        self, submission: Submission, trajectory: TensorDict | None, slots: tuple[Slot, ...]
    ) -> Finished:
        if trajectory is None:
            return _without_rows(submission, slots)
        try:
            with boundary("agent"):
                should_accept = submission.should_accept
                is_accepted = should_accept is None or _verdict(should_accept(trajectory))
        except AgentRLError as raised:
            cause = raised.__cause__ or raised
            place = raised.place if isinstance(raised, EpisodeError) else ""
            error = EpisodeError(f"should_accept_fn raised {described(cause)}", place=place)
            error.__cause__ = cause
            if self._rules.on_error == "raise":
                raise error from error.__cause__
            self._log_once(error, submission)
            return Finished(submission=submission, status="failed", reason="filter", error=error)
        if not is_accepted:
            return Finished(submission=submission, status="rejected", reason="filter")
        return Finished(submission=submission, status="accepted", trajectory=trajectory)

    async def _write(
        self, submission: Submission, trajectory: TensorDict | None, slots: tuple[Slot, ...]
    ) -> None:
        """Dump what the filter is about to see, the orphans and the failures."""
        orphans = [o.to_tensor_dict() for s in slots if s.episode for o in s.episode.orphans]
        errors = [_traceback(slot.error) for slot in slots if slot.error is not None]
        if self._dump is None or (trajectory is None and not orphans and not errors):
            return
        write = partial(
            self._dump.write,
            submission.task_id,
            trajectory,
            version=self._engine.get_version(),
            scope=workflow_context.stat_scope(),
            orphans=pad_concat(orphans) if orphans else None,
            errors=errors,
        )
        await self._on_disk(write)

    def _count_episode(self, slot: Slot, submission: Submission) -> None:
        """``failed/<kind>`` and ``truncated`` are rates over all episodes."""
        kind = ""
        is_truncated = slot.episode is not None and slot.episode.is_truncated
        if slot.error is not None:
            self._log_once(slot.error, submission)
            if not isinstance(slot.error, EpisodeRejectedError):
                kind = failure_kind(slot.error)
            elif slot.error.reason == "truncated":
                is_truncated = True
        rates = {f"failed/{name}": float(name == kind) for name in FAILURE_KINDS}
        stats_tracker.get(workflow_context.stat_scope()).scalar(truncated=is_truncated, **rates)

    def _log_once(self, error: AgentRLError, submission: Submission) -> None:
        """The first failure of each kind; others are only counted.

        An agent's own exception with its traceback; that of another's is at level INFO.
        """
        cause = error.__cause__ or error
        place = error.place if isinstance(error, EpisodeError) else ""
        key = f"{type(cause).__name__} {place or place_of(cause)}"
        if key in self._logged or len(self._logged) >= _MAX_KINDS_LOGGED:
            return
        self._logged.add(key)
        is_the_agents = bool(place) and failure_kind(error) == "agent"
        trace = cause if is_the_agents else None
        logger.warning("task %s: %s (logged once)", submission.task_id, error, exc_info=trace)
        if trace is None and not isinstance(error, EpisodeRejectedError):
            logger.info("its traceback", exc_info=cause)


def _verdict(returned: object) -> bool:
    """True, False or what stands for one of them, such as a comparison of numpy or torch."""
    if returned is not None and not inspect.isawaitable(returned):
        return bool(returned)
    if inspect.iscoroutine(returned):
        returned.close()  # Python needs not warn of it too
    what = "None" if returned is None else f"a {type(returned).__name__}"
    raise TypeError(f"it returned {what}; return True to train on the group, else False")


def _traceback(error: AgentRLError) -> str:
    """The message, and the agent's own traceback where its code raised."""
    if error.__cause__ is None:
        return str(error)
    return f"{error}\n" + "".join(traceback.format_exception(error.__cause__))


def _without_rows(submission: Submission, slots: tuple[Slot, ...]) -> Finished:
    """failed: an episode broke; rejected: the workflow, or the rules of the group, said no."""
    errors = [slot.error for slot in slots if slot.error is not None]
    failures = [error for error in errors if not isinstance(error, EpisodeRejectedError)]
    reasons = [error.reason for error in errors if isinstance(error, EpisodeRejectedError)]
    status: Status = "failed" if failures else "rejected"
    if failures:
        reason = failure_kind(failures[-1])
    elif reasons:
        reason = reasons[-1]
    else:
        is_partial = any(slot.episode is not None for slot in slots)
        reason = "incomplete_group" if is_partial else "workflow_returned_none"
    last = next(iter(reversed(failures or errors)), None)
    return Finished(submission=submission, status=status, reason=reason, error=last)


def open_dump(
    config: RolloutConfig, tokenizer: PreTrainedTokenizerBase | None
) -> TrajectoryDump | None:
    """The dump that ``rollout.dump_to_file`` and ``rollout.fileroot`` ask for."""
    if not config.dump_to_file:
        return None
    if config.fileroot is None:
        logger.warning("rollout.dump_to_file: nothing is dumped, for rollout.fileroot is not set")
        return None
    return TrajectoryDump(config.fileroot, None if tokenizer is None else tokenizer.decode)
