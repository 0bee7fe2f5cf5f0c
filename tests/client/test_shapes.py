"""Answers hold what the SDK's models declare: nothing required is missing, nothing is extra."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from agent_rl import ArealOpenAI, ScriptedEngine

TOOLS: Any = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
FLAT_TOOLS: Any = [{"type": "function", "name": "f", "parameters": {"type": "object"}}]
ANSWERS = ["one two", '<think>so</think>ok<tool_call>{"name": "f"}</tool_call>']
EXTRA = {"reasoning_content"}  # as all servers of open models call it
EVENT_EXTRA = {"name"}  # of function_call_arguments.done: required in openai 2.x, gone in 3.x


def extras(value: Any) -> Iterator[str]:
    """Names of undeclared fields anywhere inside."""
    if isinstance(value, BaseModel):
        yield from value.model_extra or ()
        for name in type(value).model_fields:
            yield from extras(getattr(value, name))
    elif isinstance(value, list):
        for item in value:
            yield from extras(item)


@pytest.fixture(params=ANSWERS)
def client(request: Any, tokenizer: Any, guided_engine_type: type) -> ArealOpenAI:
    def reply(req: Any) -> dict[str, Any]:
        ids = [*tokenizer.encode(request.param), tokenizer.eos_token_id]
        tops = tuple(((i, -0.1), (5, -2.5)) for i in ids)
        return {"output_tokens": ids, "output_top_logprobs": tops}

    engine: ScriptedEngine = guided_engine_type([reply], tokenizer=tokenizer, repeat=True)
    return ArealOpenAI(engine, tokenizer, reasoning_parser="qwen3")


@pytest.mark.parametrize("top", [None, 2])
async def test_chat(top: int | None, client: ArealOpenAI) -> None:
    call: Any = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "tools": TOOLS}
    call |= {"logprobs": True, "top_logprobs": top, "n": 2}
    completion = await client.chat.completions.create(**call)
    assert set(extras(ChatCompletion.model_validate(completion.to_dict()))) <= EXTRA
    assert completion.choices[0].logprobs.content[0].top_logprobs != [] or top is None
    options = {"include_usage": True}
    stream = await client.chat.completions.create(**call, stream=True, stream_options=options)
    chunks = [chunk async for chunk in stream]
    for chunk in chunks:
        assert set(extras(ChatCompletionChunk.model_validate(chunk.to_dict()))) <= EXTRA
    streamed = [e for c in chunks[:-1] if c.choices[0].index == 0 if c.choices[0].logprobs
                for e in c.choices[0].logprobs.content]  # fmt: skip
    if top is None:
        assert [entry.logprob for entry in streamed] == [
            entry.logprob for entry in completion.choices[0].logprobs.content
        ]
    else:
        assert streamed == completion.choices[0].logprobs.content


async def test_responses(client: ArealOpenAI) -> None:
    call: Any = {"model": "m", "input": "hi", "tools": FLAT_TOOLS, "top_logprobs": 2}
    response = await client.responses.create(**call)
    assert list(extras(Response.model_validate(response.to_dict()))) == []
    adapter: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
    async for event in await client.responses.create(**call, stream=True):
        assert set(extras(adapter.validate_python(event.to_dict()))) <= EVENT_EXTRA


async def test_old_completions(client: ArealOpenAI) -> None:
    completion = await client.completions.create(model="m", prompt="hi", logprobs=2)
    assert list(extras(Completion.model_validate(completion.to_dict()))) == []
    tops = completion.choices[0].logprobs.top_logprobs
    assert len(tops) == len(completion.choices[0].logprobs.tokens)


async def test_usage_has_what_the_engine_reused(tokenizer: Any) -> None:
    """Of two choices the second finds what the first has computed: not reused by the call."""
    replies: list[Any] = [
        {"output_tokens": (5,), "num_cached_tokens": count} for count in (7, 30, 4, None)
    ]
    client = ArealOpenAI(ScriptedEngine(replies, tokenizer=tokenizer), tokenizer)
    ask: Any = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    two = await client.chat.completions.create(**ask, n=2)
    assert two.usage.prompt_tokens_details.cached_tokens == 7
    response = await client.responses.create(model="m", input="hi")
    assert response.usage.input_tokens_details.cached_tokens == 4
    interaction = client.interactions[response.id]
    assert interaction.model_response.num_cached_tokens == 4
    unknown = await client.chat.completions.create(**ask)
    assert unknown.usage.prompt_tokens_details.cached_tokens == 0
