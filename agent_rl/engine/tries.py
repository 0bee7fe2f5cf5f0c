"""Tries: what one request has been through: which servers failed it, how often, when to go on.

Another server is tried at once; after a round of all that are up there is a pause, longer each
time, and at least as long as a busy server asked for.
"""

from __future__ import annotations

from collections.abc import Sequence

from agent_rl.engine.server import Server
from agent_rl.errors import EngineError, ServerBusyError, ServerError, ServerUnreachableError

# Servers that fail one request this often would fail it forever.
_MAX_FAILURES = 6
_PAUSE_S = (0.05, 2.0)
_MAX_BUSY_S = 30.0


class Tries:
    def __init__(self) -> None:
        self.failed_on: set[Server] = set()
        self._num_failures = 0
        self._pause_s = _PAUSE_S[0]
        self._busy_s = 0.0

    def fail(self, server: Server, error: ServerError) -> None:
        """Raises EngineError when the request has failed too often.

        Being busy is no failure of the request, nor is a server that cannot be reached: the keeper
        takes it out, and with the last of them the request begins to wait.
        """
        self.failed_on.add(server)
        if isinstance(error, ServerUnreachableError):
            return
        if isinstance(error, ServerBusyError):
            self._busy_s = max(self._busy_s, min(error.retry_after_s, _MAX_BUSY_S))
            return
        self._num_failures += 1
        if self._num_failures >= _MAX_FAILURES:
            raise EngineError(
                f"one request failed {self._num_failures} times, the last: {error}"
            ) from error

    def advance(self) -> None:
        """It got tokens: pauses are short again."""
        self._pause_s = _PAUSE_S[0]

    def next_pause_s(self, up: Sequence[Server]) -> float:
        """How long to wait before it goes on to one of these servers; a new round may begin."""
        if any(server not in self.failed_on for server in up):
            return 0.0
        pause_s = max(self._pause_s, self._busy_s)
        self._pause_s, self._busy_s = min(2 * self._pause_s, _PAUSE_S[1]), 0.0
        self.failed_on.clear()
        return pause_s
