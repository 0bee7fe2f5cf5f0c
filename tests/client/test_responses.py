"""The Responses API: items in and out, state by id, events in order, every parameter."""

from __future__ import annotations

import inspect
from typing import Any

import openai
import pytest
from openai.resources.responses import AsyncResponses
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from agent_rl import ArealOpenAI, ScriptedEngine

ADD: Any = {
    "type": "function",
    "name": "add",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    "strict": False,
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a":  1}}\n</tool_call>'
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)

# Parameter: (a value that is refused, or None; a value that is taken, or None)
PARAMETERS: dict[str, tuple[Any, Any]] = {
    "access_programs": ([{}], None),
    "background": (True, False),
    "background_options": ({}, None),
    "context_management": ([{}], None),
    "conversation": ("conv_1", None),
    "image": ({}, None),
    "include": (["file_search_call.results"], ["reasoning.encrypted_content"]),
    "input": (3, "hi"),
    "instructions": (3, "be brief"),
    "max_output_tokens": (0, 7),
    "max_tool_calls": (3, None),
    "metadata": ("m", {"k": "v"}),
    "model": (3, "m"),
    "moderation": ({}, None),
    "parallel_tool_calls": ("yes", True),
    "previous_response_id": ("resp_unknown", None),
    "prompt": ({"id": "p"}, None),
    "prompt_cache_key": (3, "p"),
    "prompt_cache_options": (3, {"mode": "explicit"}),
    "prompt_cache_retention": (3, "24h"),
    "reasoning": ({"effort": "high"}, {}),
    "safety_identifier": (3, "s"),
    "service_tier": ("flex", "auto"),
    "store": (None, False),
    "stream": ("yes", False),
    "stream_options": ({"include_obfuscation": True}, {"include_obfuscation": False}),
    "temperature": (-1, 0.25),
    "text": ({"format": {"type": "xml"}}, {"format": {"type": "text"}}),
    "tool_choice": ("maybe", "none"),
    "tools": ([{"type": "web_search"}], [ADD]),
    "top_logprobs": (21, 2),
    "top_p": (1.5, 0.5),
    "truncation": ("auto", "disabled"),
    "user": (3, "me"),
}
PLUMBING = {"self", "extra_headers", "extra_query", "extra_body", "timeout"}


def make(tokenizer: Any, *replies: Any, **kwargs: Any) -> ArealOpenAI:
    options = {"reasoning_parser": "qwen3", **kwargs}
    return ArealOpenAI(ScriptedEngine(list(replies), tokenizer=tokenizer), tokenizer, **options)


async def ask(client: Any, **params: Any) -> Any:
    return await client.responses.create(**{"model": "m", "input": "hi", **params})


def test_each_parameter_of_the_sdk_is_in_the_table() -> None:
    known = set(PARAMETERS) | PLUMBING
    assert set(inspect.signature(AsyncResponses.create).parameters) <= known


@pytest.mark.parametrize("name", PARAMETERS)
async def test_parameter(name: str, tokenizer: Any, guided_engine_type: type) -> None:
    if name not in inspect.signature(AsyncResponses.create).parameters:
        return  # openai 2.x lacks some parameters of 3.x
    refused, taken = PARAMETERS[name]
    engine = guided_engine_type(["a"], tokenizer=tokenizer, repeat=True)
    client = ArealOpenAI(engine, tokenizer)
    if refused is not None:
        with pytest.raises(openai.BadRequestError) as caught:
            await ask(client, **{name: refused})
        assert caught.value.param.partition(".")[0].partition("[")[0] == name
        assert engine.requests == []
    if taken is not None:
        response = await ask(client, **{name: taken})
        Response.model_validate(response.to_dict())
        assert response.output_text == "a"


async def test_answer_and_record(tokenizer: Any) -> None:
    client = make(tokenizer, "four")
    response = await ask(client, instructions="add", temperature=0.5, metadata={"k": "v"})
    Response.model_validate(response.to_dict())
    assert response.id.startswith("resp_") and response._request_id == response.id
    assert (response.status, response.output_text) == ("completed", "four")
    interaction = client.interactions[response.id]
    assert interaction.messages == [
        {"role": "system", "content": "add"},
        {"role": "user", "content": "hi"},
    ]
    assert interaction.temperature == 0.5
    assert response.usage.input_tokens == len(interaction.model_response.input_tokens)
    assert response.usage.output_tokens == len(interaction.model_response.output_tokens)
    again = await client.responses.retrieve(response.id)
    assert again.output_text == "four"
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve("resp_unknown")


async def test_reasoning_text_and_calls_are_items(tokenizer: Any) -> None:
    client = make(tokenizer, f"<think>call it</think>Let me.\n{CALL}")
    response = await ask(client, tools=[ADD])
    assert [item.type for item in response.output] == ["reasoning", "message", "function_call"]
    reasoning, message, call = response.output
    assert reasoning.content[0].text == "call it"
    assert message.content[0].text == "Let me."
    assert (call.name, call.arguments) == ("add", '{"a":  1}')
    assert response.usage.output_tokens_details.reasoning_tokens > 0


async def test_items_sent_back_are_one_conversation(tokenizer: Any) -> None:
    client = make(tokenizer, f"<think>call it</think>Let me.\n{CALL}", "done")
    first = await ask(client, tools=[ADD])
    items = [item.to_dict() for item in first.output]
    result = {"type": "function_call_output", "call_id": items[-1]["call_id"], "output": "1"}
    second = await ask(
        client, input=[{"role": "user", "content": "hi"}, *items, result], tools=[ADD]
    )
    interaction = client.interactions[second.id]
    assert interaction.history is client.interactions[first.id]
    roles = [message["role"] for message in interaction.messages]
    assert roles == ["user", "assistant", "tool"]
    assert interaction.messages[1]["reasoning_content"] == "call it"


async def test_previous_response_id(tokenizer: Any) -> None:
    client = make(tokenizer, CALL, "done", "new", chat_template_type="concat")
    first = await ask(client, instructions="one", tools=[ADD])
    call = first.output[0]
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "1"}
    second = await ask(
        client,
        input=[output],
        instructions="one",
        tools=[ADD],
        previous_response_id=first.id,
    )
    assert second.previous_response_id == first.id
    assert client.interactions[second.id].parent is client.interactions[first.id]
    third = await ask(client, instructions="two", previous_response_id=second.id)
    messages = client.interactions[third.id].messages
    assert [m["role"] for m in messages] == [
        "system",
        "user",
        "assistant",
        "tool",
        "assistant",
        "user",
    ]
    assert messages[0]["content"] == "two"


async def test_store_false_keeps_nothing(tokenizer: Any) -> None:
    client = make(tokenizer, "a", "b")
    first = await ask(client, store=False)
    assert len(client.interactions) == 0
    with pytest.raises(openai.BadRequestError) as caught:
        await ask(client, previous_response_id=first.id)
    assert caught.value.code == "previous_response_not_found"


async def test_built_in_tools_and_items_are_refused_by_name(tokenizer: Any) -> None:
    client = make(tokenizer)
    with pytest.raises(openai.BadRequestError, match="built-in tool 'web_search'"):
        await ask(client, tools=[{"type": "web_search"}])
    with pytest.raises(openai.BadRequestError, match=r"input\[0\].*'item_reference'"):
        await ask(client, input=[{"type": "item_reference", "id": "x"}])
    with pytest.raises(openai.BadRequestError, match="'input_file'"):
        part = {"type": "input_file", "file_id": "f"}
        await ask(client, input=[{"role": "user", "content": [part]}])


async def test_cut_answer_is_incomplete(tokenizer: Any) -> None:
    client = make(tokenizer, {"output_tokens": [20, 21], "stop_reason": "length"})
    response = await ask(client, max_output_tokens=2)
    assert response.status == "incomplete"
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.output[0].status == "incomplete"


async def test_logprobs(tokenizer: Any) -> None:
    client = make(tokenizer, "one two")
    response = await ask(client, include=["message.output_text.logprobs"])
    Response.model_validate(response.to_dict())
    logprobs = response.output[0].content[0].logprobs
    recorded = client.interactions[response.id].model_response.output_logprobs
    assert [entry.logprob for entry in logprobs] == list(recorded)


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        (
            "one two",
            [
                *("output_item.added", "content_part.added"),
                *("output_text.delta", "output_text.delta", "output_text.done"),
                *("content_part.done", "output_item.done"),
            ],
        ),
        (
            "",
            [
                *("output_item.added", "content_part.added", "output_text.done"),
                *("content_part.done", "output_item.done"),
            ],
        ),
        (
            f"<think>so</think>ok{CALL}",
            [
                *("output_item.added", "reasoning_text.delta", "reasoning_text.done"),
                *("output_item.done", "output_item.added", "content_part.added"),
                *("output_text.delta", "output_text.done", "content_part.done"),
                *("output_item.done", "output_item.added", "function_call_arguments.delta"),
                *("function_call_arguments.done", "output_item.done"),
            ],
        ),
    ],
)
async def test_events_in_order(text: str, kinds: list[str], tokenizer: Any) -> None:
    client = make(tokenizer, text, text)
    whole = await ask(client, tools=[ADD])
    events = [event async for event in await ask(client, tools=[ADD], stream=True)]
    for event in events:
        EVENT.validate_python(event.to_dict())
    names = [event.type.removeprefix("response.") for event in events]
    assert names == ["created", "in_progress", *kinds, "completed"]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    final = events[-1].response
    assert final.id == list(client.interactions)[1]
    assert final.output_text == whole.output_text
    assert final.usage == whole.usage
    assert [_without_ids(item) for item in final.output] == [
        _without_ids(item) for item in whole.output
    ]


def _without_ids(item: Any) -> dict[str, Any]:
    return {key: value for key, value in item.to_dict().items() if key not in ("id", "call_id")}


async def test_stream_helper_and_parse(tokenizer: Any, guided_engine_type: type) -> None:
    class Answer(BaseModel):
        x: int

    engine = guided_engine_type(['{"x": 3}'], tokenizer=tokenizer, repeat=True)
    client = ArealOpenAI(engine, tokenizer)
    async with client.responses.stream(model="m", input="hi", text_format=Answer) as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_response()
    assert "response.output_text.delta" in kinds
    assert final.output_parsed == Answer(x=3)
    parsed = await client.responses.parse(model="m", input="hi", text_format=Answer)
    assert parsed.output_parsed == Answer(x=3)
    assert engine.requests[0].gconfig.grammar == engine.requests[1].gconfig.grammar
    raw = await client.responses.with_raw_response.create(model="m", input="hi")
    assert raw.headers["x-request-id"] == raw.parse().id


async def test_an_error_in_a_stream_is_raised(tokenizer: Any) -> None:
    client = make(tokenizer, {"output_tokens": [20], "stop_reason": "abort"})
    with pytest.raises(openai.APIError, match="was aborted"):
        async for _ in await ask(client, stream=True):
            pass
    assert len(client.interactions) == 0


async def test_input_items_of_a_stored_response(tokenizer: Any) -> None:
    client = make(tokenizer, "one", "two")
    first = await client.responses.create(model="m", input="hi", instructions="S")
    call = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "c1", "output": "r"}
    items: Any = [{"type": "reasoning", "id": "x", "summary": [], "content": []}, call, result]
    second = await client.responses.create(model="m", input=items, previous_response_id=first.id)
    listed = await client.responses.input_items.list(second.id, order="asc")
    kinds = [(item.type, getattr(item, "role", None)) for item in listed.data]
    assert kinds == [
        ("message", "user"),
        ("message", "assistant"),
        ("function_call", None),
        ("function_call_output", None),
    ]
    assert listed.data[0].content[0].text == "hi"
    assert listed.data[3].output == "r"
    paged = [item.id async for item in client.responses.input_items.list(second.id, limit=1)]
    assert paged == [item.id for item in reversed(listed.data)]
    for bad in (
        {"limit": 0},
        {"limit": "9" * 5000},
        {"order": "up"},
        {"after": "nobody"},
        {"extra_query": {"x": "1"}},
    ):
        with pytest.raises(openai.BadRequestError):
            await client.responses.input_items.list(second.id, **bad)


async def test_a_deleted_response_is_gone_and_still_trained_on(tokenizer: Any) -> None:
    client = make(tokenizer, "one", "two")
    response = await client.responses.create(model="m", input="hi")
    await client.responses.delete(response.id)
    for call in (
        client.responses.retrieve(response.id),
        client.responses.delete(response.id),
        client.responses.input_items.list(response.id),
        client.responses.cancel(response.id),
    ):
        with pytest.raises(openai.NotFoundError):
            await call
    with pytest.raises(openai.BadRequestError, match="not recorded"):
        await client.responses.create(model="m", input="hi", previous_response_id=response.id)
    client.set_reward(response.id, 1.0)
    assert list(client.export_interactions("individual")) == [response.id]


async def test_a_finished_response_cannot_be_cancelled(tokenizer: Any) -> None:
    client = make(tokenizer, "one")
    response = await client.responses.create(model="m", input="hi")
    with pytest.raises(openai.BadRequestError, match="background"):
        await client.responses.cancel(response.id)
    with pytest.raises(openai.BadRequestError, match="stream"):
        await client.responses.retrieve(response.id, stream=True)
