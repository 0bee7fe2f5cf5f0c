"""What a sink is, and the guard that keeps its failures away from training.

Invariant: nothing that a sink does - raise, fill the disk, hang - reaches ``commit``. It costs the
sink its own records and is reported once.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

logger = logging.getLogger(__name__)
_MAX_WAITING = 1000
_OPEN_RETRY_DELAYS_S = (1.0, 5.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """One row of metrics. ``step`` strictly increases; the other counters are the trainer's."""

    step: int
    epoch: int
    epoch_step: int
    global_step: int
    header: str
    metrics: Mapping[str, float]
    line: str = ""
    """The step in one line, for people."""
    summary: str = ""
    """The metrics in a few words, for people."""


class Sink(Protocol):
    """Where metrics go. ``open`` comes before the first ``log``; any of them may raise."""

    @property
    def name(self) -> str: ...

    def open(self, next_step: int) -> None:
        """``next_step`` is 0 for a new run, more for one that goes on after a resume."""

    def log(self, commit: Commit) -> None: ...

    def close(self) -> None: ...


class GuardedSink:
    """Runs a sink here and now, and survives it. For sinks on this machine."""

    def __init__(self, sink: Sink, *, open_retry_delays_s: Sequence[float] = ()) -> None:
        self.name = sink.name
        self._sink = sink
        self._delays_s = open_retry_delays_s
        self._is_open = False
        self._is_dead = False
        self._num_failed = 0

    def log(self, commit: Commit) -> None:
        if not self._is_open and not self._is_dead:
            self._open(commit.step)
        if self._is_dead:
            return
        try:
            self._sink.log(commit)
        except Exception as error:  # foreign code: whatever it raises is its own loss
            self._report(error)

    def _open(self, next_step: int) -> None:
        for delay_s in (*self._delays_s, None):
            try:
                self._sink.open(next_step)
            except Exception as error:  # as above
                if delay_s is None:
                    self._is_dead = True
                    self._report(error)
                else:
                    logger.info("metrics sink %s: %s; trying again", self.name, error)
                    time.sleep(delay_s)
            else:
                self._is_open = True
                return

    def _report(self, error: Exception) -> None:
        self._num_failed += 1
        if self._num_failed == 1:
            logger.warning(
                "metrics sink %s failed (%s: %s); training goes on without it, and later "
                "failures are not reported",
                self.name,
                type(error).__name__,
                error,
            )

    def request_close(self) -> None:
        """Start to finish; ``join`` waits for it."""

    def join(self, deadline_s: float) -> None:
        """Finish what was opened, once. ``deadline_s`` is on the monotonic clock."""
        if not self._is_open:
            return
        self._is_open, self._is_dead = False, True
        try:
            self._sink.close()
        except Exception as error:  # as above
            self._report(error)


class BackgroundSink:
    """Runs a sink in a thread of its own, behind a bounded queue. For sinks that may hang."""

    def __init__(self, sink: Sink) -> None:
        self.name = sink.name
        self._guarded = GuardedSink(sink, open_retry_delays_s=_OPEN_RETRY_DELAYS_S)
        self._waiting: deque[Commit] = deque()
        self._changed = threading.Condition()
        self._is_closing = False
        self._is_dropping = False
        self._thread = threading.Thread(target=self._run, name=f"sink-{self.name}", daemon=True)
        self._thread.start()

    def log(self, commit: Commit) -> None:
        with self._changed:
            if len(self._waiting) < _MAX_WAITING:
                self._waiting.append(commit)
                self._changed.notify()
            elif not self._is_dropping:
                self._is_dropping = True
                logger.warning(
                    "metrics sink %s is %d steps behind; steps it has no room for are lost",
                    self.name,
                    _MAX_WAITING,
                )

    def request_close(self) -> None:
        with self._changed:
            self._is_closing = True
            self._changed.notify()

    def join(self, deadline_s: float) -> None:
        self._thread.join(max(0.0, deadline_s - time.monotonic()))
        if self._thread.is_alive():
            logger.warning(
                "metrics sink %s did not finish in stats_logger.close_timeout_s; up to %d of its "
                "last steps may be lost",
                self.name,
                len(self._waiting) + 1,
            )

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._is_closing)
                if not self._waiting:
                    break
                commit = self._waiting.popleft()
            self._guarded.log(commit)
        self._guarded.join(time.monotonic())
