"""GuardedProtocol: uvicorn's HTTP protocol with a limit on how long and how large a head may be.

uvicorn waits for the rest of a head for ever, and its faster parser takes any size. A client that
sends headers byte by byte would hold a connection at no cost.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol


class GuardedProtocol(AutoHTTPProtocol):  # type: ignore[misc,valid-type]
    """The limits are set on a subclass, because uvicorn makes the instances."""

    max_head_bytes: int
    head_timeout_s: float

    def connection_made(self, transport: asyncio.Transport) -> None:
        self._deadline: asyncio.TimerHandle | None = None
        self._head_bytes = 0
        super().connection_made(transport)
        self._guard(0)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._guard(len(data))

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        super().connection_lost(exc)

    def _guard(self, num_bytes: int) -> None:
        """A body that is still sent after its refusal is read for as long, so that the refusal
        arrives."""
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            self._disarm()
            return
        if self._deadline is None:
            self._deadline = self.loop.call_later(self.head_timeout_s, self.transport.close)
        if cycle is None or not cycle.more_body:
            self._head_bytes += num_bytes
            if self._head_bytes > self.max_head_bytes:
                self.transport.close()

    def _disarm(self) -> None:
        self._head_bytes = 0
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def guarded(*, max_head_bytes: int, head_timeout_s: float) -> Any:
    """The protocol class for one server."""
    limits = {"max_head_bytes": max_head_bytes, "head_timeout_s": head_timeout_s}
    return type("GuardedProtocol", (GuardedProtocol,), limits)
