"""DiskThread: what one file needs done, in order, by a thread of its own.

A slow disk never holds up users, and one that fails is reported once and stops nothing. What grows
too old is looked for also while nobody writes.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
logger = logging.getLogger(__name__)

_TIDY_EVERY_S = 600.0


class DiskThread:
    """
    Args:
        path: the file, for its messages.
        tidy: called at the start and at the end; with ``is_timed`` every ten minutes too.
    """

    def __init__(self, name: str, path: Path, *, tidy: Callable[[], None], is_timed: bool) -> None:
        self._path = path
        self._tidy = tidy
        self._has_failed = False
        self._worker = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._is_closed = threading.Event()
        self._clock = threading.Thread(target=self._tidy_in_time, name=f"{name}-clock", daemon=True)
        self.soon(tidy)
        if is_timed:
            self._clock.start()

    def soon(self, work: Callable[[], None]) -> None:
        """What it raises is logged, the first time."""
        self._worker.submit(work).add_done_callback(self._report)

    def now(self, work: Callable[[], T]) -> T:
        """After all that was asked for before; raises what it raises."""
        return self._worker.submit(work).result()

    def close(self) -> None:
        """Returns when everything is done."""
        self._is_closed.set()
        if self._clock.is_alive():
            self._clock.join()  # else it might ask for more
        self.soon(self._tidy)
        self._worker.shutdown()

    def _tidy_in_time(self) -> None:
        while not self._is_closed.wait(_TIDY_EVERY_S):
            self.soon(self._tidy)

    def _report(self, done: Future[None]) -> None:
        error = done.exception()
        if error is None or self._has_failed:
            return
        self._has_failed = True
        is_ours = not isinstance(error, OSError)
        logger.warning(
            "not everything is written to %s: %s",
            self._path,
            error,
            exc_info=error if is_ours else None,
        )
