"""The same endpoints for the SDK's synchronous client, for frameworks that have no async path.

A request runs on a private event loop in a thread of its own, one for the whole process; the
calling thread waits. On a thread whose own loop is running the call is refused, because waiting
there would stop every task of that loop, the engine's too if it lives there.
"""

from __future__ import annotations

import asyncio
import atexit
import os
from collections.abc import AsyncIterator, Coroutine, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, Self, TypeVar

from openai import OpenAI

from agent_rl.api.session import Session
from agent_rl.client.http import hx
from agent_rl.client.resources import DirectSyncChat, DirectSyncResponses
from agent_rl.client.transport import ByteStream, InProcessTransport
from agent_rl.client.unsendable import refusing_unsendable
from agent_rl.loop_thread import LoopThread

T = TypeVar("T")


@cache
def _thread_of(pid: int) -> LoopThread:
    """A forked child has its own: threads do not survive a fork."""

    def close() -> None:
        if os.getpid() == pid:  # a forked child inherits the exit handler, not the thread
            thread.close()

    thread = LoopThread("client")
    atexit.register(close)
    return thread


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    return _thread_of(os.getpid()).call(coroutine)


def refuse_running_loop() -> None:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise RuntimeError(
        "client.sync was called on a thread whose event loop is running and would block it; use "
        "the asynchronous client there, or call it in a worker thread (asyncio.to_thread)"
    )


@dataclass(frozen=True, slots=True)
class SyncByteStream(hx.SyncByteStream):
    stream: ByteStream

    def __iter__(self) -> Iterator[bytes]:
        events = aiter(self.stream)
        while (event := run(_next_or_none(events))) is not None:
            yield event

    def close(self) -> None:
        run(self.stream.aclose())


async def _next_or_none(events: AsyncIterator[bytes]) -> bytes | None:
    return await anext(events, None)


class SyncInProcessTransport(hx.BaseTransport):
    def __init__(self, session: Session) -> None:
        self._transport = InProcessTransport(session)

    def handle_request(self, request: hx.Request) -> hx.Response:
        request.read()
        response = run(self._transport.handle_async_request(request))
        if not isinstance(response.stream, ByteStream):
            return response
        stream = SyncByteStream(response.stream)
        return hx.Response(response.status_code, headers=response.headers, stream=stream)


class SyncInProcessClient(hx.Client):
    """Closing does nothing, as with ``InProcessClient``."""

    def __init__(self, session: Session) -> None:
        super().__init__(transport=SyncInProcessTransport(session), timeout=600.0)

    def close(self) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        pass


class SyncArealOpenAI(OpenAI):
    """``openai.OpenAI`` with the guard in front of the SDK, which would retry what it raises."""

    @cached_property
    def chat(self) -> DirectSyncChat:
        return DirectSyncChat(self)

    @cached_property
    def responses(self) -> DirectSyncResponses:
        return DirectSyncResponses(self)

    if not TYPE_CHECKING:

        def request(self, cast_to: Any, options: Any, **kwargs: Any) -> Any:
            refuse_running_loop()
            with refusing_unsendable(options):
                return super().request(cast_to, options, **kwargs)
