"""Printed: what the process of an agent prints, shown here as it comes; its end is kept.

It goes to this process's standard error, each line after the agent's name. So much of an episode is
shown and no more, but all of it is read: the process never waits for somebody to look.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable

_CHUNK = 8 << 10
_MAX_SHOWN = 64 << 10


def to_stderr(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()


class Printed:
    """
    Args:
        name: stands before each line.
        show: takes what is to be seen, whole lines of it.
        max_shown: bytes; of what comes after them only the end is kept.
    """

    def __init__(
        self,
        stream: asyncio.StreamReader,
        name: str,
        *,
        show: Callable[[str], None] = to_stderr,
        max_shown: int = _MAX_SHOWN,
    ) -> None:
        self._stream = stream
        self._name = name
        self._show = show
        self._max_shown = self._left = max_shown
        self._begun = b""
        self._kept = b""
        self._reading = asyncio.create_task(self._read())

    @property
    def tail(self) -> str:
        return self._kept.decode("utf-8", errors="replace")

    async def ended(self, timeout_s: float) -> None:
        """Once all of it is shown, or the time is up: what left the process may hold the pipe."""
        await asyncio.wait({self._reading}, timeout=timeout_s)

    def cancel(self) -> None:
        self._reading.cancel()

    async def _read(self) -> None:
        while chunk := await self._stream.read(_CHUNK):
            self._kept = (self._kept + chunk)[-_CHUNK:]
            if self._left > 0:
                self._show_lines(chunk)
        if self._left > 0:
            self._show_line(self._begun)

    def _show_lines(self, chunk: bytes) -> None:
        *lines, self._begun = (self._begun + chunk[: self._left]).split(b"\n")
        for line in lines:
            self._show_line(line)
        self._left -= len(chunk)
        if self._left <= 0:
            self._show_line(self._begun)
            text = f"... more than {self._max_shown} bytes in one episode: the rest is not shown"
            self._show_line(text.encode())

    def _show_line(self, line: bytes) -> None:
        if line:
            self._show(f"[{self._name}] {line.decode('utf-8', errors='replace')}\n")
