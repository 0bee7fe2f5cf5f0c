"""Fleet: all servers of an engine: meeting them, pausing them, changing their weights.

Invariant: a server that is up holds the fleet's weights, says so itself, and is paused exactly when
the fleet is. New weights: pause, update, check the server's own label, resume. A server that fails
any of it is out; the keeper brings it back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable

from agent_rl.engine.base import WeightUpdate
from agent_rl.engine.fleet_weights import FleetWeights
from agent_rl.engine.keeper import Keeper
from agent_rl.engine.restarter import Restarter
from agent_rl.engine.router import Router
from agent_rl.engine.server import Failures, Server, on_all, reasons_down
from agent_rl.engine.server_api import PauseMode, ServerApi, ServerInfo
from agent_rl.errors import EngineError


class Fleet:
    """To be made and used on the engine's event loop. Arguments as of ``RemoteEngine``."""

    def __init__(
        self,
        api: ServerApi,
        router: Router,
        *,
        on_update: PauseMode,
        control_timeout_s: float,
        health_interval_s: float,
        health_timeout_s: float,
        trainer_address: str,
        restarter: Restarter | None,
    ) -> None:
        self.router = router
        self.max_seq_len = 0
        self.supported: frozenset[str] = frozenset()
        self._api = api
        self._on_update = on_update
        self._timeout_s = control_timeout_s
        self._control = asyncio.Lock()
        self.weights = FleetWeights(
            api,
            router.servers,
            on_update=on_update,
            timeout_s=control_timeout_s,
            address=trainer_address,
        )
        self.keeper = Keeper(
            api,
            router,
            self.weights,
            self._control,
            interval_s=health_interval_s,
            probe_timeout_s=health_timeout_s,
            restore_timeout_s=control_timeout_s,
            restarter=restarter,
        )

    async def connect(self) -> None:
        """Meet the servers. The newest weights among them are the fleet's; older ones are out.

        Raises:
            EngineError: none answers.
        """
        infos: dict[Server, ServerInfo] = {}

        async def meet(server: Server) -> None:
            info = await self.weights.ask(server)  # may be slow at first
            await self._api.resume(server.connection)
            infos[server] = info

        await self._each(self.router.servers, meet)
        if not infos:
            reasons = reasons_down(self.router.servers)
            await self.close()
            await self.disconnect()
            raise EngineError(f"no inference server answers: {reasons}")
        self.max_seq_len = min(info.max_seq_len for info in infos.values())
        self.supported = frozenset.intersection(*(info.supported for info in infos.values()))
        self.weights.adopt(infos)
        self.keeper.start()

    async def close(self) -> None:
        """Fail what is running; leave no server paused."""
        await self.keeper.close()
        async with self._control:
            await self.router.close()
            if self.router.is_paused:
                await self._each(self.router.up, lambda s: self._api.resume(s.connection))
            await self.weights.close()
            for server in self.router.servers:
                server.end_calls("the engine is closed")

    async def disconnect(self) -> None:
        """When no call is on its way: what a pool got back after its end would stay open."""
        for server in self.router.servers:
            await server.connection.close()

    async def pause(self) -> None:
        async with self._control:
            await self._pause(self._on_update)

    async def resume(self) -> None:
        async with self._control:
            await self._resume()

    async def set_version(self, version: int) -> None:
        async with self._control:
            await self._lose(await self.weights.rename(version))

    async def update(self, update: WeightUpdate) -> None:
        """Raises EngineError, with the version as it was, when no server takes the weights."""
        await self.router.until_started()
        async with self._control:
            was_paused = self.router.is_paused
            # Requests with an adapter cannot stay while it is replaced.
            await self._pause("abort" if update.method == "lora" else self._on_update)
            try:
                await self.weights.publish(update)
            finally:
                if not was_paused:
                    await self._resume()
                self.keeper.alarm()

    async def _pause(self, mode: PauseMode) -> None:
        if not self.router.is_paused:
            self.router.is_paused = True
            await self._each(self.router.up, lambda s: self._api.pause(s.connection, mode))

    async def _resume(self) -> None:
        await self._each(self.router.up, lambda s: self._api.resume(s.connection))
        self.router.is_paused = False
        await self.router.look_again()

    async def _each(
        self, servers: Iterable[Server], call: Callable[[Server], Awaitable[None]]
    ) -> None:
        """At once for all; one that fails is out."""
        await self._lose(await on_all(servers, call, timeout_s=self._timeout_s))

    async def _lose(self, failures: Failures) -> None:
        for server, why in failures.items():
            server.mark_down(why)
        await self.router.look_again()
