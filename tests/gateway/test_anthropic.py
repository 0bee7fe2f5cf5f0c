"""/v1/messages with the real anthropic client over a real socket."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import anthropic
import httpx
import pytest

from agent_rl import ArealOpenAI, ScriptedEngine
from agent_rl.gateway.sessions import Door

ASK: list[Any] = [{"role": "user", "content": "2+2?"}]
TOOLS: list[Any] = [
    {
        "name": "add",
        "description": "adds",
        "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}}},
    }
]
CALLS = (
    'Sure.<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>'
)


class Served:
    """An attached session and a client of it."""

    def __init__(self, engine: ScriptedEngine, client: ArealOpenAI, door: Door) -> None:
        self.engine = engine
        self.interactions = client.interactions
        self.door = door
        self.sdk = anthropic.AsyncAnthropic(
            base_url=door.base_url.removesuffix("/v1"), api_key=door.api_key, max_retries=0
        )


@pytest.fixture
async def serve(start: Any, tokenizer: Any) -> AsyncIterator[Any]:
    served: list[Served] = []

    async def serve_one(replies: list[Any], **client_args: Any) -> Served:
        gateway = await start([])
        engine = ScriptedEngine(replies, tokenizer=tokenizer, max_seq_len=4096)
        client = ArealOpenAI(engine, tokenizer, **client_args)
        served.append(Served(engine, client, gateway.attach(client._session)))
        return served[-1]

    yield serve_one
    for one in served:
        await one.sdk.close()


async def test_a_message_is_recorded_under_its_id(serve: Any, tokenizer: Any) -> None:
    served = await serve(["four"])
    message = await served.sdk.messages.create(
        model="m",
        max_tokens=7,
        system="be brief",
        messages=ASK,
        metadata={"user_id": "u1"},
        extra_body={"temperature": 0.5, "top_k": 3},
    )
    assert message.content == [anthropic.types.TextBlock(type="text", text="four")]
    assert (message.stop_reason, message.role, message.model) == ("end_turn", "assistant", "m")
    interaction = served.interactions[message.id]
    assert interaction.messages == [{"role": "system", "content": "be brief"}, *ASK]
    assert interaction.metadata == {"user": "u1"}
    (request,) = served.engine.requests
    assert (request.gconfig.max_new_tokens, request.gconfig.temperature) == (7, 0.5)
    assert request.gconfig.top_k == 3
    sampled = interaction.model_response.output_tokens
    assert tokenizer.decode(sampled) == "four" + tokenizer.eos_token
    assert message.usage.input_tokens == len(request.input_ids)
    assert message.usage.output_tokens == len(sampled)


async def test_tool_uses_go_on_from_the_sampled_ids(serve: Any) -> None:
    """Case B22: two calls stay two blocks; their results extend the same ids."""
    served = await serve([CALLS, "three"], chat_template_type="concat")
    first = await served.sdk.messages.create(model="m", max_tokens=99, messages=ASK, tools=TOOLS)
    assert first.stop_reason == "tool_use"
    assert [block.type for block in first.content] == ["text", "tool_use", "tool_use"]
    uses = first.content[1:]
    assert [use.input for use in uses] == [{"a": 1}, {"a": 2}]
    results = [
        {"type": "tool_result", "tool_use_id": use.id, "content": f"got {use.input['a']}"}
        for use in uses
    ]
    messages = [
        *ASK,
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": results},
    ]
    second = await served.sdk.messages.create(
        model="m", max_tokens=99, messages=messages, tools=TOOLS
    )
    child, parent = served.interactions[second.id], served.interactions[first.id]
    assert child.parent is parent
    known = (*parent.model_response.input_tokens, *parent.model_response.output_tokens)
    assert child.model_response.input_tokens[: len(known)] == known


async def test_events_come_in_the_official_order(serve: Any) -> None:
    served = await serve([CALLS])
    async with httpx.AsyncClient() as plain:
        reply = await plain.post(
            f"{served.door.base_url}/messages",
            headers={"x-api-key": served.door.api_key},
            json={"max_tokens": 99, "messages": ASK, "tools": TOOLS, "stream": True},
        )
    assert reply.headers["content-type"] == "text/event-stream"
    names = [line[7:] for line in reply.text.splitlines() if line.startswith("event: ")]
    merged = [name for i, name in enumerate(names) if i == 0 or name != names[i - 1]]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert merged == ["message_start", *block, *block, *block, "message_delta", "message_stop"]


async def test_a_stream_and_a_whole_message_say_the_same(serve: Any) -> None:
    """Case B47."""
    served = await serve([CALLS, CALLS])
    whole = await served.sdk.messages.create(model="m", max_tokens=99, messages=ASK, tools=TOOLS)
    async with served.sdk.messages.stream(
        model="m", max_tokens=99, messages=ASK, tools=TOOLS
    ) as stream:
        streamed = await stream.get_final_message()

    def said(message: Any) -> Any:
        return [
            (block.type, getattr(block, "text", None), getattr(block, "input", None))
            for block in message.content
        ]

    assert said(streamed) == said(whole)
    assert (streamed.stop_reason, streamed.usage) == (whole.stop_reason, whole.usage)
    first, second = served.interactions.values()
    assert second.interaction_id == streamed.id
    assert first.model_response.output_tokens == second.model_response.output_tokens


async def test_thinking_is_a_block_and_comes_back_as_reasoning(serve: Any) -> None:
    """Case B14."""
    answer = "<think>add them</think>four"
    served = await serve([answer, answer, "five"], reasoning_parser="qwen3")
    whole = await served.sdk.messages.create(
        model="m",
        max_tokens=2000,
        messages=ASK,
        thinking={"type": "enabled", "budget_tokens": 1024},
    )
    assert [block.type for block in whole.content] == ["thinking", "text"]
    assert whole.content[0].thinking == "add them" and whole.content[0].signature
    assert whole.usage.output_tokens_details.thinking_tokens > 0
    async with served.sdk.messages.stream(
        model="m",
        max_tokens=2000,
        messages=ASK,
        thinking={"type": "adaptive", "display": "omitted"},
    ) as stream:
        hidden = await stream.get_final_message()
    assert [block.type for block in hidden.content] == ["thinking", "text"]
    assert hidden.content[0].thinking == "" and hidden.content[1].text == "four"
    messages = [*ASK, {"role": "assistant", "content": whole.content}, *ASK]
    last = await served.sdk.messages.create(model="m", max_tokens=9, messages=messages)
    assert served.interactions[last.id].messages[1]["reasoning_content"] == "add them"


async def test_stop_reasons(serve: Any, tokenizer: Any) -> None:
    """Cases B31 and B41: a cut answer says so; a stop sequence is named and trimmed."""
    ids = tokenizer.encode("ab END", add_special_tokens=False)
    cut = {"output_tokens": ids, "stop_reason": "length"}
    stopped = {"output_tokens": ids, "stop_reason": "stop"}
    served = await serve([cut, stopped])
    first = await served.sdk.messages.create(model="m", max_tokens=3, messages=ASK)
    assert (first.stop_reason, first.stop_sequence) == ("max_tokens", None)
    second = await served.sdk.messages.create(
        model="m", max_tokens=9, messages=ASK, stop_sequences=["zz", "END"]
    )
    assert (second.stop_reason, second.stop_sequence) == ("stop_sequence", "END")
    assert second.content[0].text == "ab "
    assert len(served.interactions[second.id].model_response.output_tokens) == len(ids)


async def test_count_tokens_is_what_would_be_sent(serve: Any) -> None:
    served = await serve(["four"])
    counted = await served.sdk.messages.count_tokens(
        model="m", system="be brief", messages=ASK, tools=TOOLS
    )
    message = await served.sdk.messages.create(
        model="m", max_tokens=9, system="be brief", messages=ASK, tools=TOOLS
    )
    assert counted.input_tokens == message.usage.input_tokens
    assert len(served.engine.requests) == 1 and len(served.interactions) == 1


async def test_an_error_has_the_shape_of_this_api(serve: Any) -> None:
    """Case B39: a prompt that is too long is told in the words that agents look for."""
    served = await serve([])
    with pytest.raises(anthropic.BadRequestError, match="max_tokens is -1") as caught:
        await served.sdk.messages.create(model="m", max_tokens=-1, messages=ASK)
    assert caught.value.body["type"] == "error"
    assert caught.value.body["error"]["type"] == "invalid_request_error"
    long = [{"role": "user", "content": "word " * 5000}]
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long: the prompt has 5"):
        await served.sdk.messages.create(model="m", max_tokens=9, messages=long)
    with pytest.raises(anthropic.BadRequestError, match="end with the assistant's turn"):
        prefill = [*ASK, {"role": "assistant", "content": "The"}]
        await served.sdk.messages.create(model="m", max_tokens=9, messages=prefill)
    with pytest.raises(anthropic.InternalServerError, match="has 0 replies"):
        await served.sdk.messages.create(model="m", max_tokens=9, messages=ASK)
    served.sdk.api_key = "wrong"
    with pytest.raises(anthropic.AuthenticationError, match="authentication_error"):
        await served.sdk.messages.create(model="m", max_tokens=9, messages=ASK)
    assert not served.interactions


@pytest.mark.parametrize(
    "field",
    [
        {"mcp_servers": [{"url": "x"}]},
        {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
        {"stop_sequences": [""]},
        {"tool_choice": {"type": "any"}},
        {"output_config": {"effort": "low"}},
        {"no_such_field": 1},
    ],
)
async def test_what_cannot_be_honoured_is_refused(serve: Any, field: dict[str, Any]) -> None:
    served = await serve([])
    with pytest.raises(anthropic.BadRequestError, match=next(iter(field))):
        await served.sdk.messages.create(model="m", max_tokens=9, messages=ASK, extra_body=field)


async def test_what_a_coding_agent_sends_unasked_is_taken(serve: Any) -> None:
    served = await serve(["four"])
    async with served.sdk.beta.messages.stream(
        model="m",
        max_tokens=32000,
        system=[{"type": "text", "text": "header", "cache_control": {"type": "ephemeral"}}],
        messages=ASK,
        thinking={"type": "enabled", "budget_tokens": 31999},
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        metadata={"user_id": "u"},
        betas=["context-management-2025-06-27"],
    ) as stream:
        message = await stream.get_final_message()
    assert message.content[0].text == "four"


async def test_the_tool_runner_continues_a_thread(serve: Any) -> None:
    """The SDK's own loop sends only the tool result; the rest is in the record."""
    served = await serve([CALLS, "three"])

    @anthropic.beta_async_tool
    async def add(a: int) -> str:
        """Adds.

        Args:
            a: a number
        """
        return f"got {a}"

    runner = served.sdk.beta.messages.tool_runner(
        model="m", max_tokens=99, system="be brief", messages=ASK, tools=[add]
    )
    last = await runner.until_done()
    assert last.content[0].text == "three"
    recorded = served.interactions[last.id].messages
    assert [message["role"] for message in recorded] == [
        *("system", "user", "assistant", "tool", "tool"),
    ]


async def test_a_lost_thread_is_sent_again_whole(serve: Any) -> None:
    served = await serve([])
    with pytest.raises(anthropic.NotFoundError) as caught:
        await served.sdk.beta.messages.create(
            model="m",
            max_tokens=9,
            messages=ASK,
            extra_body={"thread": {"type": "continue", "previous_message_id": "msg_gone"}},
        )
    assert caught.value.body["error"]["details"] == {"error_code": "thread_not_found"}
