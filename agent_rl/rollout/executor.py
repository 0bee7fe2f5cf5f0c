"""RolloutEngine: runs workflows ahead of training, within the limits, in a thread of its own.

The trainer's thread calls plain synchronous methods; episodes run on one event loop (LoopThread);
what waits, runs and is done stands in Lanes, under one lock. Nothing is lost silently: every group
ends as accepted, rejected or failed, and a dead background thread is raised at the next call.
"""

from __future__ import annotations

import copy
import random
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from agent_rl.config import RolloutConfig
from agent_rl.config.explain import require_section
from agent_rl.engine.base import InferenceEngine, StreamItem, WeightUpdate, require_engine
from agent_rl.errors import CollectorError
from agent_rl.record.dump import TrajectoryDump
from agent_rl.rollout.agent import agent_settings
from agent_rl.rollout.clock import PausableClock
from agent_rl.rollout.collector import Collector
from agent_rl.rollout.dataloader import DataSource, as_data, as_native, patience
from agent_rl.rollout.doors import Doors
from agent_rl.rollout.draws import open_draws
from agent_rl.rollout.episode import EpisodeRules
from agent_rl.rollout.lane import STALE, AcceptFn, Counts, Lane, Submission
from agent_rl.rollout.staleness import Limits, head_version
from agent_rl.rollout.submissions import MakeSubmission, Submissions
from agent_rl.rollout.task import TaskRunner, open_dump
from agent_rl.stats import tracker as stats_tracker
from agent_rl.types import GenerationConfig, JsonObject, ModelRequest, ModelResponse, TensorDict

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class RolloutEngine:
    """An InferenceEngine that also runs workflows.

        with RolloutEngine(engine, config.rollout, tokenizer=tokenizer) as rollout:
            groups = rollout.rollout_batch(rows, MyAgent, group_size=4)

    A collected group is a TensorDict: the rows of its usable episodes, padded, and
    ``rollout_group``. The engine is not closed by ``close()``: it belongs to the caller.

    Args:
        tokenizer: needed by agents, not by workflows.
        gconfig: sampling defaults of agents; ``eval_gconfig`` those of evaluation.
        min_usable_group_size: of training groups; a smaller ``group_size`` lowers it.
        seed: of the order of the groups inside a batch, and of what LocalEngine samples for them.
        dump: None: into ``rollout.fileroot``, with ``rollout.dump_to_file``.
        journal: its file; None: in ``rollout.fileroot``, with ``rollout.journal``.

    Raises:
        JournalError: another process has the journal, or it is damaged.
        WrongTypeError: an argument is of another kind.
    """

    def __init__(
        self,
        engine: InferenceEngine,
        config: RolloutConfig | None = None,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        gconfig: GenerationConfig | None = None,
        eval_gconfig: GenerationConfig | None = None,
        min_usable_group_size: int = 1,
        seed: int = 1,
        dump: TrajectoryDump | None = None,
        journal: Path | None = None,
    ) -> None:
        require_engine(engine, "RolloutEngine")
        self.engine = engine
        self.config = config = RolloutConfig() if config is None else config
        require_section(config, RolloutConfig, "RolloutEngine")
        if tokenizer is None and config.tokenizer_path is not None:
            from agent_rl.engine.loading import load_tokenizer

            tokenizer = load_tokenizer(config.tokenizer_path)
        doors = Doors(tokenizer)
        settings = agent_settings(config.agent, tokenizer, gconfig, eval_gconfig, doors)
        self._maker = Submissions(config, settings, min_usable_group_size).maker
        self._seed = seed
        self._num_batches = 0
        self._max_concurrent = config.max_concurrent_rollouts or config.consumer_batch_size
        self._queue_size = config.queue_size or 16 * self._max_concurrent
        self._counts = {False: Counts(), True: Counts()}
        bound = Limits(
            max_concurrent=self._max_concurrent,
            batch_size=config.consumer_batch_size,
            max_staleness=config.max_head_offpolicyness,
        )
        self._stream = Lane(limits=bound, counts=self._counts[False])
        self._eval = Lane(limits=self._no_bound, counts=self._counts[True])
        clock = PausableClock()
        rules = EpisodeRules(
            timeout_s=config.episode_timeout_s,
            on_error=config.on_error,
            clock=clock.now,
            budget=config.budget,
        )
        dump = open_dump(config, tokenizer) if dump is None else dump
        self._draws = open_draws(config, journal)
        keep = self._draws.keep if config.journal else None
        self._runner = TaskRunner(engine, rules, dump, keep, seed=seed)
        lanes = (self._stream, self._eval)
        end = settings[False].close
        self._collector = Collector(self._runner.run, engine.get_version, lanes, clock, end)

    # Collecting

    def submit(
        self,
        data: JsonObject,
        workflow: object,
        workflow_kwargs: Mapping[str, Any] | None = None,
        should_accept_fn: AcceptFn | str | None = None,
        group_size: int = 1,
        task_id: str | int | None = None,
        is_eval: bool = False,
    ) -> str:
        """Queue one datum and return its task id. See ``resolve_workflow`` for ``workflow``.

        Raises:
            WorkflowResolutionError: ``workflow`` or ``should_accept_fn`` cannot be used.
            CollectorError: ``rollout.queue_size`` groups wait already, or the collector is down.
        """
        make = self._maker(workflow, workflow_kwargs, should_accept_fn, group_size, is_eval)
        lane = self._eval if is_eval else self._stream
        if len(lane.waiting) >= self._queue_size:
            raise CollectorError(
                f"rollout.queue_size={self._queue_size} groups wait already; collect some with "
                "wait() first"
            )
        if is_eval:
            submission = make(as_native(data), None, task_id)
            self._collector.add(lane, [submission])
        else:
            draw = self._draws.next(data)
            submission = make(draw.data, draw.number, task_id)
            self._add_drawn([submission])
        return submission.task_id

    def wait(
        self, count: int, timeout: float | None = None, *, is_eval: bool = False
    ) -> list[TensorDict]:
        """The ``count`` oldest accepted groups of ``submit``, in a seeded order.

        Rejected and failed groups do not count. What is not taken stays for the next call.

        Raises:
            TimeoutError: fewer were accepted within ``timeout`` seconds.
            CollectorError: so few are left that waiting is in vain, or the collector is down.
            WorkflowContractError: a workflow broke the contract (raised once).
        """
        if count < 1:
            raise ValueError(f"count is {count}; it must be at least 1")
        lane = self._eval if is_eval else self._stream
        deadline_s = None if timeout is None else time.monotonic() + timeout
        self._collector.wait_for(lane, lambda: len(lane.finished) >= count, deadline_s)
        return self._take(lane, count)

    def rollout_batch(
        self,
        data_list: Sequence[JsonObject],
        workflow: object,
        workflow_kwargs: Mapping[str, Any] | None = None,
        should_accept_fn: AcceptFn | str | None = None,
        group_size: int = 1,
        is_eval: bool = False,
    ) -> list[TensorDict | None]:
        """Run every datum once, now, whatever the staleness bound; results in the data's order.

        None stands for a group that was rejected or failed. Raises as ``wait`` does.
        """
        self._refuse_if_paused()
        make = self._maker(workflow, workflow_kwargs, should_accept_fn, group_size, is_eval)
        lane = Lane(limits=self._no_bound, counts=self._counts[is_eval], keeps_all=True)
        self._collector.open(lane)
        try:
            self._collector.add(lane, [make(data) for data in as_data(data_list)])
            num_items = len(data_list)
            self._collector.wait_for(lane, lambda: len(lane.finished) == num_items, None)
        finally:
            self._collector.discard(lane)
        return [done.trajectory for done in lane.take(num_items)]

    def prepare_batch(
        self,
        dataloader: DataSource,
        workflow: object,
        workflow_kwargs: Mapping[str, Any] | None = None,
        should_accept_fn: AcceptFn | str | None = None,
        group_size: int | None = None,
        dynamic_bs: bool = False,
    ) -> list[TensorDict]:
        """One training batch; groups for the next ones go on running within the limits.

        Exactly ``dataloader.batch_size`` accepted groups, the oldest first, in a seeded order.
        With ``dynamic_bs`` that many verdicts are enough, so the list may be shorter.

        Raises:
            CollectorError: nothing is accepted any more, no version bump came since the last
                batches, or the collector is down.
            WorkflowContractError: a workflow broke the contract.
        """
        self._refuse_if_paused()
        group_size = self.config.group_size if group_size is None else group_size
        make = self._maker(workflow, workflow_kwargs, should_accept_fn, group_size, False)
        limit = patience(dataloader)
        lane, size = self._stream, dataloader.batch_size

        def is_full() -> bool:
            return (lane.ended if dynamic_bs else len(lane.finished)) >= size

        while not is_full():
            if lane.fruitless >= limit:
                self._give_up(lane)
            self._top_up(dataloader, make)
            self._collector.wait_for(
                lane,
                lambda: is_full() or self._missing(size) > 0 or lane.fruitless >= limit,
                None,
            )
        if self.config.max_head_offpolicyness > 0:
            self._top_up(dataloader, make)  # what it raises leaves the groups where they are
        groups = self._take(lane, size)
        self._record_staleness(groups)
        return groups

    def _top_up(self, dataloader: DataSource, make: MakeSubmission) -> None:
        with self._collector.changed:  # an error in between would lose what is drawn
            self._collector.check(self._stream)
            missing = self._missing(dataloader.batch_size)
            draws = self._draws.take(dataloader, max(0, missing))
            self._add_drawn([make(draw.data, draw.number) for draw in draws])

    def _add_drawn(self, submissions: Sequence[Submission]) -> None:
        """To the training lane; those that an earlier process has finished are done at once."""
        version, bound = self.get_version(), self.config.max_head_offpolicyness
        verdicts = [self._draws.verdict(s, version=version, bound=bound) for s in submissions]
        known = [verdict for verdict in verdicts if verdict is not None]
        new = [s for s, verdict in zip(submissions, verdicts, strict=True) if verdict is None]
        if known:
            self._collector.restore(self._stream, known)
            for verdict in known:
                stats_tracker.get("rollout").scalar(dropped_stale=verdict.reason == STALE)
        self._collector.add(self._stream, new)

    def _missing(self, size: int) -> int:
        """Data to draw now.

        Ahead of training one batch always waits, so that a new version or a rejection starts work
        at once. Synchronously no more is drawn than the batch needs: nothing runs between batches.
        """
        lane = self._stream
        if self.config.max_head_offpolicyness > 0:
            return size - len(lane.waiting)
        return size - len(lane.waiting) - len(lane.running) - len(lane.finished)

    def _take(self, lane: Lane, count: int) -> list[TensorDict]:
        with self._collector.changed:
            taken = lane.take(count)
        groups = [done.trajectory for done in taken if done.trajectory is not None]
        random.Random(f"{self._seed}/{self._num_batches}").shuffle(groups)
        self._num_batches += 1
        return groups

    def _record_staleness(self, groups: Sequence[TensorDict]) -> None:
        """The bound is on starting: a group that takes long is older when it ends."""
        version = self.get_version()
        ages = [
            # Restored groups may be of versions that a crash took back: not older than new.
            max(0, version - oldest)
            for group in groups
            if (oldest := head_version(group)) >= 0
        ]
        if ages:
            mean = sum(ages) / len(ages)
            stats_tracker.get("rollout").scalar(staleness=mean, max_staleness=max(ages))

    def _refuse_if_paused(self) -> None:
        if self._collector.is_paused:
            raise CollectorError("the rollout engine is paused; call resume() first")

    def _give_up(self, lane: Lane) -> None:
        count, why = lane.fruitless, lane.explain()
        if lane.last_error is not None:
            why = f"{why}; the last: {lane.last_error}"
        lane.fruitless = 0
        raise CollectorError(
            f"the last {count} groups gave nothing to train on ({why}); check the agent, its "
            "reward and should_accept_fn"
        ) from lane.last_error

    # Versions, pausing, closing

    def pause(self) -> None:
        """Start no further group, and return once the engine decodes nothing."""
        self._collector.pause()
        self._collector.call(self.engine.pause())

    def resume(self) -> None:
        self._collector.call(self.engine.resume())
        self._collector.resume()

    def update_weights(self, update: WeightUpdate) -> None:
        """Running generations go on under the new version from the tokens they have."""
        self._collector.call(self.engine.update_weights(update))
        self.set_version(update.version)

    def set_version(self, version: int) -> None:
        """A new version makes room for one more batch."""
        self.engine.set_version(version)
        self._collector.look_again()

    def get_version(self) -> int:
        return self.engine.get_version()

    def close(self) -> None:
        """Cancel all episodes and end the thread, within seconds. May be called twice."""
        self._collector.close()
        self._runner.close()
        self._draws.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # Numbers and state

    def counts(self, *, is_eval: bool = False) -> Counts:
        """submitted = waiting + running + accepted + rejected + failed, in groups."""
        with self._collector.changed:
            return copy.copy(self._counts[is_eval])

    def export_stats(self) -> dict[str, float]:
        """Metrics since the last call, of training and of evaluation where there was any."""
        scopes = {False: "rollout", True: "eval-rollout"}
        used = [scope for is_eval, scope in scopes.items() if self._counts[is_eval].submitted]
        return {key: v for scope in used for key, v in stats_tracker.get(scope).export().items()}

    def state_dict(self) -> JsonObject:
        """Plain JSON: which data were drawn and not yet handed over, oldest first."""
        with self._collector.changed:
            draws = self._draws.state(self._stream.unconsumed())
        return {**draws, "num_batches": self._num_batches}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there: ``prepare_batch`` begins with the data that were not handed over.

        Groups that the journal has are handed over without being run again.
        """
        self._draws.load(state)
        self._num_batches = int(state["num_batches"])

    def mark_trained(self, step: int) -> None:
        """What ``state_dict`` said last is on disk, after ``step`` training steps.

        Groups that were handed over before leave the journal.
        """
        self._draws.mark_trained(step)

    # The engine itself

    @property
    def max_seq_len(self) -> int:
        return self.engine.max_seq_len

    @property
    def supported(self) -> frozenset[str]:
        return self.engine.supported

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        return await self.engine.agenerate(req)

    def astream(self, req: ModelRequest) -> AsyncIterator[StreamItem]:
        return self.engine.astream(req)

    async def abort(self, rid: str) -> None:
        await self.engine.abort(rid)

    async def health(self) -> bool:
        return await self.engine.health()

    @property
    def _no_bound(self) -> Limits:
        return Limits(max_concurrent=self._max_concurrent)
