"""Everything else of the SDK works, because requests travel its own path."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
from typing import Any

import openai
import pytest
from openai.resources import chat, responses
from pydantic import BaseModel

from agent_rl import ArealOpenAI, ScriptedEngine
from agent_rl.client import resources
from agent_rl.client.http import hx

HI: Any = [{"role": "user", "content": "hi"}]


class Answer(BaseModel):
    x: int


def make(tokenizer: Any, *replies: Any, **kwargs: Any) -> ArealOpenAI:
    return ArealOpenAI(ScriptedEngine(list(replies), tokenizer=tokenizer), tokenizer, **kwargs)


async def test_raw_response(tokenizer: Any) -> None:
    client = make(tokenizer, "a", "b", "c")
    for completions in (
        client.chat.completions.with_raw_response,
        client.chat.with_raw_response.completions,
        client.with_raw_response.chat.completions,
    ):
        raw = await completions.create(model="m", messages=HI)
        completion = raw.parse()
        assert raw.headers["x-request-id"] == completion.id
        assert raw.http_response.status_code == 200
    assert len(client.interactions) == 3


async def test_streaming_response(tokenizer: Any) -> None:
    client = make(tokenizer, "one two", "one two")
    async with client.chat.completions.with_streaming_response.create(
        model="m", messages=HI
    ) as response:
        assert '"one two"' in await response.text()
    async with client.chat.completions.with_streaming_response.create(
        model="m", messages=HI, stream=True
    ) as response:
        lines = [line async for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"


async def test_parse(tokenizer: Any, guided_engine_type: type) -> None:
    engine = guided_engine_type(['{"x": 3}'], tokenizer=tokenizer, repeat=True)
    client = ArealOpenAI(engine, tokenizer)
    for parse in (client.chat.completions.parse, client.beta.chat.completions.parse):
        parsed = await parse(model="m", messages=HI, response_format=Answer)
        assert parsed.choices[0].message.parsed == Answer(x=3)
    assert engine.requests[0].gconfig.grammar.startswith("start: answer\nanswer: %json {")
    assert len(client.interactions) == 2


async def test_parse_sends_the_history_as_it_is(tokenizer: Any, guided_engine_type: type) -> None:
    """Message objects, a generator, raw responses, both APIs, both kinds of client."""
    engine = guided_engine_type(['{"x": 3}'], tokenizer=tokenizer, repeat=True)
    client = ArealOpenAI(engine, tokenizer)
    first = await client.chat.completions.create(model="m", messages=HI)
    more = [*HI, first.choices[0].message, {"role": "user", "content": "and?"}]
    asked: Any = {"model": "m", "response_format": Answer, "extra_body": {"top_k": 5}}
    second = await client.chat.completions.parse(messages=(each for each in more), **asked)
    assert second.choices[0].message.parsed == Answer(x=3)
    assert client.interactions[second.id].parent is client.interactions[first.id]
    assert engine.requests[-1].gconfig.top_k == 5
    raw = await client.chat.completions.with_raw_response.parse(messages=more, **asked)
    assert raw.parse().choices[0].message.parsed == Answer(x=3)
    sync = client.sync.chat.completions.parse
    parsed = await asyncio.to_thread(lambda: sync(messages=more, **asked))
    assert parsed.choices[0].message.parsed == Answer(x=3)
    items: Any = [{"role": "user", "content": "hi"}]
    response = await client.responses.parse(model="m", input=items, text_format=Answer)
    assert response.output_parsed == Answer(x=3)
    assert client.interactions[response.id].messages == items
    with pytest.raises(TypeError, match="messages"):
        await client.chat.completions.parse(model="m", response_format=Answer)


async def test_parse_on_an_engine_without_guided_decoding(tokenizer: Any) -> None:
    client = make(tokenizer, '{"x": 3}')
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.parse(model="m", messages=HI, response_format=Answer)
    assert caught.value.param == "response_format"


async def test_post_as_litellm_does(tokenizer: Any) -> None:
    client = make(tokenizer, "a")
    body = {"model": "m", "messages": HI}
    completion = await client.post(
        "/chat/completions", body=body, cast_to=openai.types.chat.ChatCompletion
    )
    assert completion.choices[0].message.content == "a"


async def test_returned_message_objects_can_be_sent_back(tokenizer: Any) -> None:
    """Case B12 a, b, c: the object, its dump, a dict by hand: one conversation."""
    client = make(tokenizer, "a", "b", "b", "b")
    first = await client.chat.completions.create(model="m", messages=HI)
    message = first.choices[0].message
    for replay in (
        message,
        message.model_dump(exclude_none=True),
        {"role": "assistant", "content": "a"},
    ):
        second = await client.chat.completions.create(
            model="m", messages=[*HI, replay, {"role": "user", "content": "and?"}]
        )
        assert client.interactions[second.id].parent is client.interactions[first.id]


async def test_messages_may_be_any_iterable(tokenizer: Any) -> None:
    """Case B12 e: a tuple or a generator of messages is as good as a list."""
    client = make(tokenizer, "a", "a")
    for messages in (tuple(HI), (message for message in HI)):
        completion = await client.chat.completions.create(model="m", messages=messages)
        assert client.interactions[completion.id].messages == HI


async def test_a_model_class_belongs_to_parse(tokenizer: Any) -> None:
    client = make(tokenizer, "a")
    with pytest.raises(TypeError):
        await client.chat.completions.create(
            model="m",
            messages=HI,
            response_format=Answer,  # type: ignore[call-overload]
        )


async def test_tool_turn_and_its_answer_are_one_conversation(tokenizer: Any) -> None:
    """Cases B11, B22, B32: content null, "" or absent; the results in either order."""
    calls = (
        '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>\n'
        '<tool_call>\n{"name": "g", "arguments": {"y": 2}}\n</tool_call>'
    )
    tools: Any = [{"type": "function", "function": {"name": name}} for name in "fg"]
    client = make(tokenizer, calls, *["done"] * 6, chat_template_type="concat")
    first = await client.chat.completions.create(model="m", messages=HI, tools=tools)
    message = first.choices[0].message
    assert first.choices[0].finish_reason == "tool_calls"
    assert message.content is None
    assert message.tool_calls is not None
    assert [call.function.arguments for call in message.tool_calls] == ['{"x": 1}', '{"y": 2}']
    dumped = message.model_dump()
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": "3"} for call in message.tool_calls
    ]
    variants = [
        dumped,
        {**dumped, "content": ""},
        {key: value for key, value in dumped.items() if key != "content"},
        {**dumped, "refusal": None, "audio": None, "annotations": []},
    ]
    for replay in variants:
        for order in (results, results[::-1]) if replay is dumped else (results,):
            second = await client.chat.completions.create(
                model="m", messages=[*HI, replay, *order], tools=tools
            )
            assert client.interactions[second.id].parent is client.interactions[first.id]


async def test_without_tools_a_call_is_text(tokenizer: Any) -> None:
    """Case B32."""
    text = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    completion = await make(tokenizer, text).chat.completions.create(model="m", messages=HI)
    assert completion.choices[0].message.content == text
    assert completion.choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    "body",
    [
        *('{"name":"f","arguments":{"x":1,}}', '{"name":"f"', '{"arguments":{}}'),
        *("[1,2]", "null", '{"name": 3, "arguments": {}}'),
    ],
)
async def test_malformed_calls_stay_visible(body: str, tokenizer: Any) -> None:
    """Case B23: no exception, the text is content, the ids are recorded and exportable."""
    text = f"<tool_call>\n{body}\n</tool_call>"
    client = make(tokenizer, text)
    tools: Any = [{"type": "function", "function": {"name": "f"}}]
    completion = await client.chat.completions.create(model="m", messages=HI, tools=tools)
    message = completion.choices[0].message
    assert (message.content, message.tool_calls) == (text, None)
    assert completion.choices[0].finish_reason == "stop"
    row = client.export_interactions("individual")[completion.id]
    sampled = (*tokenizer.encode(text), tokenizer.eos_token_id)
    assert row.model_response.output_tokens == sampled


async def test_versions_are_those_of_dispatch(tokenizer: Any) -> None:
    """Case B61: the weights change while the answer is on its way."""

    async def reply(request: Any) -> list[int]:
        engine.set_version(4)
        return [20, 21]

    engine = ScriptedEngine([reply], tokenizer=tokenizer, version=3)
    client = ArealOpenAI(engine, tokenizer)
    completion = await client.chat.completions.create(model="m", messages=HI)
    assert client.interactions[completion.id].model_response.output_versions == (3, 3)


async def test_reply_with_unequal_lengths_is_an_error(tokenizer: Any) -> None:
    """Case B41: 2 ids and 3 log-probs, the message gives both lengths."""
    reply = {"output_tokens": [20, 21], "output_logprobs": [-0.1, -0.2, -0.3]}
    client = make(tokenizer, reply)
    with pytest.raises(openai.InternalServerError, match="2 token ids but 3 output_logprobs"):
        await client.chat.completions.create(model="m", messages=HI)
    assert len(client.interactions) == 0


async def test_contextvars_of_the_agent_are_visible(tokenizer: Any) -> None:
    name: contextvars.ContextVar[str] = contextvars.ContextVar("name")
    seen = []

    def reply(request: Any) -> str:
        seen.append(name.get())
        return "a"

    client = make(tokenizer, reply, reply)
    name.set("agent 7")
    await client.chat.completions.create(model="m", messages=HI)
    sync = client.sync.chat.completions
    await asyncio.to_thread(sync.create, model="m", messages=HI)
    assert seen == ["agent 7", "agent 7"]


async def test_sync_client_is_on_the_same_record(tokenizer: Any) -> None:
    client = make(tokenizer, "a", "one two", max_requests=2)
    assert client.sync is client.sync

    def work() -> tuple[str, str]:
        completion = client.sync.chat.completions.create(model="m", messages=HI)
        stream = client.sync.chat.completions.create(model="m", messages=HI, stream=True)
        chunks = [chunk.choices[0].delta.content or "" for chunk in stream]
        with pytest.raises(openai.RateLimitError):
            client.sync.chat.completions.create(model="m", messages=HI)
        client.sync.close()
        return completion.id, "".join(chunks)

    name, text = await asyncio.to_thread(work)
    assert text == "one two"
    assert next(iter(client.interactions)) == name
    assert len(client.interactions) == 2


async def test_sync_client_refuses_to_block_a_running_loop(tokenizer: Any) -> None:
    client = make(tokenizer, "a")
    with pytest.raises(RuntimeError, match=r"asyncio\.to_thread"):
        client.sync.chat.completions.create(model="m", messages=HI)


def test_one_client_on_two_event_loops_in_turn(tokenizer: Any) -> None:
    client = make(tokenizer, "a", "b")
    for text in ("a", "b"):
        completion = asyncio.run(client.chat.completions.create(model="m", messages=HI))
        assert completion.choices[0].message.content == text


async def test_passthrough_forwards_what_is_not_generation(tokenizer: Any) -> None:
    seen: list[Any] = []

    def serve(request: Any) -> Any:
        seen.append(request)
        data = [{"object": "embedding", "index": 0, "embedding": [0.5]}]
        usage = {"prompt_tokens": 1, "total_tokens": 1}
        body = {"object": "list", "model": "e", "data": data, "usage": usage}
        return hx.Response(200, json=body)

    real = openai.AsyncOpenAI(
        api_key="real-key",
        base_url="http://real.local/v1",
        http_client=hx.AsyncClient(transport=hx.MockTransport(serve)),
    )
    client = make(tokenizer, "a", passthrough=real)
    result = await client.embeddings.create(model="e", input="x", encoding_format="float")
    assert result.data[0].embedding == [0.5]
    assert str(seen[0].url) == "http://real.local/v1/embeddings"
    assert seen[0].headers["authorization"] == "Bearer real-key"
    await client.chat.completions.create(model="m", messages=HI)
    assert len(seen) == 1 and len(client.interactions) == 1


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (resources.DirectChatCompletions, chat.AsyncCompletions),
        (resources.DirectSyncChatCompletions, chat.Completions),
        (resources.DirectResponses, responses.AsyncResponses),
        (resources.DirectSyncResponses, responses.Responses),
    ],
)
def test_create_looks_like_the_sdks_own(ours: Any, theirs: Any) -> None:
    assert inspect.signature(ours.create) == inspect.signature(theirs.create)


async def test_sync_responses(tokenizer: Any) -> None:
    client = make(tokenizer, "one two", "one two")

    def work() -> tuple[str, list[str]]:
        whole = client.sync.responses.create(model="m", input="hi")
        stream = client.sync.responses.create(model="m", input="hi", stream=True)
        return whole.output_text, [event.type for event in stream]

    text, kinds = await asyncio.to_thread(work)
    assert text == "one two"
    assert kinds[-1] == "response.completed"


async def test_our_http_client_serves_a_plain_client(tokenizer: Any) -> None:
    """An agent that builds its own client from base_url, api_key and http_client."""
    client = make(tokenizer, "a", "b")
    own = openai.AsyncOpenAI(
        api_key="any", base_url="http://host/t/7/v1", http_client=client._client
    )
    async with own:
        completion = await own.chat.completions.create(model="m", messages=HI)
    raw = await client._client.post(
        "http://host/v1/chat/completions", json={"model": "m", "messages": HI}
    )
    assert raw.json()["choices"][0]["message"]["content"] == "b"
    assert list(client.interactions) == [completion.id, raw.json()["id"]]
