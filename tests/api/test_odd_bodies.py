"""Whatever JSON a client sends, the reply is an answer or a refusal, never an exception."""

from __future__ import annotations

import asyncio
import inspect
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.resources import AsyncCompletions as AsyncTextCompletions
from openai.resources.chat import AsyncCompletions
from openai.resources.responses import AsyncResponses
from transformers import AutoTokenizer

from agent_rl import ScriptedEngine, small_model
from agent_rl.api import routes
from agent_rl.api.session import Session
from agent_rl.record.cache import InteractionCache
from agent_rl.tokens.format import ChatFormat


class GuidedEngine(ScriptedEngine):
    supported = ScriptedEngine.supported | {"grammar", "image_data", "top_logprobs"}


def parameters(create: Any, *others: str) -> list[str]:
    return sorted({*inspect.signature(create).parameters, *others} - {"self"})


CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
GOOD: dict[str, tuple[dict[str, Any], list[str]]] = {
    "chat/completions": (
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "hi"}]},
                {"role": "assistant", "content": None, "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "a", "content": "r"},
            ],
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
            "tool_choice": {"type": "function", "function": {"name": "f"}},
        },
        parameters(AsyncCompletions.create, "top_k", "stop_token_ids", "chat_template_kwargs"),
    ),
    "responses": (
        {
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
                {"type": "reasoning", "summary": [], "content": [{"text": "hm"}]},
                {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "a", "output": "r"},
            ],
            "tools": [{"type": "function", "name": "f", "parameters": {}}],
            "text": {"format": {"type": "json_schema", "name": "s", "schema": {}}},
            "reasoning": {},
            "include": [],
        },
        parameters(AsyncResponses.create),
    ),
    "messages": (
        {
            "system": [{"type": "text", "text": "be brief"}],
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "hi"}]},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "hm", "signature": "s"},
                        {"type": "tool_use", "id": "a", "name": "f", "input": {"x": 1}},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "a", "content": "r"},
                        {"type": "image", "source": {"type": "url", "url": "https://x/y"}},
                    ],
                },
            ],
            "max_tokens": 5,
            "tools": [{"name": "f", "input_schema": {}}],
            "tool_choice": {"type": "tool", "name": "f"},
            "thinking": {"type": "enabled", "budget_tokens": 5},
            "output_config": {"format": {"type": "json_schema", "schema": {}}},
            "context_management": {"edits": [{"keep": "all"}]},
        },
        ["metadata", "service_tier", "stop_sequences", "stream", "temperature", "thread", "top_k"],
    ),
    "completions": (
        {"prompt": ["hi", [1, 2]], "logit_bias": {"5": 1}},
        parameters(AsyncTextCompletions.create),
    ),
}
ODD = st.recursive(
    st.sampled_from([None, True, 0, -1, 2, 10**30, 1.5, 1e308, "", "x", "auto", "required", "🙂"]),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.sampled_from(["type", "function", "name", "text", "5"]), inner)
    ),
    max_leaves=4,
)


@st.composite
def bodies(draw: st.DrawFn, path: str) -> dict[str, Any]:
    """A good body in which up to three values, anywhere in it, are exchanged for odd ones."""
    good, names = GOOD[path]
    body = json.loads(json.dumps({**good, "model": "m"}))
    for _ in range(draw(st.integers(0, 3))):
        holder: Any = body
        key: Any = draw(st.sampled_from([*body, *names]))
        while isinstance(holder.get(key) if isinstance(holder, dict) else holder[key], dict | list):
            inner = holder[key]
            if not inner or draw(st.booleans()):
                break
            holder = inner
            key = draw(
                st.sampled_from(sorted(inner) if isinstance(inner, dict) else range(len(inner)))
            )
        holder[key] = draw(ODD)
    return body  # type: ignore[no-any-return]


@pytest.mark.parametrize("path", sorted(GOOD))
def test_the_reply_is_an_answer_or_a_refusal(path: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(small_model())
    fmt = ChatFormat.of(tokenizer)

    @settings(max_examples=100, deadline=None)
    @given(body=bodies(path))
    def check(body: dict[str, Any]) -> None:
        engine = GuidedEngine(["ok"], tokenizer=tokenizer, repeat=True)
        session = Session(engine=engine, format=fmt, cache=InteractionCache())
        status, text = asyncio.run(reply_of(session, path, json.dumps(body).encode()))
        assert status in (200, 400), text
        assert (len(session.cache) > 0) <= (status == 200)
        for interaction in session.cache.values():
            interaction.to_tensor_dict()

    check()


async def reply_of(session: Session, path: str, content: bytes) -> tuple[int, str]:
    reply = await routes.answer(session, "POST", path, content)
    if reply.events is None:
        return reply.status, json.dumps(reply.body)
    return reply.status, b"".join([event async for event in reply.events]).decode()
