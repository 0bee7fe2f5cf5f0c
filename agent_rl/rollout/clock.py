"""PausableClock: seconds during which episodes could make progress.

The engine is paused while weights are updated, and an agent may wait for a process to run in. A
deadline must not run out meanwhile: that would fail exactly those episodes which happen to run
during a long training step, and those behind more others than there are processes.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar


class PausableClock:
    def __init__(self, source: Callable[[], float] = time.monotonic) -> None:
        self._source = source
        self._lock = threading.Lock()
        self._stopped_at: float | None = None
        self._stopped_s = 0.0

    def now(self) -> float:
        with self._lock:
            at = self._source() if self._stopped_at is None else self._stopped_at
            return at - self._stopped_s

    def stop(self) -> None:
        with self._lock:
            if self._stopped_at is None:
                self._stopped_at = self._source()

    def go(self) -> None:
        with self._lock:
            if self._stopped_at is not None:
                self._stopped_s += self._source() - self._stopped_at
                self._stopped_at = None


_of_episode: ContextVar[PausableClock | None] = ContextVar("agent_rl_clock", default=None)


def episode_clock(source: Callable[[], float]) -> PausableClock:
    """A clock of the episode that begins in this context."""
    own = PausableClock(source)
    _of_episode.set(own)
    return own


@contextmanager
def standing_still() -> Iterator[None]:
    """Inside, the running episode cannot make progress."""
    clock = _of_episode.get()
    if clock is None:
        yield
        return
    clock.stop()
    try:
        yield
    finally:
        clock.go()


@asynccontextmanager
async def place_in(room: asyncio.Semaphore) -> AsyncIterator[None]:
    """The clock of the running episode stands still until it has its place."""
    with standing_still():
        await room.acquire()
    try:
        yield
    finally:
        room.release()
