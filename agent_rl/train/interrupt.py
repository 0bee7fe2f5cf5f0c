"""Ctrl-C, SIGTERM and SIGHUP: at once while waiting, after the optimizer step while weights change.

The handler raises KeyboardInterrupt in the main thread; inside ``deferred()`` it waits for the end
of the block, so that a checkpoint never holds half of an update. A second signal does not wait.
SIGHUP, which a terminal that closes sends, means what SIGTERM does, unless nohup ignores it.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupts:
    """Owns the handlers between ``__enter__`` and ``__exit__``; inert off the main thread.

    ``is_patient`` ignores all signals but the first: other processes depend on what this one has
    begun. ``is_terminated``: SIGTERM or SIGHUP came, so the process is to end with exit code 0.
    """

    def __init__(self, *, is_patient: bool = False) -> None:
        self._is_patient = is_patient
        self._is_deferred = False
        self._is_requested = False
        self._has_come = False
        self.is_terminated = False
        self._previous: dict[signal.Signals, signal._HANDLER] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                    self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exc_info: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Hold back the first signal until the end of the block."""
        self._is_deferred = True
        try:
            yield
        finally:
            self._is_deferred = False
        if self._is_requested:
            self._is_requested = False
            raise KeyboardInterrupt

    def _handle(self, number: int, frame: FrameType | None) -> None:
        is_first = not self._has_come
        self._has_come = True
        self.is_terminated = self.is_terminated or number != signal.SIGINT
        if self._is_patient and not is_first:
            return
        if self._is_deferred and not self._is_requested:
            self._is_requested = True
            return
        raise KeyboardInterrupt
