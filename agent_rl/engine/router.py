"""Router: which server takes the next request, and who waits until one can.

A request waits while the engine is paused, while every server that is up is full, and for a while
when none is up: longer while one is being started, not at all when all are gone. It is used on one
event loop and knows neither tokens' meaning nor HTTP.

    round_robin    in turn
    least_loaded   the one with the fewest requests
    prefix         the one that has most of the prompt in its cache, unless it is much busier
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from itertools import count
from typing import Literal, TypeAlias

from agent_rl.engine.server import Server, reasons_down
from agent_rl.errors import EngineError

Routing: TypeAlias = Literal["round_robin", "least_loaded", "prefix"]

# Prompts are compared in blocks of this many tokens.
_BLOCK = 128
_MAX_BLOCKS = 1 << 16
# A server with this many requests more than the least busy one loses its prefixes' requests.
_MAX_LEAD = 8


class Router:
    """
    Args:
        max_in_flight: requests that one server gets at once; more wait in order.
        unavailable_timeout_s: how long requests wait while no server is up.
    """

    def __init__(
        self,
        servers: Sequence[Server],
        routing: Routing,
        *,
        max_in_flight: int,
        unavailable_timeout_s: float | None,
    ) -> None:
        self.servers = tuple(servers)
        self.is_paused = False
        self._is_closed = False
        self._routing = routing
        self._max_in_flight = max_in_flight
        self._unavailable_timeout_s = unavailable_timeout_s
        self._turns = count()
        self._places = PrefixPlaces()
        self._changed = asyncio.Condition()
        self._num_waiting = 0
        self._num_offers = 0

    @property
    def up(self) -> list[Server]:
        return [server for server in self.servers if server.is_up]

    async def pick(
        self,
        input_ids: Sequence[int],
        gives_up: Callable[[], bool],
        avoid: Collection[Server] = (),
    ) -> Server | None:
        """A server with room, if possible none of ``avoid``; None once ``gives_up``.

        Raises:
            EngineError: no server was up for ``unavailable_timeout_s``.
        """
        async with self._changed:
            while not gives_up():
                if self._is_closed:
                    raise EngineError("the engine is closed")
                server = None if self.is_paused else self._choose(input_ids, avoid)
                if server is not None:
                    return server
                if self._num_offers:  # what this one avoids may be right for another
                    self._num_offers -= 1
                    self._changed.notify(1)
                await self._wait()
            self._changed.notify(1)
        return None

    def remember(self, server: Server, token_ids: Sequence[int]) -> None:
        """These tokens are now in the server's cache."""
        if self._routing == "prefix":
            self._places.add(token_ids, server)

    async def close(self) -> None:
        """Fail whoever waits, and who comes."""
        self._is_closed = True
        await self.look_again()

    async def release(self) -> None:
        """There is room for one more request; it is offered to each that waits, at most once."""
        async with self._changed:
            self._num_offers = self._num_waiting
            self._changed.notify(1)

    async def look_again(self) -> None:
        """Something that everyone in ``pick`` waits for may have changed."""
        async with self._changed:
            self._changed.notify_all()

    async def until_started(self) -> None:
        """While none is up but one is being started again."""
        async with self._changed:
            while not self.up and self._is_starting:
                await self._changed.wait()

    async def _wait(self) -> None:
        """Until something changes, within ``_limit_s``."""
        self._num_waiting += 1
        try:
            async with asyncio.timeout(self._limit_s()):
                await self._changed.wait()
        except asyncio.CancelledError:
            self._changed.notify(1)  # it may have been this one's turn
            raise
        except TimeoutError:
            self._changed.notify(1)
            if self._limit_s() is not None:
                raise EngineError(
                    f"no inference server is up: {reasons_down(self.servers)}"
                ) from None
        finally:
            self._num_waiting -= 1

    def _limit_s(self) -> float | None:
        """Only a fleet that is down and not paused has one."""
        if self.up or self.is_paused or self._is_starting:
            return None
        if all(server.is_gone for server in self.servers):
            return 0.0
        return self._unavailable_timeout_s

    @property
    def _is_starting(self) -> bool:
        return any(server.is_starting for server in self.servers)

    def _choose(self, input_ids: Sequence[int], avoid: Collection[Server]) -> Server | None:
        wanted = [server for server in self.up if server not in avoid] or self.up
        free = [server for server in wanted if server.in_flight < self._max_in_flight]
        if not free:
            return None
        if self._routing == "round_robin":
            return free[next(self._turns) % len(free)]
        least = min(server.in_flight for server in free)
        if self._routing == "prefix":
            known = self._places.find(input_ids)
            if known in free and known.in_flight <= least + _MAX_LEAD:
                return known
        idlest = [server for server in free if server.in_flight == least]
        return idlest[next(self._turns) % len(idlest)]


class PrefixPlaces:
    """Which server saw which prompt last, in blocks; the oldest are forgotten.

    With blocks of 2: after add((1, 2, 3, 4, 5), s), find((1, 2, 3, 4, 9, 9)) and find((1, 2, 7, 7))
    are s; find((9, 2)) is None.
    """

    def __init__(self, block: int = _BLOCK) -> None:
        self._block = block
        self._servers: OrderedDict[int, Server] = OrderedDict()

    def add(self, token_ids: Sequence[int], server: Server) -> None:
        for key in self._keys(token_ids):
            self._servers[key] = server
            self._servers.move_to_end(key)
        while len(self._servers) > _MAX_BLOCKS:
            self._servers.popitem(last=False)

    def find(self, token_ids: Sequence[int]) -> Server | None:
        """The server of the longest prefix that is known."""
        found = None
        for key in self._keys(token_ids):
            if key not in self._servers:
                break
            found = self._servers[key]
        return found

    def _keys(self, token_ids: Sequence[int]) -> list[int]:
        """One key for each whole block, which stands for all tokens up to its end."""
        keys, key = [], 0
        for end in range(self._block, len(token_ids) + 1, self._block):
            key = hash((key, tuple(token_ids[end - self._block : end])))
            keys.append(key)
        return keys
