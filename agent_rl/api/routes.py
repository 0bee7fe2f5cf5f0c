"""The table of endpoints: (method, path, body) in, a Reply out. Both doors go through it.

In process it is called by ``client/transport.py``, over TCP by the gateway. Errors of this package
become replies here; anything else is a bug and passes through.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeAlias

from agent_rl.api.chat import chat_completions, read_chat_request
from agent_rl.api.chat_stream import chat_chunks
from agent_rl.api.events import EventStream, chat_event
from agent_rl.api.failure import failure_of
from agent_rl.api.session import Session
from agent_rl.errors import AgentRLError, NotSupportedError, RequestError
from agent_rl.types import JsonObject


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """``body`` or, for a stream, ``events``: server-sent events as encoded bytes.

    ``is_final`` false: the same request may succeed when it is sent again.
    """

    status: int = 200
    body: JsonObject | None = None
    events: EventStream | None = None
    request_id: str | None = None
    is_final: bool = True

    @property
    def headers(self) -> dict[str, str]:
        headers = {"content-type": "text/event-stream" if self.events else "application/json"}
        if self.request_id is not None:
            headers["x-request-id"] = self.request_id
        if self.status >= 400 and self.is_final:
            headers["x-should-retry"] = "false"
        return headers


async def answer(
    session: Session, method: str, path: str, content: bytes, *, is_retry: bool = False
) -> Reply:
    """``path`` without the version prefix: ``chat/completions``. A retry is no new call."""
    try:
        endpoint = _ENDPOINTS.get((method, path))
        if endpoint is None:
            raise NotSupportedError(
                f"{method} /{path} is not served here; give the client passthrough=AsyncOpenAI(...)"
                " to forward it",
                code="unknown_endpoint",
            )
        if not is_retry:
            session.count_call()
        return await endpoint(session, _parse(content))
    except AgentRLError as error:
        failure = failure_of(error)
        return Reply(status=failure.status, body=failure.body, is_final=failure.is_final)


def has_endpoint(method: str, path: str) -> bool:
    return (method, path) in _ENDPOINTS


async def _chat(session: Session, body: JsonObject) -> Reply:
    request = read_chat_request(session, body)
    if request.is_streamed:
        events = EventStream(chat_chunks(session, request), chat_event, end=b"data: [DONE]\n\n")
        first = await events.start()
        return Reply(events=events, request_id=first["id"])
    completion = await chat_completions(session, request.turn)
    return Reply(body=completion, request_id=completion["id"])


def _parse(content: bytes) -> JsonObject:
    try:
        body = json.loads(content)
    except ValueError as error:
        raise RequestError(f"the request body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise RequestError("the request body must be a JSON object")
    return body


Endpoint: TypeAlias = Callable[[Session, JsonObject], Awaitable[Reply]]
_ENDPOINTS: dict[tuple[str, str], Endpoint] = {
    ("POST", "chat/completions"): _chat,
}
