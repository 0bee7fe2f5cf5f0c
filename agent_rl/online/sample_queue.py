"""SampleQueue: judged turns on their way from the gateway's loop to the trainer's thread.

A place is taken before a turn is judged and given back if it leaves no sample, so a trainer that
falls behind holds up judges, never users. ``drain`` takes exactly what it returns: the rest of a
sweep is the beginning of the next batch.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Generic, TypeVar

from agent_rl.engine.mailbox import call_on
from agent_rl.errors import CollectorError

T = TypeVar("T")
logger = logging.getLogger(__name__)

_POLL_S = 0.2  # how soon Ctrl-C is noticed


class SampleQueue(Generic[T]):
    """First in, first out."""

    def __init__(self, max_size: int, *, no_progress_warning_s: float = 30.0) -> None:
        self._max_size = max_size
        self._warning_s = no_progress_warning_s
        self._items: deque[T] = deque()
        self._num_taken = 0
        self._num_put = 0
        self._waiting: deque[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = deque()
        self._changed = threading.Condition()
        self._is_closed = False
        self._cause: BaseException | None = None

    def __len__(self) -> int:
        return len(self._items)

    @asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """Wait for room; inside, one ``put`` will find it."""
        while not self._take_place():
            is_free = asyncio.Event()
            with self._changed:
                self._waiting.append((asyncio.get_running_loop(), is_free))
            await is_free.wait()
        try:
            yield
        finally:
            with self._changed:
                self._num_taken -= 1
                self._wake()

    def _take_place(self) -> bool:
        with self._changed:
            has_room = len(self._items) + self._num_taken < self._max_size
            self._num_taken += has_room
            return has_room

    def _wake(self) -> None:
        """Whoever waits for room looks again; the first that does gets it."""
        while self._waiting:
            loop, is_free = self._waiting.popleft()
            call_on(loop, is_free.set)

    def put(self, item: T) -> None:
        """Never waits. Without a place of its own an item may exceed the size."""
        with self._changed:
            self._items.append(item)
            self._num_put += 1
            self._changed.notify_all()

    def drain(self, batch_size: int, *, drop: Callable[[T], bool] = lambda item: False) -> list[T]:
        """The oldest ``batch_size`` items; waits for them, with a warning where none comes.

        Args:
            drop: asked of each item that is there meanwhile; those are taken out.

        Raises:
            CollectorError: the queue was closed; ``__cause__`` says why, if anything was wrong.
        """
        with self._changed:
            self._wait_for(batch_size, drop)
            items = [self._items.popleft() for _ in range(batch_size)]
            self._wake()
            return items

    def _wait_for(self, batch_size: int, drop: Callable[[T], bool]) -> None:
        num_put, since_s = self._num_put, time.monotonic()
        self.remove(drop)
        while len(self._items) < batch_size:
            if self._is_closed:
                raise CollectorError(
                    f"the source of samples was closed; {len(self._items)} of {batch_size} are left"
                ) from self._cause
            self._changed.wait(_POLL_S)
            self.remove(drop)
            now_s = time.monotonic()
            if self._num_put > num_put:
                num_put, since_s = self._num_put, now_s
            elif now_s - since_s >= self._warning_s:
                since_s = now_s
                logger.warning(
                    "no new sample for %g s: %d of %d are there",
                    self._warning_s,
                    len(self._items),
                    batch_size,
                )

    def remove(self, is_unwanted: Callable[[T], bool]) -> int:
        """Take out all such items; how many there were."""
        with self._changed:
            kept = deque(item for item in self._items if not is_unwanted(item))
            num_removed = len(self._items) - len(kept)
            self._items = kept
            if num_removed:
                self._wake()
            return num_removed

    def close(self, cause: BaseException | None = None) -> None:
        """Whoever waits in ``drain`` gets CollectorError."""
        with self._changed:
            self._is_closed = True
            self._cause = self._cause or cause
            self._changed.notify_all()
