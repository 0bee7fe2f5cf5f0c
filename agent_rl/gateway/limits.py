"""What one session may use: calls at a time, and calls in any minute."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from agent_rl.errors import RefusedError
from agent_rl.gateway.sessions import Usage

_MINUTE_S = 60.0


class Limits:
    def __init__(
        self, *, max_concurrent: int, max_per_minute: int | None, clock: Callable[[], float]
    ) -> None:
        self._max_concurrent = max_concurrent
        self._max_per_minute = max_per_minute
        self._clock = clock

    @contextmanager
    def running(self, usage: Usage) -> Iterator[None]:
        """Around one call. Raises RefusedError (429) that says when to come back."""
        now = self._clock()
        if usage.num_running >= self._max_concurrent:
            raise RefusedError(
                429,
                f"max_concurrent_requests={self._max_concurrent} calls of this session are running",
                code="too_many_concurrent_requests",
                retry_after_s=1,
            )
        self._count(usage, now)
        usage.num_running += 1
        try:
            yield
        finally:
            usage.num_running -= 1
            usage.last_used = self._clock()

    def _count(self, usage: Usage, now: float) -> None:
        if self._max_per_minute is None:
            return
        starts = usage.starts
        while starts and now - starts[0] >= _MINUTE_S:
            starts.popleft()
        if len(starts) >= self._max_per_minute:
            raise RefusedError(
                429,
                f"max_requests_per_minute={self._max_per_minute} calls of this session are used up",
                code="rate_limit",
                retry_after_s=math.ceil(_MINUTE_S - (now - starts[0])),
            )
        starts.append(now)
