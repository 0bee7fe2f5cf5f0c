"""RemoteEngine: SGLang or vLLM servers behind the engine seam.

A request is never lost: what ends with "abort" because weights change, or because its server dies,
is sent again as prompt and partial completion, with the rest of its budget. Only a failure that
every server would repeat reaches the caller. All HTTP is done on the engine's own event loop:
connections and counters belong to one thread, whichever loops the engine is used from.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import aclosing
from typing import Any

from agent_rl.engine.base import StreamItem, WeightUpdate, token_budget
from agent_rl.engine.completion import Completion, Emit
from agent_rl.engine.fleet import Fleet
from agent_rl.engine.http import ServerConnection
from agent_rl.engine.launch import LaunchedServers
from agent_rl.engine.mailbox import Mailbox
from agent_rl.engine.router import Router, Routing
from agent_rl.engine.server import Server
from agent_rl.engine.server_api import Attempt, Finish, PauseMode, ServerApi
from agent_rl.errors import (
    AgentRLError,
    ConfigError,
    ContextLengthError,
    EngineError,
    RequestError,
    ServerBusyError,
    ServerError,
)
from agent_rl.loop_thread import LoopThread
from agent_rl.types import ModelRequest, ModelResponse

logger = logging.getLogger(__name__)

# Servers that fail one request this often would fail it forever.
_MAX_FAILURES = 6
_BACKOFF_S = (0.05, 2.0)
_CLOSE_TIMEOUT_S = 5.0


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
        trainer_address: of this machine, as servers reach it, for weights that are broadcast.
        launched: the servers, where this engine is to stop them when it is closed.

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
        trainer_address: str = "127.0.0.1",
        launched: LaunchedServers | None = None,
    ) -> None:
        if not addresses:
            raise ConfigError("engine.addresses is empty; name at least one server")
        if on_update not in api.pause_modes:
            raise ConfigError(
                f"engine.on_update is {on_update!r}; these servers can do "
                f"{', '.join(sorted(api.pause_modes))}"
            )
        self._api = api
        self._calls: dict[str, set[Completion]] = {}
        self._attempts: dict[Completion, tuple[Server, str]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
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
            fleet = Fleet(
                api,
                router,
                on_update=on_update,
                control_timeout_s=control_timeout_s,
                health_interval_s=health_interval_s,
                address=trainer_address,
            )
            await fleet.connect()
            return fleet

        try:
            self._fleet = self._loop.call(connect())
        except BaseException:
            self._loop.close()
            raise
        self._router = self._fleet.router
        self.max_seq_len = self._fleet.max_seq_len
        self.supported = self._fleet.supported

    @property
    def up(self) -> list[str]:
        """Addresses of the servers that take requests now."""
        return [server.address for server in self._router.up]

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
        budget = token_budget(req.gconfig, len(req.input_ids), self.max_seq_len)
        if budget < 1:
            limit = len(req.input_ids) + budget
            raise ContextLengthError(prompt_tokens=len(req.input_ids), limit=limit)
        completion = Completion(request=req, budget=budget, emit=emit)
        self._calls.setdefault(req.rid, set()).add(completion)
        task = asyncio.current_task()
        assert task is not None, "run by the engine's loop"
        self._tasks.add(task)
        try:
            return completion.response(await self._complete(completion))
        finally:
            self._tasks.discard(task)
            same_rid = self._calls[req.rid]
            same_rid.discard(completion)
            if not same_rid:
                del self._calls[req.rid]

    async def _complete(self, completion: Completion) -> Finish:
        """Attempt after attempt, until it stops by itself, by its budget, or by ``abort``."""
        num_failures, backoff_s = 0, _BACKOFF_S[0]
        while completion.num_left > 0:
            server = await self._router.pick(completion.ids, lambda: completion.is_aborted)
            if server is None:
                return "abort"
            num_before = len(completion.token_ids)
            finish: Finish = "abort"
            try:
                finish = await server.run(self._attempt(server, completion))
            except ServerBusyError as error:
                logger.info("%s", error)
            except ServerError as error:
                num_failures += 1
                self._fail(server, error, num_failures)
            finally:
                await self._router.release()
            if finish != "abort" or completion.is_aborted:
                return finish
            if len(completion.token_ids) > num_before or self._router.is_paused:
                backoff_s = _BACKOFF_S[0]
            else:
                await asyncio.sleep(backoff_s)
                backoff_s = min(2 * backoff_s, _BACKOFF_S[1])
        return "length"

    def _fail(self, server: Server, error: ServerError, num_failures: int) -> None:
        """Raises EngineError when a request has failed too often, or the engine is closed."""
        if self._is_closed:
            raise EngineError("the engine is closed") from error
        self._fleet.suspect(server, str(error))
        if num_failures >= _MAX_FAILURES:
            raise EngineError(
                f"one request failed {num_failures} times, the last: {error}"
            ) from error

    async def _attempt(self, server: Server, completion: Completion) -> Finish:
        """Versions are pinned when the request is sent, and settled by the server's own spans."""
        if self._router.is_paused:
            return "abort"
        attempt = Attempt(
            # Of one length, because SGLang's abort matches by prefix.
            rid=uuid.uuid4().hex,
            input_ids=completion.ids,
            num_sampled=len(completion.token_ids),
            budget=completion.num_left,
            gconfig=completion.request.gconfig,
            image_data=completion.request.image_data,
            adapter=self._fleet.adapter,
        )
        version, start = server.version, len(completion.token_ids)
        self._attempts[completion] = (server, attempt.rid)
        is_finished = False
        pieces = self._api.generate(server.connection, attempt, streams=completion.emit is not None)
        try:
            async with aclosing(pieces):
                async for piece in pieces:
                    completion.extend(piece, version)
                    if start == 0:  # later attempts find what this one computed
                        completion.num_cached = piece.num_cached
                    if piece.finish is not None:
                        is_finished = True
                        # With an adapter they are those of the base weights.
                        if piece.spans is not None and attempt.adapter is None:
                            num_new = len(completion.token_ids) - start
                            completion.versions[start:] = server.versions(piece.spans, num_new)
                        completion.settle()
                        self._router.remember(server, completion.ids)
                        return piece.finish
                    if server.version == version:  # else the spans at the end will tell
                        completion.settle()
            raise ServerError(f"{server.address} ended a stream without a finish reason")
        except RequestError as error:
            if attempt.adapter != self._fleet.adapter:  # it was replaced on the way there
                raise ServerError(str(error)) from error
            raise
        finally:
            completion.drop_unsettled()
            del self._attempts[completion]
            if not is_finished:
                self._abandon(server, attempt.rid)

    def _abandon(self, server: Server, rid: str) -> None:
        """Nobody waits for this attempt any more: let the server spend no time on it."""
        if server.is_up and not self._is_closed:
            self._spawn(self._abort_quietly(server, rid))

    async def _abort_quietly(self, server: Server, rid: str) -> None:
        try:
            await self._api.abort(server.connection, rid)
        except AgentRLError as error:
            logger.info("could not abort a request: %s", error)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def score(
        self, input_ids: Sequence[int], num_scored: int, *, temperature: float = 1.0
    ) -> tuple[float, ...]:
        """Log-probs of the last ``num_scored`` ids, each given all ids before it.

        Raises:
            EngineError: another temperature than 1, which servers cannot score with.
        """
        if temperature != 1.0:
            raise EngineError(f"inference servers score at temperature 1 only, not {temperature:g}")
        return await self._loop.run(self._score(input_ids, num_scored))

    async def _score(self, input_ids: Sequence[int], num_scored: int) -> tuple[float, ...]:
        num_failures = 0
        while True:
            server = await self._router.pick(input_ids, lambda: False)
            assert server is not None, "nobody gives up on a score"
            try:
                return await server.run(self._api.score(server.connection, input_ids, num_scored))
            except ServerError as error:
                num_failures += 1
                self._fail(server, error, num_failures)
            finally:
                await self._router.release()

    # Control

    async def abort(self, rid: str) -> None:
        await self._loop.run(self._abort(rid))

    async def _abort(self, rid: str) -> None:
        for completion in self._calls.get(rid, ()):
            completion.is_aborted = True
            if completion in self._attempts:
                server, attempt_rid = self._attempts[completion]
                self._spawn(self._abort_quietly(server, attempt_rid))
        await self._router.look_again()

    async def pause(self) -> None:
        await self._loop.run(self._fleet.pause())

    async def resume(self) -> None:
        await self._loop.run(self._fleet.resume())

    def get_version(self) -> int:
        return self._fleet.version

    def set_version(self, version: int) -> None:
        """Rename the weights that the servers have; nothing running is ended."""
        if version != self._fleet.version:
            self._loop.call(self._fleet.set_version(version))

    async def update_weights(self, update: WeightUpdate) -> None:
        """A server that fails to take them is out until it has them; the others serve.

        Raises:
            EngineError: no server took the new weights; the version stays as it was.
        """
        await self._loop.run(self._fleet.update(update))

    async def health(self) -> bool:
        return not self._is_closed and bool(self._router.up)

    async def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        await self._loop.run(self._close())
        await asyncio.to_thread(self._loop.close)
        if self._launched is not None:
            await asyncio.to_thread(self._launched.close)

    async def _close(self) -> None:
        await self._fleet.close()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_CLOSE_TIMEOUT_S)
