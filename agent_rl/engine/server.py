"""Server: one inference server as the engine sees it: its weights, its load, whether it is up.

Invariant: requests go only to a server that is up and holds the version it is believed to hold.
When it goes down, everything in flight on it fails with ServerError at once. ``on_all`` is a
control call of many servers.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from agent_rl.engine.http import ServerConnection
from agent_rl.engine.server_api import Span
from agent_rl.errors import AgentRLError, ServerError

T = TypeVar("T")
logger = logging.getLogger(__name__)

_MAX_LABELS = 100


class Server:
    """To be used on one event loop. It is down until ``mark_up``.

    ``turn`` counts how often it got weights, or a new name for them.
    ``is_torn``: an update may have begun and not ended well, so nobody knows its weights.
    ``is_changing``: it is being given weights now, by one who expects nobody else to do so.
    ``is_starting``: its process is being started again, so it is worth waiting for.
    ``is_gone``: that was in vain.
    ``first_folder``: of the weights it had at first, while all servers had those.
    """

    def __init__(self, connection: ServerConnection) -> None:
        self.connection = connection
        self.version = -1
        self.turn = 0
        self.is_torn = True
        self.is_changing = False
        self.is_starting = False
        self.is_gone = False
        self.first_folder: Path | None = None
        self.in_flight = 0
        self.why_down: str | None = "not contacted yet"
        self._held: dict[str, tuple[int, int]] = {}  # label -> version, turn
        self._calls: set[asyncio.Future[Any]] = set()

    @property
    def address(self) -> str:
        return self.connection.address

    @property
    def is_up(self) -> bool:
        return self.why_down is None

    def mark_up(self) -> None:
        self.why_down, self.is_starting = None, False

    def mark_down(self, why: str) -> None:
        if self.is_gone:
            return  # which says why
        if self.is_up:
            logger.warning("%s is out: %s", self.address, why)
        self.end_calls(why)

    def mark_starting(self, why: str) -> None:
        self.is_starting = True
        self.mark_down(why)

    def mark_gone(self, why: str) -> None:
        self.is_starting, self.is_gone = False, True
        logger.error("%s does not come back: %s", self.address, why)
        self.end_calls(why)

    def end_calls(self, why: str) -> None:
        self.why_down = why
        for call in self._calls:
            call.cancel()

    def hold(self, version: int, label: str) -> None:
        """Its weights are now ``version``, which it calls ``label``."""
        self.version = version
        self.is_torn = False
        self.turn += 1
        self._held.pop(label, None)
        self._held[label] = version, self.turn
        if len(self._held) > _MAX_LABELS:
            del self._held[next(iter(self._held))]

    @property
    def is_free(self) -> bool:
        """It may be given weights: it is there, and nobody else is doing that."""
        return not (self.is_changing or self.is_starting or self.is_gone)

    @contextmanager
    def changing(self) -> Iterator[None]:
        self.is_changing = True
        try:
            yield
        finally:
            self.is_changing = False

    def versions(self, spans: tuple[Span, ...], num_tokens: int, since: int) -> tuple[int, ...]:
        """The version of each token: [0, 2) of "3" and [2, 5) of "4" -> (3, 3, 4, 4, 4).

        Args:
            since: the ``turn`` in which the request was sent. Weights it had before that come back
                when a server starts anew.

        Raises:
            ServerError: spans that do not cover the tokens, or weights that it ought not to have.
        """
        versions: list[int] = []
        for span in spans:
            version, turn = self._held.get(span.label, (-1, -1))
            if turn < since:
                raise ServerError(
                    f"{self.address} sampled from weights it calls {span.label!r}, which it ought "
                    "not to have"
                )
            versions += [version] * (span.end - span.start)
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


Failures: TypeAlias = dict[Server, str]


async def on_all(
    servers: Iterable[Server], call: Callable[[Server], Awaitable[None]], *, timeout_s: float
) -> Failures:
    """Make the call for all of them at once; those for which it failed, and why."""
    failures: Failures = {}

    async def try_on(server: Server) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await call(server)
        except (AgentRLError, TimeoutError) as error:
            failures[server] = reason(error)

    await asyncio.gather(*map(try_on, servers))
    return failures


def reason(error: Exception) -> str:
    return str(error) or "no answer in time"


def reasons_down(servers: Iterable[Server]) -> str:
    return "; ".join(f"{server.address}: {server.why_down}" for server in servers)
