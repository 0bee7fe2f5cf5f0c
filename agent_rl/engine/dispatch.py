"""Dispatcher: sends a request to servers, again and again, until its completion is there.

Invariant: no request is lost. What ends with "abort" because weights change, or because its server
dies, is sent again as prompt and partial completion, with the rest of its budget. Only a failure
that every server would repeat reaches the caller. It decides neither which server is up nor which
weights there are.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing
from typing import Any

from agent_rl.engine.completion import Completion
from agent_rl.engine.fleet import Fleet
from agent_rl.engine.guided import generate_guided
from agent_rl.engine.server import Server
from agent_rl.engine.server_api import Attempt, Finish, Piece, ServerApi
from agent_rl.engine.tries import Tries
from agent_rl.errors import AgentRLError, EngineError, RequestError, ServerBusyError, ServerError

logger = logging.getLogger(__name__)

_CLOSE_TIMEOUT_S = 5.0


class Dispatcher:
    """To be used on the engine's event loop."""

    def __init__(self, api: ServerApi, fleet: Fleet) -> None:
        self._api = api
        self._fleet = fleet
        self._router = fleet.router
        self._calls: dict[str, set[Completion]] = {}
        self._attempts: dict[Completion, tuple[Server, str]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._is_closed = False

    async def complete(self, completion: Completion) -> Finish:
        """Attempt after attempt, until it stops by itself, by its budget, or by ``abort``.

        Raises:
            RequestError: a server refuses it, as all would.
            EngineError: it failed too often, no server is up for long, or the engine is closed.
        """
        rid = completion.request.rid
        self._calls.setdefault(rid, set()).add(completion)
        task = asyncio.current_task()
        assert task is not None, "run by the engine's loop"
        self._tasks.add(task)
        try:
            return await self._until_done(completion)
        finally:
            self._tasks.discard(task)
            same_rid = self._calls[rid]
            same_rid.discard(completion)
            if not same_rid:
                del self._calls[rid]

    async def score(self, input_ids: Sequence[int], num_scored: int) -> tuple[float, ...]:
        tries = Tries()
        while True:
            server = await self._router.pick(input_ids, lambda: False, tries.failed_on)
            assert server is not None, "nobody gives up on a score"
            try:
                scores = await server.run(
                    self._api.score(
                        server.connection,
                        input_ids,
                        num_scored,
                        adapter=self._fleet.weights.adapter,
                    )
                )
                return tuple(score.logprob for score in scores)
            except ServerError as error:
                self._fail(tries, server, error)
            finally:
                await self._router.release()
            await asyncio.sleep(tries.next_pause_s(self._router.up))

    async def abort(self, rid: str) -> None:
        for completion in self._calls.get(rid, ()):
            completion.is_aborted = True
            if completion in self._attempts:
                server, attempt_rid = self._attempts[completion]
                self._spawn(self._abort_quietly(server, attempt_rid))
        await self._router.look_again()

    def end(self) -> None:
        """From now on a failure is final."""
        self._is_closed = True

    async def wait_ended(self) -> None:
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_CLOSE_TIMEOUT_S)

    async def _until_done(self, completion: Completion) -> Finish:
        tries = Tries()
        while completion.num_left > 0:
            server = await self._router.pick(
                completion.ids, lambda: completion.is_aborted, tries.failed_on
            )
            if server is None:
                return "abort"
            num_before = len(completion.token_ids)
            finish: Finish = "abort"
            try:
                finish = await server.run(self._attempt(server, completion))
            except ServerError as error:
                self._fail(tries, server, error)
            finally:
                await self._router.release()
            if finish != "abort" or completion.is_aborted:
                return finish
            if len(completion.token_ids) > num_before:
                tries.advance()
            elif not self._router.is_paused:
                tries.failed_on.add(server)  # ended by somebody else, before it began
            await asyncio.sleep(tries.next_pause_s(self._router.up))
        return "length"

    def _fail(self, tries: Tries, server: Server, error: ServerError) -> None:
        """Raises EngineError when the request has failed too often, or the engine is closed."""
        if self._is_closed:
            raise EngineError("the engine is closed") from error
        if isinstance(error, ServerBusyError):
            logger.info("%s", error)
        else:
            self._fleet.keeper.suspect(server, str(error))
        tries.fail(server, error)

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
            adapter=self._fleet.weights.adapter,
        )
        version, turn, start = server.version, server.turn, len(completion.token_ids)
        self._attempts[completion] = (server, attempt.rid)
        is_finished = False
        try:
            async with aclosing(self._pieces(server, completion, attempt)) as pieces:
                async for piece in pieces:
                    completion.extend(piece, version)
                    # Later attempts find what this one computed. What an image is made of counts
                    # there, and not in our prompt.
                    if start == 0 and not attempt.image_data:
                        completion.num_cached = piece.num_cached
                    if piece.finish is not None:
                        is_finished = True
                        # With an adapter they are those of the base weights.
                        if piece.spans is not None and attempt.adapter is None:
                            num_new = len(completion.token_ids) - start
                            completion.versions[start:] = server.versions(
                                piece.spans, num_new, turn
                            )
                        if completion.is_guided and server.turn != turn:
                            return "abort"  # sampled and scored were not by the same weights
                        completion.settle()
                        self._router.remember(server, completion.ids)
                        return piece.finish
                    if server.version == version:  # else the spans at the end will tell
                        completion.settle()
            raise ServerError(f"{server.address} ended a stream without a finish reason")
        except RequestError as error:
            if attempt.adapter is not None:
                await self._check_adapter(server, attempt.adapter, error)
            raise
        finally:
            completion.drop_unsettled()
            del self._attempts[completion]
            if not is_finished:
                self._abandon(server, attempt.rid)

    def _pieces(
        self, server: Server, completion: Completion, attempt: Attempt
    ) -> AsyncGenerator[Piece, None]:
        if completion.is_guided:
            return generate_guided(self._api, server.connection, attempt)
        streams = completion.emit is not None
        return self._api.generate(server.connection, attempt, streams=streams)

    async def _check_adapter(self, server: Server, adapter: str, error: RequestError) -> None:
        """Raises ServerError where the server has no such adapter: it was replaced on the way
        there, or the server started anew."""
        if adapter not in (await self._api.describe(server.connection)).adapters:
            raise ServerError(f"{server.address} has no adapter {adapter!r}") from error

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
