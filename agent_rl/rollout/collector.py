"""Collector: lanes of submissions, run on the loop thread as the limits allow.

All state is under one condition; whoever changes it from outside asks the loop to look again
(``_pump``), and whoever waits is woken by each result. It knows no workflow and no dataset.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from agent_rl.errors import AgentRLError, CollectorError
from agent_rl.loop_thread import LoopThread
from agent_rl.rollout.clock import PausableClock
from agent_rl.rollout.lane import Finished, Lane, Submission
from agent_rl.rollout.loop_watch import LoopWatch

T = TypeVar("T")

_POLL_S = 0.5
_ENGINE_TIMEOUT_S = 600.0


class Collector:
    """
    Args:
        run: one submission to its verdict; what it raises is raised at the lane's next call.
        get_version: of the engine's weights; the staleness bound counts in it.
        lanes: those that always exist.
        clock: of the episodes' deadlines; it stands still during a pause.
        at_end: run on the loop once all episodes have ended or were cancelled.
    """

    def __init__(
        self,
        run: Callable[[Submission], Coroutine[Any, Any, Finished]],
        get_version: Callable[[], int],
        lanes: Sequence[Lane],
        clock: PausableClock,
        at_end: Callable[[], Coroutine[Any, Any, None]],
    ) -> None:
        self.changed = threading.Condition()
        self._run = run
        self._get_version = get_version
        self._lanes = list(lanes)
        self._clock = clock
        self._tasks: dict[asyncio.Task[None], Lane] = {}
        self._fault: BaseException | None = None
        self._is_paused = False
        self._is_closed = False
        self._thread = LoopThread(
            "collector", error=CollectorError, on_death=self._wake, at_end=at_end
        )
        self._watch = LoopWatch(self._thread.post)
        self._watch.start()

    # Called from the trainer's thread

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine of the engine on the loop, and wait for it."""
        return self._thread.call(coroutine, timeout_s=_ENGINE_TIMEOUT_S)

    def add(self, lane: Lane, submissions: Sequence[Submission]) -> None:
        with self.changed:
            self.check(lane)
            for submission in submissions:
                lane.add(submission)
        self.look_again()

    def restore(self, lane: Lane, verdicts: Sequence[Finished]) -> None:
        with self.changed:
            self.check(lane)
            for done in verdicts:
                lane.restore(done)
            self.changed.notify_all()

    def look_again(self) -> None:
        """Something outside changed (a version, say): start what may start now."""
        self._thread.post(self._pump)

    def pause(self) -> None:
        """Start nothing more; what runs goes on."""
        with self.changed:
            self._is_paused = True
            self._clock.stop()

    def resume(self) -> None:
        with self.changed:
            self._is_paused = False
            self._clock.go()
        self.look_again()

    @property
    def is_paused(self) -> bool:
        return self._is_paused

    def check(self, lane: Lane | None = None) -> None:
        """Raise what went wrong in the background: once for a lane, always for the thread."""
        if self._is_closed:
            raise CollectorError("the rollout engine is closed")
        cause = self._fault or self._thread.cause
        if isinstance(cause, KeyboardInterrupt):
            raise KeyboardInterrupt from cause
        if cause is not None or not self._thread.is_alive:
            raise CollectorError(f"the collector's background work died: {cause!r}") from cause
        if lane is not None and lane.error is not None:
            error, lane.error = lane.error, None
            raise error

    def wait_for(self, lane: Lane, is_ready: Callable[[], bool], deadline_s: float | None) -> None:
        """Wait until ``is_ready``, which is asked with the lock held.

        Raises:
            TimeoutError: ``deadline_s`` (of time.monotonic) has passed.
            CollectorError: nothing is left that could make it ready, or see ``check``.
        """
        with self.changed:
            while True:
                self.check(lane)
                if is_ready():
                    return
                if not self._is_paused and lane.is_stuck(self._get_version()):
                    raise CollectorError(self._why_stuck(lane)) from lane.last_error
                left_s = _POLL_S if deadline_s is None else deadline_s - time.monotonic()
                if left_s <= 0:
                    raise TimeoutError(f"only {len(lane.finished)} groups are ready: {lane.counts}")
                self.changed.wait(min(left_s, _POLL_S))

    def open(self, lane: Lane) -> None:
        with self.changed:
            self._lanes.append(lane)

    def discard(self, lane: Lane) -> None:
        """Cancel what the lane still has."""
        with self.changed:
            lane.drop_waiting()
            self._lanes.remove(lane)
        self._thread.post(lambda: self._cancel(lane))

    def close(self) -> None:
        """Cancel everything and end the thread. May be called twice."""
        self._is_closed = True
        self._watch.close()
        self._thread.close()
        self._wake()

    # Called in the loop's thread

    def _pump(self) -> None:
        with self.changed:
            if self._is_paused or self._is_closed:
                return
            version = self._get_version()
            started = [(lane, found) for lane in self._lanes for found in lane.start(version)]
        for lane, submission in started:
            task = asyncio.get_running_loop().create_task(self._run_one(lane, submission))
            self._tasks[task] = lane
            task.add_done_callback(self._forget)

    async def _run_one(self, lane: Lane, submission: Submission) -> None:
        done = Finished(submission=submission, status="failed", reason="cancelled")
        error: AgentRLError | None = None
        try:
            done = await self._run(submission)
        except AgentRLError as raised:  # a broken contract, or on_error="raise"
            error = raised
        finally:
            fault = sys.exception()  # whoever is woken by the end of this group must see it
            with self.changed:
                if not isinstance(fault, asyncio.CancelledError):
                    self._fault = self._fault or fault
                lane.end(done)
                lane.error = lane.error or error
                self.changed.notify_all()
        self._pump()

    def _forget(self, task: asyncio.Task[None]) -> None:
        del self._tasks[task]
        if not task.cancelled() and task.exception() is not None:
            self._fault = task.exception()
            self._wake()

    def _cancel(self, lane: Lane) -> None:
        for task, owner in self._tasks.items():
            if owner is lane:
                task.cancel()

    def _wake(self) -> None:
        with self.changed:
            self.changed.notify_all()

    def _why_stuck(self, lane: Lane) -> str:
        if lane.waiting:
            return (
                f"the staleness bound lets nothing start at version {self._get_version()}: "
                f"{lane.counts}; call set_version or update_weights after each training step, or "
                "raise rollout.max_head_offpolicyness"
            )
        why = lane.explain()
        return f"nothing is left to wait for: {lane.counts}" + (f" ({why})" if why else "")
