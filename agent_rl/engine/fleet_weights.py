"""FleetWeights: the weights that all servers ought to have, and how each one gets them.

Invariant: a server holds a version once it has taken all of those weights and says so itself. One
that was interrupted is torn, and until it has loaded a whole folder nobody asks it for tokens. It
decides neither when weights change nor which server is asked.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from agent_rl.engine.base import UpdateMethod, WeightUpdate
from agent_rl.engine.broadcast import Broadcaster
from agent_rl.engine.server import Failures, Server, on_all, reasons_down
from agent_rl.engine.server_api import PauseMode, ServerApi, ServerInfo, SharedMemoryApi
from agent_rl.engine.shared_memory import SharedMemorySender
from agent_rl.errors import ConfigError, EngineError


class FleetWeights:
    """``version`` is what tokens are marked with; ``label`` what servers call their base weights,
    which an adapter leaves as they are; ``adapter`` the LoRA adapter that requests name.

    Arguments as of ``RemoteEngine``.
    """

    def __init__(
        self,
        api: ServerApi,
        servers: Sequence[Server],
        *,
        on_update: PauseMode,
        timeout_s: float,
        address: str,
    ) -> None:
        self.version = 0
        self.label = ""
        self.adapter: str | None = None
        self._api = api
        self._servers = servers
        self._keeps_cache = on_update == "in_place"
        self._timeout_s = timeout_s
        self._folder: Path | None = None
        self._adapter_folder: Path | None = None
        self._senders: dict[UpdateMethod, Broadcaster | SharedMemorySender] = {
            "distributed": Broadcaster(api, address=address, timeout_s=timeout_s)
        }
        if isinstance(api, SharedMemoryApi):
            self._senders["tensor"] = SharedMemorySender(api, timeout_s=timeout_s)

    @property
    def present(self) -> tuple[int, str, str | None]:
        """Changes whenever there are new weights."""
        return self.version, self.label, self.adapter

    async def ask(self, server: Server) -> ServerInfo:
        """What it says about itself. Before that, an update that was broken off, maybe by an
        earlier trainer, is closed: a server whose model is in pieces may die of a question."""
        if server.is_torn:
            await self._api.drop_update(server.connection)
        return await self._api.describe(server.connection)

    def adopt(self, infos: Mapping[Server, ServerInfo]) -> None:
        """Begin with the newest weights that a server has. Those that have them are up."""
        newest = max(infos.values(), key=lambda info: _version(info.weight_version))
        self.version, self.label = _version(newest.weight_version), newest.weight_version
        for server, info in infos.items():
            if (why := self.lacks(info)) is not None:
                server.mark_down(why)
                continue
            server.hold(self.version, self.label)
            server.first_folder = info.folder
            server.mark_up()

    def lacks(self, info: ServerInfo) -> str | None:
        """What a server that says this does not have of the present weights, in words."""
        if info.weight_version != self.label:
            return f"it has weights {info.weight_version!r}, not {self.label!r}"
        if self.adapter is not None and self.adapter not in info.adapters:
            return f"it has no adapter {self.adapter!r}"
        return None

    async def rename(self, version: int) -> Failures:
        """Call the weights that the servers have ``version``."""

        async def rename(server: Server) -> None:
            await self._api.set_label(server.connection, str(version))
            server.hold(version, str(version))

        self.version, self.label = version, str(version)
        return await on_all(_up(self._servers), rename, timeout_s=self._timeout_s)

    async def publish(self, update: WeightUpdate) -> None:
        """To all servers at once; one that fails is down, if another did not.

        Raises:
            EngineError: no server took them; the version stays as it was.
        """
        if update.method in self._senders:
            await self._publish_tensors(update)
        elif update.method == "disk":
            await self._publish_folder(update)
        elif update.method == "lora":
            await self._publish_adapter(update)
        else:
            raise EngineError(
                f"these inference servers cannot take weights by method {update.method!r}; use "
                f"{', '.join(map(repr, self._senders))}, 'disk' or 'lora'"
            )

    async def restore(self, server: Server, info: ServerInfo) -> None:
        """What a server that says this about itself lacks of the present weights.

        Raises:
            EngineError: it cannot load them, or they are in no folder.
        """
        if server.is_torn or info.weight_version != self.label:
            folder = self._folder or server.first_folder
            if folder is None:
                raise EngineError(
                    f"there is no folder of the weights {self.label!r}; the next update brings it "
                    "back"
                )
            await self._load_folder(server, folder, self.label)
        adapter, adapter_folder = self.adapter, self._adapter_folder
        if adapter is not None and adapter not in info.adapters:
            assert adapter_folder is not None, "set with the adapter"
            await self._api.load_adapter(server.connection, adapter, adapter_folder)

    async def close(self) -> None:
        for sender in self._senders.values():
            await sender.close()

    async def _publish_folder(self, update: WeightUpdate) -> None:
        folder, label = _folder(update), str(update.version)

        async def take(server: Server) -> None:
            await self._load_folder(server, folder, label)
            server.hold(update.version, label)

        await self._have_taken(update, take)
        self.label, self._folder = label, folder

    async def _publish_adapter(self, update: WeightUpdate) -> None:
        folder, old, new = _folder(update), self.adapter, f"v{update.version}"

        async def take(server: Server) -> None:
            await self._api.load_adapter(server.connection, new, folder)
            if old is not None:
                await self._api.unload_adapter(server.connection, old)
            server.version = update.version

        await self._have_taken(update, take)
        self.adapter, self._adapter_folder = new, folder

    async def _have_taken(
        self, update: WeightUpdate, take: Callable[[Server], Awaitable[None]]
    ) -> None:
        servers = _up(self._servers)
        failures = await on_all(servers, _alone(take), timeout_s=self._timeout_s)
        if len(failures) == len(servers):
            await self._keep_old(servers)
            why = "; ".join(failures.values()) or f"none is up: {reasons_down(self._servers)}"
            raise EngineError(f"no inference server took the weights {update.version}: {why}")
        self.version = update.version
        self._mark_down(failures)

    async def _keep_old(self, servers: Sequence[Server]) -> None:
        async def restore(server: Server) -> None:
            await self.restore(server, await self.ask(server))

        self._mark_down(await on_all(servers, _alone(restore), timeout_s=self._timeout_s))

    async def _publish_tensors(self, update: WeightUpdate) -> None:
        """Also to servers that were down. Again from the start when one fails on the way: until
        the end, the others have a part of the weights and the label of the old ones."""
        if update.tensors is None:
            raise ConfigError(
                f"WeightUpdate.tensors is missing; method={update.method!r} sends them"
            )
        with ExitStack() as stack:
            servers = await self._ready_to_receive(stack)
            while servers and (failures := await self._send(servers, update)):
                left = [server for server in servers if server not in failures]
                failures |= await on_all(left, self._drop_update, timeout_s=self._timeout_s)
                self._mark_down(failures)
                servers = [server for server in left if server not in failures]
        if not servers:
            raise EngineError(
                f"no inference server took the weights {update.version}: "
                f"{reasons_down(self._servers)}"
            )
        self.version, self.label, self._folder = update.version, str(update.version), None
        for server in self._servers:
            server.first_folder = None  # has other weights than these, which are in no folder
        for server in servers:
            server.hold(self.version, self.label)
            server.mark_up()

    async def _drop_update(self, server: Server) -> None:
        await self._api.drop_update(server.connection)

    async def _ready_to_receive(self, stack: ExitStack) -> list[Server]:
        """Those that answer, held until the end of ``stack``. Not those that are loading a folder
        just now, or are being started again: they are brought back later."""
        ready: list[Server] = []

        async def prepare(server: Server) -> None:
            await self.ask(server)
            if not server.is_up:
                await self._api.pause(server.connection, "abort")
            ready.append(server)

        free = [server for server in self._servers if server.is_free]
        for server in free:
            stack.enter_context(server.changing())
        self._mark_down(await on_all(free, prepare, timeout_s=self._timeout_s))
        return ready

    async def _send(self, servers: Sequence[Server], update: WeightUpdate) -> Failures:
        sender = self._senders[update.method]
        for server in servers:
            server.is_torn = True
        try:
            return await sender.send(servers, update, keeps_cache=self._keeps_cache)
        except BaseException as error:
            await sender.close()
            for server in servers:
                server.mark_down(f"the update to {update.version} was broken off: {error!r}")
            raise

    async def _load_folder(self, server: Server, folder: Path, label: str) -> None:
        server.is_torn = True
        await self._api.load_folder(server.connection, folder, label, keeps_cache=self._keeps_cache)
        found = (await self._api.describe(server.connection)).weight_version
        if found != label:
            raise EngineError(f"{server.address} says it has weights {found!r} after {label!r}")
        server.is_torn = False

    def _mark_down(self, failures: Failures) -> None:
        for server, why in failures.items():
            server.mark_down(f"it did not take new weights: {why}")


def _alone(call: Callable[[Server], Awaitable[None]]) -> Callable[[Server], Awaitable[None]]:
    """The call, with the server marked as changing meanwhile."""

    async def call_alone(server: Server) -> None:
        with server.changing():
            await call(server)

    return call_alone


def _up(servers: Sequence[Server]) -> list[Server]:
    return [server for server in servers if server.is_up]


def _version(label: str) -> int:
    """Servers call the weights they were started with "default"; ours are numbers."""
    return int(label) if label.isdecimal() else 0


def _folder(update: WeightUpdate) -> Path:
    if update.path is None:
        raise ConfigError(f"WeightUpdate.path is missing; method={update.method!r} needs a folder")
    return update.path
