"""Server: one inference server as the engine sees it: its weights, its load, whether it is up.

Invariant: requests go only to a server that is up and holds the version it is believed to hold.
When it goes down, everything in flight on it fails with ServerError at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

from agent_rl.engine.http import ServerConnection
from agent_rl.engine.server_api import Span
from agent_rl.errors import ServerError

T = TypeVar("T")

_MAX_LABELS = 100


class Server:
    """To be used on one event loop. It is down until ``mark_up``.

    ``is_torn``: an update began and has not ended well, so nobody knows its weights.
    ``first_folder``: of the weights it had at first, as long as the fleet has published no others.
    """

    def __init__(self, connection: ServerConnection) -> None:
        self.connection = connection
        self.version = -1
        self.is_torn = False
        self.first_folder: Path | None = None
        self.in_flight = 0
        self.why_down: str | None = "not contacted yet"
        self._versions: dict[str, int] = {}
        self._calls: set[asyncio.Future[Any]] = set()

    @property
    def address(self) -> str:
        return self.connection.address

    @property
    def is_up(self) -> bool:
        return self.why_down is None

    def mark_up(self) -> None:
        self.why_down = None

    def mark_down(self, why: str) -> None:
        self.why_down = why
        for call in self._calls:
            call.cancel()

    def hold(self, version: int, label: str) -> None:
        """Its weights are now ``version``, which it calls ``label``."""
        self.version = version
        self.is_torn = False
        self._versions[label] = version
        if len(self._versions) > _MAX_LABELS:
            del self._versions[next(iter(self._versions))]

    def versions(self, spans: tuple[Span, ...], num_tokens: int) -> tuple[int, ...]:
        """The version of each token: [0, 2) of "3" and [2, 5) of "4" -> (3, 3, 4, 4, 4).

        Raises:
            ServerError: spans that do not cover the tokens, or weights that are not ours.
        """
        versions: list[int] = []
        for span in spans:
            if span.label not in self._versions:
                raise ServerError(
                    f"{self.address} sampled from weights it calls {span.label!r}, which were not "
                    "published here"
                )
            versions += [self._versions[span.label]] * (span.end - span.start)
        if len(versions) != num_tokens:
            raise ServerError(
                f"{self.address} sent {num_tokens} tokens and weight versions of {len(versions)}"
            )
        return tuple(versions)

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Its result; ServerError as soon as the server is marked down."""
        call = asyncio.ensure_future(work)
        self._calls.add(call)
        self.in_flight += 1
        try:
            await asyncio.wait({call})
            if call.cancelled():
                raise ServerError(f"{self.address} is down: {self.why_down}")
            return call.result()
        finally:
            self.in_flight -= 1
            self._calls.discard(call)
            call.cancel()
