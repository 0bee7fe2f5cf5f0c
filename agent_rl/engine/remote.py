"""RemoteEngine: SGLang or vLLM servers behind the engine seam.

A request is never lost: what ends with "abort" because weights change, or because its server dies,
is sent again as prompt and partial completion, with the rest of its budget. Only a failure that
every server would repeat reaches the caller. All HTTP is done on the engine's own event loop:
connections and counters belong to one thread, whichever loops the engine is used from.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

from agent_rl.engine.base import StreamItem, WeightUpdate, token_budget
from agent_rl.engine.completion import Completion, Emit
from agent_rl.engine.dispatch import Dispatcher
from agent_rl.engine.fleet import Fleet
from agent_rl.engine.guided import check_guided
from agent_rl.engine.http import ServerConnection
from agent_rl.engine.launch import LaunchedServers
from agent_rl.engine.mailbox import Mailbox
from agent_rl.engine.restarter import Restarter
from agent_rl.engine.router import Router, Routing
from agent_rl.engine.server import Server
from agent_rl.engine.server_api import PauseMode, ServerApi
from agent_rl.errors import AgentRLError, ConfigError, ContextLengthError, EngineError
from agent_rl.loop_thread import LoopThread
from agent_rl.types import ModelRequest, ModelResponse


class RemoteEngine:
    """An ``InferenceEngine`` over one or more servers of one kind.

    Args:
        api: ``SGLang()`` or ``VLLM()``.
        addresses: ``http://host:port`` of each server.
        routing: see ``router.py``.
        on_update: what becomes of running requests when weights change, see ``PauseMode``.
        max_in_flight: requests that one server gets at once.
        timeout_s: of one attempt at a completion; None: no limit.
        control_timeout_s: of weight updates and other control calls.
        unavailable_timeout_s: how long requests wait while no server is up.
        health_interval_s: how often each server is asked whether it is well.
        health_timeout_s: how long it may take to answer that.
        trainer_address: of this machine, as servers reach it, for weights that are broadcast.
        launched: the servers, where this engine is to start them again when they end, and to stop
            them when it is closed.
        first_pause_s: before that, see ``Restarter``.

    Raises:
        EngineError: no server answers, or servers refuse the key.
    """

    def __init__(
        self,
        api: ServerApi,
        addresses: Sequence[str],
        *,
        api_key: str | None = None,
        routing: Routing = "prefix",
        on_update: PauseMode = "abort",
        max_in_flight: int = 256,
        timeout_s: float | None = 3600.0,
        control_timeout_s: float = 600.0,
        unavailable_timeout_s: float | None = 120.0,
        health_interval_s: float = 5.0,
        health_timeout_s: float = 30.0,
        trainer_address: str = "127.0.0.1",
        launched: LaunchedServers | None = None,
        first_pause_s: float = 1.0,
    ) -> None:
        if not addresses:
            raise ConfigError("engine.addresses is empty; name at least one server")
        if on_update not in api.pause_modes:
            raise ConfigError(
                f"engine.on_update is {on_update!r}; these servers can do "
                f"{', '.join(sorted(api.pause_modes))}"
            )
        self._is_closed = False
        self._launched = launched
        self._loop = LoopThread("engine", error=EngineError)

        async def connect() -> Fleet:
            servers = [
                Server(ServerConnection(address, api_key=api_key, timeout_s=timeout_s))
                for address in addresses
            ]
            router = Router(
                servers,
                routing,
                max_in_flight=max_in_flight,
                unavailable_timeout_s=unavailable_timeout_s,
            )
            restarter = None
            if launched is not None:
                restarter = Restarter(launched, router, first_pause_s=first_pause_s)
            fleet = Fleet(
                api,
                router,
                on_update=on_update,
                control_timeout_s=control_timeout_s,
                health_interval_s=health_interval_s,
                health_timeout_s=health_timeout_s,
                trainer_address=trainer_address,
                restarter=restarter,
            )
            await fleet.connect()
            return fleet

        try:
            self._fleet = self._loop.call(connect())
        except BaseException:
            self._loop.close()
            raise
        self._dispatcher = Dispatcher(api, self._fleet)
        self.max_seq_len = self._fleet.max_seq_len
        self.supported = self._fleet.supported

    @property
    def up(self) -> list[str]:
        """Addresses of the servers that take requests now."""
        return [server.address for server in self._fleet.router.up]

    # Generating

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        return await self._loop.run(self._generate(req, None))

    async def astream(self, req: ModelRequest) -> AsyncIterator[StreamItem]:
        mailbox = Mailbox(wants_deltas=True)

        async def work() -> None:
            try:
                mailbox.put(await self._generate(req, mailbox.put))
            except AgentRLError as error:
                mailbox.put(error)

        task = asyncio.ensure_future(self._loop.run(work()))
        try:
            while True:
                item = await self._next(mailbox, task)
                yield item
                if isinstance(item, ModelResponse):
                    return
        finally:
            task.cancel()

    async def _next(self, mailbox: Mailbox, task: asyncio.Future[None]) -> StreamItem:
        """The next item; the task ends without one only by an error of our own or by ``close``."""
        get = asyncio.ensure_future(mailbox.get())
        either: set[asyncio.Future[Any]] = {get, task}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not get.done() and task.done() and (error := task.exception()) is not None:
                raise error
            return await get
        finally:
            get.cancel()

    async def _generate(self, req: ModelRequest, emit: Emit | None) -> ModelResponse:
        max_seq_len = self.max_seq_len
        if req.gconfig.grammar is not None:
            check_guided(req)
            max_seq_len -= 1  # servers score only what leaves them a place
        budget = token_budget(req.gconfig, len(req.input_ids), max_seq_len)
        if budget < 1:
            limit = len(req.input_ids) + budget
            raise ContextLengthError(prompt_tokens=len(req.input_ids), limit=limit)
        completion = Completion(request=req, budget=budget, emit=emit)
        return completion.response(await self._dispatcher.complete(completion))

    async def score(
        self, input_ids: Sequence[int], num_scored: int, *, temperature: float = 1.0
    ) -> tuple[float, ...]:
        """Log-probs of the last ``num_scored`` ids, each given all ids before it.

        Raises:
            EngineError: another temperature than 1, which servers cannot score with.
        """
        if temperature != 1.0:
            raise EngineError(f"inference servers score at temperature 1 only, not {temperature:g}")
        return await self._loop.run(self._dispatcher.score(input_ids, num_scored))

    # Control

    async def abort(self, rid: str) -> None:
        await self._loop.run(self._dispatcher.abort(rid))

    async def pause(self) -> None:
        await self._loop.run(self._fleet.pause())

    async def resume(self) -> None:
        await self._loop.run(self._fleet.resume())

    def get_version(self) -> int:
        return self._fleet.weights.version

    def set_version(self, version: int) -> None:
        """Rename the weights that the servers have; nothing running is ended."""
        if version != self.get_version():
            self._loop.call(self._fleet.set_version(version))

    async def update_weights(self, update: WeightUpdate) -> None:
        """A server that fails to take them is out until it has them; the others serve.

        Raises:
            EngineError: no server took the new weights; the version stays as it was.
        """
        await self._loop.run(self._fleet.update(update))

    async def health(self) -> bool:
        return not self._is_closed and bool(self._fleet.router.up)

    async def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        await self._loop.run(self._close())
        await asyncio.to_thread(self._loop.close)
        if self._launched is not None:
            await asyncio.to_thread(self._launched.close)

    async def _close(self) -> None:
        self._dispatcher.end()
        await self._fleet.close()
        await self._dispatcher.wait_ended()
        await self._fleet.disconnect()
