"""The table of endpoints: (method, path, body) in, a Reply out. Both doors go through it.

In process it is called by ``client/transport.py``, over TCP by the gateway. Errors of this package
become replies here; anything else is a bug and passes through.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from agent_rl.api.body import parse_body, too_deep
from agent_rl.api.call import new_call
from agent_rl.api.chat import chat_completions, read_chat_request
from agent_rl.api.chat_stream import chat_chunks
from agent_rl.api.completions import (
    read_completion_request,
    text_chunks,
    text_completions,
)
from agent_rl.api.events import EventStream, chat_event, response_event
from agent_rl.api.failure import failure_of
from agent_rl.api.message_stream import message_event, message_events
from agent_rl.api.messages import (
    count_tokens,
    create_message,
    message_error,
    read_message_request,
)
from agent_rl.api.models import list_models, model_object
from agent_rl.api.response_stream import response_events
from agent_rl.api.responses import create_response, read_response_request
from agent_rl.api.session import Session
from agent_rl.api.stored import (
    cancel_response,
    delete_response,
    input_items,
    retrieve_response,
)
from agent_rl.errors import AgentRLError, NotSupportedError
from agent_rl.types import JsonObject

OnAccept: TypeAlias = Callable[[Sequence[JsonObject]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """``body`` or, for a stream, ``events``: server-sent events as encoded bytes.

    ``request_id`` is the id of the interaction, of choice 0 where there are several.
    ``is_final`` false: the same request may succeed when it is sent again.
    """

    status: int = 200
    body: JsonObject | None = None
    events: EventStream | None = None
    request_id: str | None = None
    is_final: bool = True
    retry_after_s: int | None = None

    @property
    def headers(self) -> dict[str, str]:
        headers = {"content-type": "text/event-stream" if self.events else "application/json"}
        if self.request_id is not None:
            headers["x-request-id"] = self.request_id
        if self.status >= 400 and self.is_final:
            headers["x-should-retry"] = "false"
        if self.retry_after_s is not None:
            headers["retry-after"] = str(self.retry_after_s)
        return headers


def _nobody(messages: Sequence[JsonObject]) -> None:
    pass


async def answer(
    session: Session,
    method: str,
    path: str,
    content: bytes | JsonObject,
    *,
    query: Mapping[str, str] | None = None,
    is_retry: bool = False,
    on_accept: OnAccept = _nobody,
) -> Reply:
    """``path`` without the version prefix: ``chat/completions``. A retry is no new call.

    ``content`` is the body, or the object already read from it; ``query`` is what follows "?".
    ``on_accept`` is called with the messages in chat form when the request is valid and will be
    generated.
    """
    try:
        if method == "GET":
            return _look_up(session, path, query or {})
        if not has_endpoint(method, path):
            raise _unknown(method, path)
        change = _change(method, path)
        if change is not None:
            return Reply(body=change[0](session, change[1]))
        body = content if isinstance(content, dict) else parse_body(content)
        if path == _COUNT_TOKENS:
            return Reply(body=count_tokens(session, body))
        session.check_open()
        if not is_retry:
            session.count_call()
        return await _GENERATORS[path](session, body, on_accept)
    except AgentRLError as error:
        return error_reply(error, path)
    except RecursionError:
        return error_reply(too_deep(), path)


def error_reply(error: AgentRLError, path: str) -> Reply:
    """What went wrong, in the shape of that endpoint's API."""
    failure = failure_of(error)
    is_message = path == "messages" or path.startswith("messages/")
    return Reply(
        status=failure.status,
        body=message_error(failure) if is_message else failure.body,
        is_final=failure.is_final,
        retry_after_s=failure.retry_after_s,
    )


def has_endpoint(method: str, path: str) -> bool:
    if method == "GET":
        return path.partition("/")[0] in ("models", "responses")
    is_known = path in _GENERATORS or path == _COUNT_TOKENS
    return (method == "POST" and is_known) or _change(method, path) is not None


def endpoints() -> list[str]:
    """What is served below /v1; for the message to who asked for something else."""
    return sorted([*_GENERATORS, _COUNT_TOKENS, "models", "responses/{id}"])


def _change(method: str, path: str) -> tuple[Callable[[Session, str], JsonObject], str] | None:
    """What is done to a stored response, and its id."""
    kind, _, rest = path.partition("/")
    name = rest.removesuffix(_CANCEL)
    if kind != "responses" or not name or "/" in name:
        return None
    if method == "DELETE" and rest == name:
        return delete_response, name
    return (cancel_response, name) if method == "POST" and rest != name else None


def _look_up(session: Session, path: str, query: Mapping[str, str]) -> Reply:
    kind, _, name = path.partition("/")
    if kind == "models":
        return Reply(body=model_object(name) if name else list_models(session))
    response_id, _, part = name.partition("/")
    if kind == "responses" and part == "input_items":
        return Reply(body=input_items(session, response_id, query))
    if kind == "responses" and response_id and not part:
        return Reply(body=retrieve_response(session, name, query), request_id=name)
    raise _unknown("GET", path)


def _unknown(method: str, path: str) -> NotSupportedError:
    return NotSupportedError(
        f"{method} /{path} is not served here; give the client passthrough=AsyncOpenAI(...) to "
        "forward it",
        code="unknown_endpoint",
    )


async def _chat(session: Session, body: JsonObject, on_accept: OnAccept) -> Reply:
    request = read_chat_request(session, body)
    on_accept(request.turn.messages)
    call = new_call(session, request.turn, "chatcmpl-")
    if request.is_streamed:
        return await _streamed(EventStream(chat_chunks(call, request), chat_event, end=_DONE))
    return _whole(await chat_completions(call))


async def _response(session: Session, body: JsonObject, on_accept: OnAccept) -> Reply:
    request = read_response_request(session, body)
    on_accept(request.turn.messages)
    call = new_call(session, request.turn, "resp_")
    if request.is_streamed:
        return await _streamed(EventStream(response_events(call, request), response_event))
    return _whole(await create_response(call, request))


async def _text(session: Session, body: JsonObject, on_accept: OnAccept) -> Reply:
    request = read_completion_request(session, body)
    on_accept([message for turn in request.turns for message in turn.messages])
    if request.is_streamed:
        return await _streamed(EventStream(text_chunks(session, request), chat_event, end=_DONE))
    return _whole(await text_completions(session, request))


async def _message(session: Session, body: JsonObject, on_accept: OnAccept) -> Reply:
    request = read_message_request(session, body)
    on_accept(request.turn.messages)
    call = new_call(session, request.turn, "msg_")
    if request.is_streamed:
        return await _streamed(EventStream(message_events(call, request), message_event))
    return _whole(await create_message(call, request))


def _whole(body: JsonObject) -> Reply:
    return Reply(body=body, request_id=body["id"])


async def _streamed(events: EventStream) -> Reply:
    first = await events.start()
    named = first.get("response") or first.get("message") or first
    return Reply(events=events, request_id=named["id"])


_COUNT_TOKENS = "messages/count_tokens"
_CANCEL = "/cancel"
_DONE = b"data: [DONE]\n\n"
Generator: TypeAlias = Callable[[Session, JsonObject, OnAccept], Awaitable[Reply]]
_GENERATORS: dict[str, Generator] = {
    "chat/completions": _chat,
    "completions": _text,
    "messages": _message,
    "responses": _response,
}
