"""The in-process transport: the openai SDK's HTTP requests become calls of ``api.routes``.

There is no socket and no serving task: the caller's own task runs the request, so cancelling it
cancels the generation, and the agent's contextvars are visible. The SDK hands its timeout to the
transport and does not enforce it, so it is enforced here. Streams are never buffered.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self, cast

from agent_rl import workflow_context
from agent_rl.api.events import EventStream
from agent_rl.api.routes import Reply, answer, error_reply, has_endpoint
from agent_rl.api.session import Session
from agent_rl.client.http import hx
from agent_rl.errors import RefusedError

if TYPE_CHECKING:
    from openai import AsyncOpenAI

BASE_URL = "http://agent-rl.local/v1"


@dataclass(frozen=True, slots=True)
class ByteStream(hx.AsyncByteStream):
    """Server-sent events as they are produced. Closing it aborts the generation."""

    events: EventStream
    request: hx.Request

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while True:
            try:
                async with asyncio.timeout(read_timeout_s(self.request)):
                    event = await anext(self.events)
            except StopAsyncIteration:
                return
            except TimeoutError as error:
                raise _read_timeout(self.request) from error
            yield event

    async def aclose(self) -> None:
        await self.events.aclose()


class InProcessTransport(hx.AsyncBaseTransport):
    """Only ``episode`` may call, or everybody where it is None. So may a thread that runs in no
    episode: threads do not inherit contextvars."""

    def __init__(self, session: Session, passthrough: AsyncOpenAI | None = None) -> None:
        self.session = session
        self.passthrough = passthrough
        self.episode: object | None = None

    async def handle_async_request(self, request: hx.Request) -> hx.Response:
        path = route_path(request)
        content = await request.aread()
        if self.passthrough is not None and not has_endpoint(request.method, path):
            return await self._forward(self.passthrough, request, path, content)
        is_retry = request.headers.get("x-stainless-retry-count", "0") != "0"
        here = workflow_context.get().episode
        if self.episode is not None and here is not None and here is not self.episode:
            return _response(error_reply(_another_episodes(), path), request)
        try:
            async with asyncio.timeout(read_timeout_s(request)):
                reply = await answer(
                    self.session,
                    request.method,
                    path,
                    content,
                    query=dict(request.url.params),
                    is_retry=is_retry,
                )
        except TimeoutError as error:
            raise _read_timeout(request) from error
        if reply.events is not None:
            stream = ByteStream(reply.events, request)
            return hx.Response(reply.status, headers=reply.headers, stream=stream, request=request)
        return _response(reply, request)

    async def _forward(
        self, target: AsyncOpenAI, request: hx.Request, path: str, content: bytes
    ) -> hx.Response:
        """Send the same request to the real API, with that client's address and key."""
        http_client = cast(hx.AsyncClient, target._client)
        query = f"?{request.url.query.decode()}" if request.url.query else ""
        kept = {k: v for k, v in request.headers.items() if k in ("content-type", "accept")}
        forwarded = http_client.build_request(
            request.method,
            f"{str(target.base_url).rstrip('/')}/{path}{query}",
            headers={**kept, **target.auth_headers},
            content=content,
            extensions={"timeout": request.extensions.get("timeout", {})},
        )
        return await http_client.send(forwarded, stream=True)


class InProcessClient(hx.AsyncClient):
    """What the SDK gets as ``http_client``; all copies of one ArealOpenAI share it.

    Closing does nothing: some frameworks close their client after each request, and there is no
    connection to free.
    """

    def __init__(self, session: Session, passthrough: AsyncOpenAI | None = None) -> None:
        transport = InProcessTransport(session, passthrough)
        super().__init__(transport=transport, timeout=600.0)
        self.session = session
        self.passthrough = passthrough
        self._in_process = transport

    def keep_to_this_episode(self) -> None:
        """Calls from another episode are refused from now on: they would be in a foreign record."""
        self._in_process.episode = workflow_context.get().episode

    async def aclose(self) -> None:
        pass

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        pass


def route_path(request: hx.Request) -> str:
    """``/v1/chat/completions`` -> ``chat/completions``, also behind a prefix of the base URL."""
    before, found, after = request.url.path.partition("/v1/")
    return after if found else before.lstrip("/")


def read_timeout_s(request: hx.Request) -> float | None:
    timeouts = request.extensions.get("timeout") or {}
    return cast("float | None", timeouts.get("read"))


def _response(reply: Reply, request: hx.Request) -> hx.Response:
    return hx.Response(
        reply.status,
        headers=reply.headers,
        content=json.dumps(reply.body, ensure_ascii=False).encode(),
        request=request,
    )


def _another_episodes() -> RefusedError:
    return RefusedError(
        403,
        "this client is another episode's, so the call would be in a foreign record; it was kept "
        "in a global (a module's variable, a cache, set_default_openai_client): use what run() is "
        "given, in each episode",
        code="another_episode",
    )


def _read_timeout(request: hx.Request) -> Exception:
    limit = read_timeout_s(request)
    return hx.ReadTimeout(f"no answer within timeout={limit:g} s", request=request)
