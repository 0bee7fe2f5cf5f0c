"""The SDK's resources with a ``create`` that posts its arguments as they are.

The SDK first rewrites every message against each member of its parameter types: 0.17 ms of CPU per
message, on the event loop, only to rename keys that our endpoints do not have. ``create`` of these
subclasses skips that, and ``stream`` with it; ``parse`` is the SDK's own, with the history handed
to it as ``extra_body``, which it does not rewrite. Raw and streaming responses go through them too.
To the type checker and to ``inspect.signature`` they are the SDK's methods.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

from openai import AsyncStream, NotGiven, Omit, Stream
from openai.resources.chat import AsyncChat, AsyncCompletions, Chat, Completions
from openai.resources.responses import AsyncResponses, Responses
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent

_OPTIONS = {
    "extra_headers": "headers",
    "extra_query": "params",
    "extra_body": "extra_json",
    "timeout": "timeout",
}
Create = Callable[..., Any]


def direct_create(original: Create, path: str, result: type, stream: Any) -> Create:
    """``original`` without the rewriting: same signature, same result.

    It serves both kinds of client: what ``_post`` returns is the result or the awaitable of it.
    """
    known = frozenset(inspect.signature(original).parameters) - {"self"}

    @functools.wraps(original)
    def create(self: Any, **params: Any) -> Any:
        options: dict[str, Any] = {}
        body: dict[str, Any] = {}
        for name, value in params.items():
            if name not in known:
                raise TypeError(f"create() got an unexpected keyword argument {name!r}")
            if isinstance(value, Omit | NotGiven):
                continue
            if name not in _OPTIONS:
                # The SDK takes any iterable of messages; JSON takes lists.
                is_lazy = isinstance(value, Iterable) and not isinstance(value, str | Mapping)
                body[name] = list(value) if is_lazy else value
            elif value is not None or name == "timeout":
                options[_OPTIONS[name]] = value
        return self._post(
            path,
            body=body,
            options=options,
            cast_to=result,
            stream=bool(body.get("stream")),
            stream_cls=stream,
        )

    return create


def direct_parse(original: Create, history: str, stand_in: object) -> Create:
    """``original`` without the rewriting of its argument ``history``, in whose place it gets
    ``stand_in``."""

    @functools.wraps(original)
    def parse(self: Any, **params: Any) -> Any:
        value = params.get(history)
        if isinstance(value, Iterable) and not isinstance(value, str | Mapping):
            extra = {history: list(value), **(params.get("extra_body") or {})}
            params |= {history: stand_in, "extra_body": extra}
        return original(self, **params)

    return parse


class DirectChatCompletions(AsyncCompletions):
    if not TYPE_CHECKING:
        parse = direct_parse(AsyncCompletions.parse, "messages", [])
        create = direct_create(
            AsyncCompletions.create,
            "/chat/completions",
            ChatCompletion,
            AsyncStream[ChatCompletionChunk],
        )


class DirectChat(AsyncChat):
    @cached_property
    def completions(self) -> DirectChatCompletions:
        return DirectChatCompletions(self._client)


class DirectResponses(AsyncResponses):
    if not TYPE_CHECKING:
        parse = direct_parse(AsyncResponses.parse, "input", "")
        create = direct_create(
            AsyncResponses.create, "/responses", Response, AsyncStream[ResponseStreamEvent]
        )


class DirectSyncChatCompletions(Completions):
    if not TYPE_CHECKING:
        parse = direct_parse(Completions.parse, "messages", [])
        create = direct_create(
            Completions.create, "/chat/completions", ChatCompletion, Stream[ChatCompletionChunk]
        )


class DirectSyncChat(Chat):
    @cached_property
    def completions(self) -> DirectSyncChatCompletions:
        return DirectSyncChatCompletions(self._client)


class DirectSyncResponses(Responses):
    if not TYPE_CHECKING:
        parse = direct_parse(Responses.parse, "input", "")
        create = direct_create(
            Responses.create, "/responses", Response, Stream[ResponseStreamEvent]
        )
