"""Demanded forms of answers over the embedded engine, on a model that would say anything."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from openai.types.chat import ChatCompletion
from pydantic import BaseModel, ConfigDict

from agent_rl import ArealOpenAI, LocalEngine

pytest.importorskip("llguidance")

HI: Any = [{"role": "user", "content": "hi"}]
UNKNOWN = {"type": "string", "format": "no-such-format"}


class Answer(BaseModel):
    model_config = ConfigDict(extra="forbid")
    kind: Literal["cat", "dog"]
    is_old: bool


class SmallAnswer(BaseModel):
    """Without white space, because ``parse`` of responses has no logit_bias."""

    model_config = ConfigDict(json_schema_extra={"x-guidance": {"whitespace_flexible": False}})
    is_old: bool


def tool(name: str, **properties: Any) -> dict[str, Any]:
    schema = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "parameters": schema}}


TOOLS: list[Any] = [
    tool("flip", side={"enum": ["head", "tail"]}),
    tool("move", is_up={"type": "boolean"}, steps={"enum": [1, 2, 3]}),
]
MOVE: Any = {"type": "function", "function": {"name": "move"}}
ANSWER: Any = {
    "type": "json_schema",
    "json_schema": {"name": "answer", "schema": Answer.model_json_schema()},
}


@pytest.fixture(scope="module")
def engine(tiny_model_dir: Path) -> Iterator[LocalEngine]:
    local = LocalEngine(tiny_model_dir, max_batch_size=8, max_seq_len=600)
    yield local
    asyncio.run(local.close())


@pytest.fixture(scope="module")
def terse(tokenizer: Any) -> dict[str, int]:
    """JSON allows any white space between its parts, and a random model would write little else."""
    texts = ((i, tokenizer.decode([i])) for i in range(17, len(tokenizer)))
    return {str(i): -100 for i, text in texts if not text.strip()}


@pytest.fixture
def client(engine: LocalEngine, tokenizer: Any) -> ArealOpenAI:
    return ArealOpenAI(engine, tokenizer, chat_template_type="concat")


@pytest.fixture
def params(terse: dict[str, int]) -> dict[str, Any]:
    return {"model": "m", "messages": HI, "logit_bias": terse, "max_tokens": 200}


async def test_json_schema(client: ArealOpenAI, params: dict[str, Any]) -> None:
    completion = await client.chat.completions.create(**params, n=3, response_format=ANSWER)
    ChatCompletion.model_validate(completion.to_dict())
    for choice in completion.choices:
        Answer.model_validate_json(choice.message.content or "")
        assert choice.finish_reason == "stop"


async def test_parse_and_the_stream_helper(client: ArealOpenAI, params: dict[str, Any]) -> None:
    parsed = await client.chat.completions.parse(**params, seed=2, response_format=Answer)
    answer = parsed.choices[0].message.parsed
    assert isinstance(answer, Answer)
    manager = client.chat.completions.stream(**params, seed=2, response_format=Answer)
    async with manager as stream:
        final = await stream.get_final_completion()
    assert final.choices[0].message.parsed == answer


async def test_streamed_is_the_same_as_whole(client: ArealOpenAI, params: dict[str, Any]) -> None:
    demands: list[dict[str, Any]] = [
        {"response_format": ANSWER},
        {"tools": TOOLS, "tool_choice": MOVE},
    ]
    for demand in demands:
        whole = await client.chat.completions.create(**params, **demand, seed=5)
        stream = await client.chat.completions.create(**params, **demand, seed=5, stream=True)
        deltas = [chunk.choices[0].delta async for chunk in stream]
        message = whole.choices[0].message
        assert "".join(d.content or "" for d in deltas) == (message.content or "")
        calls = [call.function for delta in deltas for call in delta.tool_calls or []]
        expected = [call.function.arguments for call in message.tool_calls or []]
        assert ["".join(call.arguments or "" for call in calls)] == (expected or [""])


async def test_required_and_named_tools(client: ArealOpenAI, params: dict[str, Any]) -> None:
    steps = {"flip": {"side"}, "move": {"is_up", "steps"}}
    for choice, names in (("required", {"flip", "move"}), (MOVE, {"move"})):
        completion = await client.chat.completions.create(
            **params, n=4, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False
        )
        for answer in completion.choices:
            assert answer.finish_reason == "tool_calls"
            (call,) = answer.message.tool_calls or []
            assert call.type == "function" and call.function.name in names
            assert set(json.loads(call.function.arguments)) == steps[call.function.name]


async def test_several_calls(
    client: ArealOpenAI, params: dict[str, Any], tokenizer: Any, terse: dict[str, int]
) -> None:
    """Without its end of turn the model goes on calling until the limit, which cuts a call."""
    between = tokenizer.convert_tokens_to_ids("Ċ")  # a new line, as its bytes are written
    bias = {**terse, str(between): 0, str(tokenizer.eos_token_id): -100}
    completion = await client.chat.completions.create(
        **{**params, "logit_bias": bias}, seed=1, tools=TOOLS, tool_choice="required"
    )
    (choice,) = completion.choices
    assert choice.finish_reason == "length"
    assert len(choice.message.tool_calls or []) >= 2


async def test_a_cut_answer_is_no_exception(client: ArealOpenAI, params: dict[str, Any]) -> None:
    cut = {**params, "max_tokens": 4}
    completion = await client.chat.completions.create(**cut, response_format=ANSWER)
    assert completion.choices[0].finish_reason == "length"
    assert (completion.choices[0].message.content or "").startswith("{")
    with pytest.raises(openai.LengthFinishReasonError):  # the SDK's own
        await client.chat.completions.parse(**cut, response_format=Answer)
    call = await client.chat.completions.create(**cut, tools=TOOLS, tool_choice="required")
    assert call.choices[0].finish_reason == "length"
    assert not call.choices[0].message.tool_calls


async def test_responses(client: ArealOpenAI, terse: dict[str, int]) -> None:
    body = {"logit_bias": terse}
    response = await client.responses.parse(model="m", input="hi", text_format=SmallAnswer)
    assert isinstance(response.output_parsed, SmallAnswer)
    flat = [{"type": "function", **each["function"]} for each in TOOLS]
    called = await client.responses.create(
        model="m",
        input="hi",
        tools=flat,
        tool_choice={"type": "function", "name": "flip"},
        extra_body=body,
    )
    (call,) = called.output
    assert call.type == "function_call" and call.name == "flip"


async def test_forced_tokens_are_not_trained(client: ArealOpenAI, params: dict[str, Any]) -> None:
    completion = await client.chat.completions.create(
        **params, tools=TOOLS, tool_choice=MOVE, logprobs=True
    )
    interaction = client.interactions[completion.id]
    assert interaction.model_response is not None
    forced = interaction.model_response.output_forced
    assert forced is not None and 0 < sum(forced) < len(forced)
    logprobs = completion.choices[0].logprobs
    assert logprobs is not None and len(logprobs.content or []) == len(forced)
    row = interaction.to_tensor_dict()
    assert row["loss_mask"][0, -len(forced) :].tolist() == [int(not each) for each in forced]


async def test_a_turn_that_the_grammar_ended_is_gone_on_from(
    client: ArealOpenAI, params: dict[str, Any], tokenizer: Any
) -> None:
    """No end of turn was sampled; the bridge puts it into the next prompt."""
    first = await client.chat.completions.create(**params, response_format=ANSWER)
    more = [*HI, first.choices[0].message, {"role": "user", "content": "more"}]
    second = await client.chat.completions.create(**{**params, "messages": more, "max_tokens": 2})
    one, two = client.interactions[first.id], client.interactions[second.id]
    assert two.parent is one and two.fork_reason is None
    assert one.tokens[-1] != tokenizer.eos_token_id
    assert two.tokens[one.num_tokens] == tokenizer.eos_token_id


async def test_what_cannot_be_demanded_is_named(
    client: ArealOpenAI, params: dict[str, Any]
) -> None:
    bad_format = {"type": "json_schema", "json_schema": {"name": "s", "schema": UNKNOWN}}
    bad_tools = [tool("f", x=UNKNOWN)]
    for demand, param in (
        ({"response_format": bad_format}, "response_format"),
        ({"response_format": bad_format, "stream": True}, "response_format"),
        ({"response_format": bad_format, "n": 2}, "response_format"),
        ({"tools": bad_tools, "tool_choice": "required"}, "tool_choice"),
    ):
        with pytest.raises(openai.BadRequestError, match="no-such-format") as caught:
            await client.chat.completions.create(**params, **demand)
        assert caught.value.param == param
    text: Any = {"format": {"type": "json_schema", "name": "s", "schema": UNKNOWN}}
    with pytest.raises(openai.BadRequestError) as refused:
        await client.responses.create(model="m", input="hi", text=text)
    assert refused.value.param == "text.format"
    assert len(client.interactions) == 0


async def test_without_the_package_it_is_named(
    tiny_model_dir: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    engine = LocalEngine(tiny_model_dir)
    with pytest.raises(openai.BadRequestError, match="pip install llguidance") as caught:
        await ArealOpenAI(engine, tokenizer).chat.completions.create(
            model="m", messages=HI, response_format={"type": "json_object"}
        )
    assert caught.value.param == "response_format"
    await engine.close()
