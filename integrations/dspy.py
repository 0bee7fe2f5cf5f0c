"""DSPy: a language model on a recording client, for ``dspy.context(lm=...)``.

DSPy has an HTTP client of its own; an engine is its way to use another one. Its cache is off: an
answer out of a cache was not sampled and is not recorded.
"""

from __future__ import annotations

import json
from typing import Any

import dspy
from dspy.lm15 import OpenAIChatLM, Request, Response, response_from_openai_chat

from agent_rl import ArealOpenAI

_PATH = "/chat/completions"
_WIRE = OpenAIChatLM(api_key="agent-rl")


def dspy_lm(client: ArealOpenAI, **parameters: Any) -> dspy.LM:
    """``parameters`` are those of every request: temperature, max_tokens, ..."""
    return dspy.LM(
        "local",
        engine=Engine(client),
        async_engine=AsyncEngine(client),
        cache=False,
        num_retries=0,
        **parameters,
    )


class Engine:
    """For modules that are called in a worker thread."""

    def __init__(self, client: ArealOpenAI) -> None:
        self._client = client

    def complete(self, request: Request) -> Response:
        post = self._client.sync.post
        return _response(post(_PATH, body=_body(request), cast_to=object))


class AsyncEngine:
    """For modules that are awaited with ``acall``."""

    def __init__(self, client: ArealOpenAI) -> None:
        self._client = client

    async def complete(self, request: Request) -> Response:
        post = self._client.post
        return _response(await post(_PATH, body=_body(request), cast_to=object))


def _body(request: Request) -> Any:
    return json.loads(_WIRE.build_request(request, stream=False).body)


def _response(completion: Any) -> Response:
    return response_from_openai_chat(completion)
