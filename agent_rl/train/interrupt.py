"""Ctrl-C and SIGTERM: at once while waiting, after the optimizer step while weights change.

The handler raises KeyboardInterrupt in the main thread; inside ``deferred()`` it waits for the end
of the block, so that a checkpoint never holds half of an update. A second signal does not wait;
``is_torn`` says that it came before the end of a block.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """Owns the two handlers between ``__enter__`` and ``__exit__``; inert off the main thread.

    ``is_terminated``: SIGTERM came, so the process is to end with exit code 0.
    """

    def __init__(self) -> None:
        self._is_deferred = False
        self._is_requested = False
        self.is_terminated = False
        self.is_torn = False
        self._previous: dict[signal.Signals, signal._HANDLER] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._handle) for number in _SIGNALS}
        return self

    def __exit__(self, *exc_info: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Hold back the first signal until the end of the block."""
        self._is_deferred = self.is_torn = True
        try:
            yield
            self.is_torn = False
        finally:
            self._is_deferred = False
        if self._is_requested:
            self._is_requested = False
            raise KeyboardInterrupt

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.is_terminated = self.is_terminated or number == signal.SIGTERM
        if self._is_deferred and not self._is_requested:
            self._is_requested = True
            return
        raise KeyboardInterrupt
