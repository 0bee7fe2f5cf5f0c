"""Fleet: which weights the servers hold, and bringing servers in and out of service.

Invariant: a server that is up holds the fleet's version, says so itself, and is paused exactly when
the fleet is. New weights: pause, update, check the server's own label, resume. A server that fails
any of it is out; the keeper brings it back once it answers and has the present weights.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from agent_rl.engine.base import WeightUpdate
from agent_rl.engine.broadcast import Broadcaster
from agent_rl.engine.router import Router
from agent_rl.engine.server import Server
from agent_rl.engine.server_api import BroadcastApi, PauseMode, ServerApi, ServerInfo
from agent_rl.errors import AgentRLError, ConfigError, EngineError

logger = logging.getLogger(__name__)

_PROBE_TIMEOUT_S = 30.0
# A probe may be late on a loaded machine; a second one in a row is not.
_MAX_STRIKES = 2


class Fleet:
    """To be made and used on the engine's event loop. Arguments as of ``RemoteEngine``.

    ``version`` is what tokens are marked with; ``adapter`` the LoRA adapter that requests name. The
    servers' label is that of their base weights, which an adapter leaves as it is.
    """

    def __init__(
        self,
        api: ServerApi,
        router: Router,
        *,
        on_update: PauseMode,
        control_timeout_s: float,
        health_interval_s: float,
        address: str,
    ) -> None:
        self.router = router
        self.version = 0
        self.adapter: str | None = None
        self.max_seq_len = 0
        self.supported: frozenset[str] = frozenset()
        self._api = api
        self._on_update = on_update
        self._control_timeout_s = control_timeout_s
        self._health_interval_s = health_interval_s
        self._label = ""
        self._folder: Path | None = None
        self._adapter_folder: Path | None = None
        self._broadcaster = (
            Broadcaster(api, address=address, timeout_s=control_timeout_s)
            if isinstance(api, BroadcastApi)
            else None
        )
        self._control = asyncio.Lock()
        self._is_alarmed = asyncio.Event()
        self._strikes: dict[Server, int] = {}
        self._keeper: asyncio.Task[None] | None = None

    async def connect(self) -> None:
        """Meet the servers. The newest weights among them are the fleet's; older ones are out.

        Raises:
            EngineError: none answers.
        """
        infos: dict[Server, ServerInfo] = {}

        async def meet(server: Server) -> None:
            info = await self._api.describe(server.connection)  # may be slow at first
            await self._api.resume(server.connection)
            infos[server] = info

        await self._each(self.router.servers, meet)
        if not infos:
            reasons = self._reasons()
            await self.close()
            raise EngineError(f"no inference server answers: {reasons}")
        self.max_seq_len = min(info.max_seq_len for info in infos.values())
        self.supported = frozenset.intersection(*(info.supported for info in infos.values()))
        newest = max(infos.values(), key=lambda info: _version(info.weight_version))
        self.version, self._label = _version(newest.weight_version), newest.weight_version
        for server, info in infos.items():
            if info.weight_version == self._label:
                server.hold(self.version, self._label)
                server.first_folder = info.folder
                server.mark_up()
            else:
                server.mark_down(f"it has weights {info.weight_version!r}, not {self._label!r}")
        self._keeper = asyncio.create_task(self._keep())

    async def close(self) -> None:
        """Fail what is running; leave no server paused."""
        if self._keeper is not None:
            self._keeper.cancel()
        async with self._control:
            await self.router.close()
            if self.router.is_paused:
                await self._each(self.router.up, lambda s: self._api.resume(s.connection))
            if self._broadcaster is not None:
                await self._broadcaster.close()
            for server in self.router.servers:
                server.mark_down("the engine is closed")
            for server in self.router.servers:
                await server.connection.close()

    # Pausing

    async def pause(self) -> None:
        async with self._control:
            await self._pause(self._on_update)

    async def resume(self) -> None:
        async with self._control:
            await self._resume()

    async def _pause(self, mode: PauseMode) -> None:
        if not self.router.is_paused:
            self.router.is_paused = True
            await self._each(self.router.up, lambda s: self._api.pause(s.connection, mode))

    async def _resume(self) -> None:
        await self._each(self.router.up, lambda s: self._api.resume(s.connection))
        self.router.is_paused = False
        await self.router.look_again()

    # New weights

    async def set_version(self, version: int) -> None:
        async def rename(server: Server) -> None:
            await self._api.set_label(server.connection, str(version))
            server.hold(version, str(version))

        async with self._control:
            self.version, self._label = version, str(version)
            await self._each(self.router.up, rename)

    async def update(self, update: WeightUpdate) -> None:
        """Raises EngineError, with the version as it was, when no server takes the weights."""
        publish = {
            "disk": self._publish_folder,
            "lora": self._publish_adapter,
            "distributed": self._publish_broadcast,
        }.get(update.method)
        if publish is None:
            raise EngineError(
                f"inference servers cannot take weights by method {update.method!r}; use 'disk', "
                "'distributed' or 'lora'"
            )
        async with self._control:
            was_paused = self.router.is_paused
            # Requests with an adapter cannot stay while it is replaced.
            await self._pause("abort" if update.method == "lora" else self._on_update)
            try:
                await publish(update)
            finally:
                if not was_paused:
                    await self._resume()
                self._is_alarmed.set()

    async def _publish_folder(self, update: WeightUpdate) -> None:
        folder, label = _folder(update), str(update.version)

        async def take(server: Server) -> None:
            await self._load_folder(server, folder, label)
            server.hold(update.version, label)

        await self._publish(update, take)
        self._label, self._folder = label, folder

    async def _publish_adapter(self, update: WeightUpdate) -> None:
        folder, old, new = _folder(update), self.adapter, f"v{update.version}"

        async def take(server: Server) -> None:
            await self._api.load_adapter(server.connection, new, folder)
            if old is not None:
                await self._api.unload_adapter(server.connection, old)
            server.version = update.version

        await self._publish(update, take)
        self.adapter, self._adapter_folder = new, folder

    async def _publish(
        self, update: WeightUpdate, take: Callable[[Server], Awaitable[None]]
    ) -> None:
        """All servers take the weights at once. One that fails is out, if another did not."""
        servers, failures = self.router.up, {}

        async def try_to(server: Server) -> None:
            try:
                async with asyncio.timeout(self._control_timeout_s):
                    await take(server)
            except (AgentRLError, TimeoutError) as error:
                failures[server] = _why(error)

        await asyncio.gather(*map(try_to, servers))
        if len(failures) == len(servers):
            await self._each(servers, self._restore)
            why = "; ".join(failures.values()) or f"none is up: {self._reasons()}"
            raise EngineError(f"no inference server took the weights {update.version}: {why}")
        self.version = update.version
        for server, why in failures.items():
            self._lose(server, f"it did not take the weights {update.version}: {why}")

    async def _publish_broadcast(self, update: WeightUpdate) -> None:
        """Also to servers that were out. Again from the start when one fails on the way: until
        the end, the others have a part of the weights and the label of the old ones."""
        broadcaster, servers = self._broadcaster, list[Server]()
        if broadcaster is None:
            raise EngineError(
                "these servers cannot take weights by method 'distributed'; use 'disk'"
            )
        if update.tensors is None:
            raise ConfigError("WeightUpdate.tensors is missing; method='distributed' sends them")

        async def stop(server: Server) -> None:
            await self._describe(server)
            if not server.is_up:
                await self._api.pause(server.connection, "abort")
            servers.append(server)

        await self._each(self.router.servers, stop)
        failures: Mapping[Server, str] = {}
        while servers:
            for server in servers:
                server.is_torn = True
            try:
                failures = await broadcaster.send(
                    servers, update, keeps_cache=self._on_update == "in_place"
                )
            except BaseException:
                for server in servers:
                    self._lose(server, f"the update to {update.version} was broken off")
                raise
            for server, why in failures.items():
                self._lose(server, f"it did not take the weights {update.version}: {why}")
            if not failures:
                break
            servers = [server for server in servers if server not in failures]
        if not servers:
            raise EngineError(
                f"no inference server took the weights {update.version}: {self._reasons()}"
            )
        self.version, self._label, self._folder = update.version, str(update.version), None
        for server in self.router.servers:
            server.first_folder = None  # has other weights than these, which are in no folder
        for server in servers:
            server.hold(self.version, self._label)
            server.mark_up()

    async def _load_folder(self, server: Server, folder: Path, label: str) -> None:
        server.is_torn = True
        keeps_cache = self._on_update == "in_place"
        await self._api.load_folder(server.connection, folder, label, keeps_cache=keeps_cache)
        found = (await self._describe(server)).weight_version
        if found != label:
            raise EngineError(f"{server.address} says it has weights {found!r} after {label!r}")
        server.is_torn = False

    async def _restore(self, server: Server) -> None:
        """The weights of the fleet's version, for a server that may have others."""
        folder = self._folder or server.first_folder
        if server.is_torn:
            if folder is None:
                raise EngineError(
                    f"there is no folder of the weights {self._label!r}; the next update brings "
                    "it back"
                )
            await self._load_folder(server, folder, self._label)

    # Keeping

    def suspect(self, server: Server, why: str) -> None:
        """A request failed on it: look at once. Without an answer it is out."""
        logger.info("%s", why)
        self._strikes[server] = _MAX_STRIKES - 1
        self._is_alarmed.set()

    async def _keep(self) -> None:
        """Every now and then, and at every alarm: look after each server."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._health_interval_s):
                    await self._is_alarmed.wait()
            self._is_alarmed.clear()
            await asyncio.gather(*map(self._look_after, self.router.servers))

    async def _look_after(self, server: Server) -> None:
        was_up = server.is_up
        try:
            await (self._probe(server) if was_up else self._bring_back(server))
            self._strikes[server] = 0
        except (AgentRLError, TimeoutError) as error:
            self._strikes[server] = self._strikes.get(server, 0) + 1
            if not was_up:
                server.why_down = _why(error)
            elif self._strikes[server] >= _MAX_STRIKES:
                self._lose(server, _why(error))
                await self.router.look_again()

    async def _probe(self, server: Server) -> None:
        label = self._label
        found = (await self._describe(server)).weight_version
        if found != label and label == self._label and not self._control.locked():
            self._strikes[server] = _MAX_STRIKES
            raise EngineError(f"it has weights {found!r}, which were not published here")

    async def _bring_back(self, server: Server) -> None:
        """Give it the present weights, then requests. An update need not wait for that."""
        info = await self._describe(server)
        version, label, adapter = self.version, self._label, self.adapter
        await self._api.pause(server.connection, "abort")
        server.is_torn = server.is_torn or info.weight_version != label
        async with asyncio.timeout(self._control_timeout_s):
            await self._restore(server)
            if adapter is not None and adapter not in info.adapters:
                assert self._adapter_folder is not None, "set with the adapter"
                await self._api.load_adapter(server.connection, adapter, self._adapter_folder)
        async with self._control:
            if (self.version, self._label, self.adapter) != (version, label, adapter):
                return  # newer ones were published meanwhile: next time
            server.hold(version, label)
            if not self.router.is_paused:
                await self._api.resume(server.connection)
            server.mark_up()
            logger.warning("%s is back with weights %d", server.address, version)
            await self.router.look_again()

    def _lose(self, server: Server, why: str) -> None:
        logger.warning("%s is out: %s", server.address, why)
        server.mark_down(why)

    async def _describe(self, server: Server) -> ServerInfo:
        async with asyncio.timeout(_PROBE_TIMEOUT_S):
            return await self._api.describe(server.connection)

    async def _each(
        self, servers: Iterable[Server], do: Callable[[Server], Awaitable[None]]
    ) -> None:
        """At once for all; one that fails is out."""

        async def try_to(server: Server) -> None:
            try:
                async with asyncio.timeout(self._control_timeout_s):
                    await do(server)
            except (AgentRLError, TimeoutError) as error:
                self._lose(server, _why(error))

        await asyncio.gather(*map(try_to, servers))

    def _reasons(self) -> str:
        return "; ".join(f"{s.address}: {s.why_down}" for s in self.router.servers)


def _version(label: str) -> int:
    """Servers call the weights they were started with "default"; ours are numbers."""
    return int(label) if label.isdecimal() else 0


def _folder(update: WeightUpdate) -> Path:
    if update.path is None:
        raise ConfigError(f"WeightUpdate.path is missing; method={update.method!r} needs a folder")
    return update.path


def _why(error: Exception) -> str:
    return str(error) or "no answer in time"
