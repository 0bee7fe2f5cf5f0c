"""Keeper: watches over the servers, takes a dead one out of service and brings it back.

Each server has a task of its own, so that one that hangs or is loading weights keeps nobody from
seeing another one die. A server comes back when it answers and has the present weights. It knows
nothing of requests; whoever sees one fail may ``suspect`` its server.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress

from agent_rl.engine.fleet_weights import FleetWeights
from agent_rl.engine.restarter import Restarter
from agent_rl.engine.router import Router
from agent_rl.engine.server import Server, reason
from agent_rl.engine.server_api import ServerApi
from agent_rl.errors import AgentRLError, EngineError

logger = logging.getLogger(__name__)

# A probe may be late on a loaded machine; a second one in a row is not.
_MAX_STRIKES = 2


class Keeper:
    """
    Args:
        control: held by whoever changes the weights or pauses the servers.
        interval_s: how often each server is asked whether it is well.
        probe_timeout_s: how long it may take to answer that.
        restore_timeout_s: how long it may take to load the present weights.
        restarter: of the servers' processes, where they are ours.
    """

    def __init__(
        self,
        api: ServerApi,
        router: Router,
        weights: FleetWeights,
        control: asyncio.Lock,
        *,
        interval_s: float,
        probe_timeout_s: float,
        restore_timeout_s: float,
        restarter: Restarter | None = None,
    ) -> None:
        self._api = api
        self._router = router
        self._weights = weights
        self._control = control
        self._interval_s = interval_s
        self._probe_timeout_s = probe_timeout_s
        self._restore_timeout_s = restore_timeout_s
        self._restarter = restarter
        self._alarms = {server: asyncio.Event() for server in router.servers}
        self._strikes = dict.fromkeys(router.servers, 0)
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._keep(server)) for server in self._alarms]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def suspect(self, server: Server, why: str) -> None:
        """A request failed on it: look at once. Without an answer it is out."""
        logger.info("%s", why)
        self._strikes[server] = _MAX_STRIKES - 1
        self._alarms[server].set()

    def alarm(self) -> None:
        """Look after all of them at once."""
        for alarm in self._alarms.values():
            alarm.set()

    async def _keep(self, server: Server) -> None:
        while not server.is_gone:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._interval_s):
                    await self._alarms[server].wait()
            self._alarms[server].clear()
            await self._look_after(server)

    async def _look_after(self, server: Server) -> None:
        if server.is_changing:
            return  # an update waits for it with a limit of its own
        if self._restarter is not None:
            await self._restarter.look_after(server)
            if server.is_gone:
                return
        was_up = server.is_up
        try:
            await (self._probe(server) if was_up else self._bring_back(server))
            self._strikes[server] = 0
        except (AgentRLError, TimeoutError) as error:
            self._strikes[server] += 1
            if not was_up or self._strikes[server] >= _MAX_STRIKES:
                server.mark_down(reason(error))
                await self._router.look_again()
        if server.is_starting:
            server.is_starting = False
            await self._router.look_again()

    async def _probe(self, server: Server) -> None:
        before = self._weights.present
        async with asyncio.timeout(self._probe_timeout_s):
            info = await self._api.describe(server.connection)
        lack = self._weights.lacks(info)
        is_settled = before == self._weights.present and not self._control.locked()
        if lack is not None and is_settled:
            self._strikes[server] = _MAX_STRIKES
            raise EngineError(lack)

    async def _bring_back(self, server: Server) -> None:
        """Give it the present weights, then requests. An update need not wait for that."""
        with server.changing():
            async with asyncio.timeout(self._probe_timeout_s):
                info = await self._weights.ask(server)
            present = self._weights.present
            async with asyncio.timeout(self._restore_timeout_s):
                await self._api.pause(server.connection, "abort")
                await self._weights.restore(server, info)
        async with self._control:
            if self._weights.present != present or server.is_up:
                return  # there are newer ones: next time
            async with asyncio.timeout(self._probe_timeout_s):
                if not self._router.is_paused:
                    await self._api.resume(server.connection)
            server.hold(self._weights.version, self._weights.label)
            server.mark_up()
            logger.warning("%s is back with weights %d", server.address, server.version)
            await self._router.look_again()
