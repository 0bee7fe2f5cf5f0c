"""PausableClock: seconds during which episodes could make progress.

The engine is paused while weights are updated. A deadline must not run out meanwhile: that would
fail exactly those episodes which happen to run during a long training step.
"""

from __future__ import annotations

import threading
import time


class PausableClock:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stopped_at: float | None = None
        self._stopped_s = 0.0

    def now(self) -> float:
        with self._lock:
            at = time.monotonic() if self._stopped_at is None else self._stopped_at
            return at - self._stopped_s

    def stop(self) -> None:
        with self._lock:
            if self._stopped_at is None:
                self._stopped_at = time.monotonic()

    def go(self) -> None:
        with self._lock:
            if self._stopped_at is not None:
                self._stopped_s += time.monotonic() - self._stopped_at
                self._stopped_at = None
