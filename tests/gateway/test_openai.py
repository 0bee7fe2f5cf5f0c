"""The OpenAI endpoints with the real openai client over a real socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest

CALL = 'Sure.<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
TOOL: Any = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {}}},
}
ASK: list[Any] = [{"role": "user", "content": "2+2?"}]


@pytest.fixture
async def connect(start: Any) -> AsyncIterator[Any]:
    """``client, gateway = await connect(replies)``; the client's calls are in session "s"."""
    clients: list[openai.AsyncOpenAI] = []

    async def connect_one(replies: Any, **config: Any) -> Any:
        gateway = await start(replies, **config)
        client = openai.AsyncOpenAI(
            base_url=gateway.base_url,
            api_key=gateway.api_key,
            max_retries=0,
            default_headers={"X-Session-Id": "s"},
        )
        clients.append(client)
        return client, gateway

    yield connect_one
    for client in clients:
        await client.close()


def cache_of(gateway: Any) -> Any:
    (live,) = gateway._sessions
    return live.session.cache


async def test_tools_and_their_results(connect: Any) -> None:
    client, gateway = await connect([CALL, "three"], chat_template_type="concat")
    first = await client.chat.completions.create(model="m", messages=ASK, tools=[TOOL])
    assert first.choices[0].finish_reason == "tool_calls"
    (call,) = first.choices[0].message.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": "3"}
    second = await client.chat.completions.create(
        model="m", messages=[*ASK, first.choices[0].message, result], tools=[TOOL]
    )
    cache = cache_of(gateway)
    assert cache[second.id].parent is cache[first.id]


async def test_a_stream_is_the_same_as_a_whole_answer(connect: Any) -> None:
    """Cases B47 and B49."""
    client, gateway = await connect([CALL, CALL])
    whole = await client.chat.completions.create(model="m", messages=ASK, tools=[TOOL])
    async with client.chat.completions.stream(
        model="m", messages=ASK, tools=[TOOL], stream_options={"include_usage": True}
    ) as stream:
        final = await stream.get_final_completion()
    assert final.choices[0].message.content == whole.choices[0].message.content == "Sure."
    assert final.usage == whole.usage
    first, second = cache_of(gateway).values()
    assert (first.interaction_id, second.interaction_id) == (whole.id, final.id)
    assert first.model_response.output_tokens == second.model_response.output_tokens


async def test_several_choices_are_siblings(connect: Any) -> None:
    """Case B51."""
    client, gateway = await connect(["a", "b"])
    both = await client.chat.completions.create(model="m", messages=ASK, n=2)
    assert [choice.message.content for choice in both.choices] == ["a", "b"]
    assert list(cache_of(gateway)) == [both.id, f"{both.id}/1"]


async def test_responses_go_on_from_the_record(connect: Any) -> None:
    client, gateway = await connect(["four", "five"])
    first = await client.responses.create(model="m", input="2+2?")
    second = await client.responses.create(
        model="m", input="and 2+3?", previous_response_id=first.id
    )
    assert second.output_text == "five"
    assert [message["content"] for message in cache_of(gateway)[second.id].messages] == [
        *("2+2?", "four", "and 2+3?"),
    ]
    assert (await client.responses.retrieve(first.id)).output_text == "four"


async def test_a_streamed_response(connect: Any) -> None:
    client, _ = await connect(["four"])
    async with client.responses.stream(model="m", input="2+2?") as stream:
        kinds = [event.type async for event in stream]
    assert kinds[0] == "response.created" and kinds[-1] == "response.completed"


async def test_text_completions(connect: Any) -> None:
    client, gateway = await connect(["four"])
    completion = await client.completions.create(model="m", prompt="2+2=")
    assert completion.choices[0].text == "four" and completion.id in cache_of(gateway)


async def test_a_loop_without_end_is_stopped(connect: Any) -> None:
    client, _ = await connect(["a"] * 3, max_requests=2)
    for _ in range(2):
        await client.chat.completions.create(model="m", messages=ASK)
    with pytest.raises(openai.RateLimitError, match="max_requests=2"):
        await client.with_options(max_retries=2).chat.completions.create(model="m", messages=ASK)


async def test_what_frameworks_send_along(connect: Any) -> None:
    """Case B184: what is known is used, what is not is named; parts and their text are one."""
    client, gateway = await connect(["four", "five"], chat_template_type="concat")
    parts = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    first = await client.chat.completions.create(
        model="m",
        messages=parts,
        user="ann",
        metadata={"run": "1"},
        store=True,
        parallel_tool_calls=True,
        response_format={"type": "text"},
        seed=3,
        timeout=30.0,
        extra_body={"top_k": 5},
    )
    interaction = cache_of(gateway)[first.id]
    assert interaction.metadata == {"user": "ann", "metadata": {"run": "1"}}
    (request,) = gateway._engine.requests
    assert (request.gconfig.seed, request.gconfig.top_k) == (3, 5)
    plain_text = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "four"},
        {"role": "user", "content": "and?"},
    ]
    second = await client.chat.completions.create(model="m", messages=plain_text)
    assert cache_of(gateway)[second.id].parent is interaction
    with pytest.raises(openai.BadRequestError, match="max_turns is not a parameter"):
        await client.chat.completions.create(model="m", messages=parts, extra_body={"max_turns": 3})


@pytest.mark.parametrize("data", ["", "not base64!", "iVBORw0KGgo" + "A" * 2_000_000])
async def test_images_for_a_model_of_text_are_refused_whole(connect: Any, data: str) -> None:
    """Cases B186 and B188: nothing is decoded, nothing is recorded, nobody else waits."""
    client, gateway = await connect(["four"])
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
    text = {"type": "text", "text": "what is this?"}
    calls = [
        client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": [text, image]}]
        )
        for _ in range(4)
    ]
    for error in await asyncio.gather(*calls, return_exceptions=True):
        assert isinstance(error, openai.BadRequestError) and error.code == "unsupported_content"
    assert (await client.chat.completions.create(model="m", messages=ASK)).choices
    assert len(cache_of(gateway)) == 1


async def test_idle_connections_outlive_the_clients_patience(start: Any) -> None:
    """Case B141: the client closes first, so no request dies on a closing connection."""
    gateway = await start([])
    patience = httpx.Limits().keepalive_expiry
    assert patience is not None and gateway._server.config.timeout_keep_alive > patience
