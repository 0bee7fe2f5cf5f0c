"""Every parameter of the SDK's create methods is honoured or refused; a new one fails here."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import openai
import pytest
from openai.resources.chat import AsyncCompletions

from agent_rl import ArealOpenAI, GenerationConfig, ScriptedEngine
from agent_rl.types import ModelRequest

ADD: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}}

Seen = Callable[[GenerationConfig, ModelRequest, Any, Any], bool]
# value, other parameters it needs, and what must be seen: (gconfig, request, completion, record)
HONOURED: dict[str, tuple[Any, dict[str, Any], Seen]] = {
    "temperature": (0.25, {}, lambda g, r, c, i: g.temperature == i.temperature == 0.25),
    "top_p": (0.5, {}, lambda g, r, c, i: g.top_p == 0.5),
    "max_tokens": (7, {}, lambda g, r, c, i: g.max_new_tokens == 7),
    "max_completion_tokens": (7, {}, lambda g, r, c, i: g.max_new_tokens == 7),
    "stop": (["END"], {}, lambda g, r, c, i: g.stop == ("END",)),
    "n": (3, {}, lambda g, r, c, i: len(c.choices) == 3),
    "seed": (11, {}, lambda g, r, c, i: g.seed == 11),
    "frequency_penalty": (0.5, {}, lambda g, r, c, i: g.frequency_penalty == 0.5),
    "presence_penalty": (-0.5, {}, lambda g, r, c, i: g.presence_penalty == -0.5),
    "logit_bias": ({"42": -100}, {}, lambda g, r, c, i: g.logit_bias == {42: -100.0}),
    "logprobs": (True, {}, lambda g, r, c, i: len(c.choices[0].logprobs.content) == 2),
    "top_logprobs": (2, {"logprobs": True}, lambda g, r, c, i: g.top_logprobs == 2),
    "tools": ([ADD], {}, lambda g, r, c, i: c.choices[0].message.tool_calls is not None),
    "tool_choice": (
        "none",
        {"tools": [ADD]},
        lambda g, r, c, i: c.choices[0].message.content == CALL,
    ),
    "parallel_tool_calls": (
        True,
        {"tools": [ADD]},
        lambda g, r, c, i: c.choices[0].finish_reason == "tool_calls",
    ),
    "response_format": (
        {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}},
        {},
        lambda g, r, c, i: '"x"' in g.grammar,
    ),
    "metadata": ({"k": "v"}, {}, lambda g, r, c, i: i.metadata["metadata"] == {"k": "v"}),
    "user": ("me", {}, lambda g, r, c, i: i.metadata["user"] == r.metadata["user"] == "me"),
    "safety_identifier": ("s", {}, lambda g, r, c, i: i.metadata["safety_identifier"] == "s"),
    "prompt_cache_key": ("p", {}, lambda g, r, c, i: i.metadata["prompt_cache_key"] == "p"),
    "prompt_cache_retention": (
        "24h",
        {},
        lambda g, r, c, i: i.metadata["prompt_cache_retention"] == "24h",
    ),
    "prompt_cache_options": (
        {"mode": "explicit"},
        {},
        lambda g, r, c, i: i.metadata["prompt_cache_options"] == {"mode": "explicit"},
    ),
    "service_tier": ("auto", {}, lambda g, r, c, i: i.metadata["service_tier"] == "auto"),
    "store": (False, {}, lambda g, r, c, i: i is None),
}
REFUSED: dict[str, Any] = {
    "audio": {"format": "wav", "voice": "alloy"},
    "function_call": "auto",
    "functions": [{"name": "f"}],
    "modalities": ["text", "audio"],
    "moderation": {"model": "m"},
    "prediction": {"type": "content", "content": "x"},
    "reasoning_effort": "high",  # the template of this model knows no effort
    "verbosity": "low",
    "web_search_options": {},
}
ELSEWHERE = {"stream", "stream_options"}  # test_stream.py
PLUMBING = {"self", "messages", "model", "extra_headers", "extra_query", "extra_body", "timeout"}
EXTRA: dict[str, tuple[Any, Seen]] = {
    "top_k": (5, lambda g, r, c, i: g.top_k == 5),
    "min_p": (0.1, lambda g, r, c, i: g.min_p == 0.1),
    "repetition_penalty": (1.1, lambda g, r, c, i: g.repetition_penalty == 1.1),
    "stop_token_ids": ([7], lambda g, r, c, i: 7 in g.stop_token_ids),
    "return_token_ids": (
        True,
        lambda g, r, c, i: (
            tuple(c.prompt_token_ids) == r.input_ids
            and tuple(c.choices[0].token_ids) == i.model_response.output_tokens
        ),
    ),
    "chat_template_kwargs": ({"colour": "red"}, lambda g, r, c, i: i is not None),
}
# Values that are wrong, and the parameter that the error names.
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"temperature": -1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.5}, "top_p"),
    ({"n": 0}, "n"),
    ({"n": 1.5}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 5, "max_completion_tokens": 7}, "max_tokens"),
    ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
    ({"stop": [""]}, "stop"),
    ({"stop": 3}, "stop"),
    ({"logit_bias": {"a": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 101}}, "logit_bias.1"),
    ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
    ({"logprobs": 3}, "logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
    ({"tools": [{"type": "web_search"}]}, "tools[0]"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [ADD], "tool_choice": "maybe"}, "tool_choice"),
    (
        {"tools": [ADD], "tool_choice": {"type": "function", "function": {"name": "sub"}}},
        "tool_choice",
    ),
    ({"parallel_tool_calls": "yes"}, "parallel_tool_calls"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "s"}}}, "response_format"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"service_tier": "flex"}, "service_tier"),
    ({"user": 3}, "user"),
    ({"metadata": "m"}, "metadata"),
    ({"extra_body": {"colour": "red"}}, "colour"),
    ({"extra_body": {"top_k": -2}}, "top_k"),
    ({"extra_body": {"stop_token_ids": [-1]}}, "stop_token_ids"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [{"role": "user", "content": "hi"}, "hi"]}, "messages[1]"),
    ({"messages": [{"role": "robot", "content": "hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
    *(
        ({"messages": [{"role": "user", "content": [part]}]}, f"messages[0].content[0]{place}")
        for part, place in (
            ({"type": "text"}, ".text"),
            ({"type": "text", "text": {"a": 1}}, ".text"),
            ({"type": "refusal", "refusal": 3}, ".refusal"),
            ({"type": ["text"], "text": "hi"}, ""),
        )
    ),
    ({"store": "no"}, "store"),
]


async def ask(client: ArealOpenAI, **params: Any) -> Any:
    call = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **params}
    return await client.chat.completions.create(**call)


def test_each_parameter_of_the_sdk_is_in_one_table() -> None:
    known = [*HONOURED, *REFUSED, *ELSEWHERE, *PLUMBING]
    assert len(known) == len(set(known))
    assert set(inspect.signature(AsyncCompletions.create).parameters) <= set(known)


def takes(name: str) -> bool:
    """openai 2.x lacks some parameters of 3.x."""
    return name in inspect.signature(AsyncCompletions.create).parameters


@pytest.mark.parametrize("name", list(filter(takes, HONOURED)))
async def test_honoured(name: str, tokenizer: Any, guided_engine_type: type) -> None:
    value, needed, is_seen = HONOURED[name]
    reply = CALL if "tool" in name else {"output_tokens": [20, 2]}
    engine = guided_engine_type([reply], tokenizer=tokenizer, repeat=True)
    client = ArealOpenAI(engine, tokenizer)
    completion = await ask(client, **{name: value}, **needed)
    request = engine.requests[0]
    interaction = next(iter(client.interactions.values()), None)
    assert is_seen(request.gconfig, request, completion, interaction)


@pytest.mark.parametrize("name", list(filter(takes, REFUSED)))
async def test_refused(name: str, tokenizer: Any, guided_engine_type: type) -> None:
    engine = guided_engine_type(["a"], tokenizer=tokenizer)
    client = ArealOpenAI(engine, tokenizer)
    with pytest.raises(openai.BadRequestError) as caught:
        await ask(client, **{name: REFUSED[name]})
    assert caught.value.param == name
    assert caught.value.type == "invalid_request_error"
    assert name in str(caught.value)
    assert caught.value.response.headers["x-should-retry"] == "false"
    assert engine.requests == [] and len(client.interactions) == 0


@pytest.mark.parametrize("name", EXTRA)
async def test_extra_body(name: str, tokenizer: Any) -> None:
    value, is_seen = EXTRA[name]
    engine = ScriptedEngine(["a"], tokenizer=tokenizer)
    client = ArealOpenAI(engine, tokenizer)
    completion = await ask(client, extra_body={name: value})
    request = engine.requests[0]
    assert is_seen(request.gconfig, request, completion, client.interactions[completion.id])


@pytest.mark.parametrize(("params", "param"), WRONG, ids=lambda value: str(value)[:40])
async def test_wrong_values(params: dict[str, Any], param: str, tokenizer: Any) -> None:
    """Case B12 d: a bare string among the messages is refused with its index."""
    engine = ScriptedEngine(["a"], tokenizer=tokenizer)
    client = ArealOpenAI(engine, tokenizer)
    with pytest.raises(openai.BadRequestError) as caught:
        await ask(client, **params)
    assert caught.value.param == param
    assert engine.requests == []


async def test_null_is_absent(tokenizer: Any) -> None:
    """Case B38 e: None and the SDK's sentinels mean "not sent"."""
    engine = ScriptedEngine(["a"], tokenizer=tokenizer)
    client = ArealOpenAI(engine, tokenizer, gconfig=GenerationConfig(max_new_tokens=32))
    await ask(
        client,
        **dict.fromkeys(("n", "temperature", "stop", "seed", "response_format", "logprobs")),
        max_tokens=openai.omit,
        max_completion_tokens=openai.not_given,
        store=None,
    )
    gconfig = engine.requests[0].gconfig
    assert (gconfig.temperature, gconfig.max_new_tokens, gconfig.stop) == (1.0, 32, ())
    assert len(client.interactions) == 1


@pytest.mark.parametrize(
    ("params", "default", "limit"),
    [
        ({"max_tokens": 5}, None, 5),
        ({"max_completion_tokens": 5}, None, 5),
        ({}, 32, 32),
        ({}, None, None),
    ],
)
async def test_token_limits(
    params: dict[str, int], default: int | None, limit: int | None, tokenizer: Any
) -> None:
    """Case B38 a, b, d; no limit at all means as much as the context leaves."""
    engine = ScriptedEngine(["a"], tokenizer=tokenizer, max_seq_len=4096)
    client = ArealOpenAI(engine, tokenizer, gconfig=GenerationConfig(max_new_tokens=default))
    await ask(client, **params)
    assert engine.requests[0].gconfig.max_new_tokens == limit


async def test_what_the_engine_lacks_is_refused_by_name(tokenizer: Any) -> None:
    class PlainEngine(ScriptedEngine):
        supported = frozenset[str]()

    client = ArealOpenAI(PlainEngine(["a"], tokenizer=tokenizer, repeat=True), tokenizer)
    for params, param in (
        ({"top_p": 0.5}, "top_p"),
        ({"stop": "x"}, "stop"),
        ({"seed": 1}, "seed"),
        ({"extra_body": {"top_k": 3}}, "top_k"),
        ({"logprobs": True, "top_logprobs": 1}, "top_logprobs"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tools": [ADD], "tool_choice": "required"}, "tool_choice"),
    ):
        with pytest.raises(openai.BadRequestError, match="PlainEngine") as caught:
            await ask(client, **params)
        assert caught.value.param == param
    await ask(client, top_p=1.0, stop=None, temperature=0.5, logprobs=True)


async def test_unknown_keyword_is_a_type_error(tokenizer: Any) -> None:
    client = ArealOpenAI(ScriptedEngine(["a"], tokenizer=tokenizer), tokenizer)
    with pytest.raises(TypeError, match="colour"):
        await ask(client, colour="red")


async def test_parallel_tool_calls_false_ends_the_turn_after_one_call(tokenizer: Any) -> None:
    engine = ScriptedEngine([{"output_tokens": tokenizer.encode(CALL)}], tokenizer=tokenizer)
    client = ArealOpenAI(engine, tokenizer)
    completion = await ask(client, tools=[ADD], parallel_tool_calls=False, stop="END")
    assert engine.requests[0].gconfig.stop == ("END", "</tool_call>")
    (call,) = completion.choices[0].message.tool_calls
    assert call.function.arguments == '{"a": 1}'


async def test_named_tool_choice_is_a_grammar(tokenizer: Any, guided_engine_type: type) -> None:
    engine = guided_engine_type([CALL], tokenizer=tokenizer)
    client = ArealOpenAI(engine, tokenizer)
    choice = {"type": "function", "function": {"name": "add"}}
    completion = await ask(client, tools=[ADD], tool_choice=choice, parallel_tool_calls=False)
    assert '"const": "add"' in engine.requests[0].gconfig.grammar
    assert completion.choices[0].finish_reason == "tool_calls"


async def test_reasoning_effort_reaches_the_template(tokenizer: Any) -> None:
    thinking = copy.deepcopy(tokenizer)
    thinking.chat_template = (
        "{{ '<|im_start|>' }}{% if enable_thinking %}deep{% else %}quick{% endif %}"
        "{% for m in messages %}{{ m['content'] }}{% endfor %}{{ '<|im_end|>' }}"
    )
    engine = ScriptedEngine(["a"], tokenizer=tokenizer, repeat=True)
    client = ArealOpenAI(engine, thinking)
    await ask(client, reasoning_effort="high")
    await ask(client, reasoning_effort="none")
    texts = [tokenizer.decode(request.input_ids) for request in engine.requests]
    assert texts == ["<|im_start|>deephi<|im_end|>", "<|im_start|>quickhi<|im_end|>"]
    response = await client.responses.create(model="m", input="hi", reasoning={"effort": "low"})
    assert response.reasoning.effort == "low"
    assert engine.requests[2].input_ids == engine.requests[0].input_ids


async def test_images_are_carried_to_an_engine_that_reads_them(
    tokenizer: Any, guided_engine_type: type
) -> None:
    seeing = copy.deepcopy(tokenizer)
    seeing.chat_template = (
        "{% for m in messages %}{% for p in m['content'] %}"
        "{{ '<image>' if p['type'] == 'image' else p['text'] }}{% endfor %}{% endfor %}"
    )
    engine = guided_engine_type(["a cat"], tokenizer=tokenizer, repeat=True)
    client = ArealOpenAI(engine, seeing)
    urls = [f"data:image/png;base64,{data}" for data in ("AA==", "BB==", "CC==")]
    first, second, third = ({"type": "image_url", "image_url": {"url": url}} for url in urls)
    parts = [first, {"type": "text", "text": "what?"}, second]
    asked = {"role": "user", "content": parts}
    await ask(client, messages=[asked])
    assert engine.requests[0].image_data == (urls[0], urls[1])
    answered = {"role": "assistant", "content": [{"type": "text", "text": "a cat"}]}
    await ask(client, messages=[asked, answered, {"role": "user", "content": [third]}])
    assert engine.requests[1].image_data == tuple(urls)


@pytest.mark.parametrize(
    "image",
    [
        {},
        {"url": None},
        {"url": ""},
        {"url": "/etc/passwd"},
        {"url": "file:///etc/passwd"},
        {"url": "FILE://etc/passwd"},
        {"url": "data:text/html;base64,AA=="},
        {"url": "data:image/png;base64,"},
    ],
)
async def test_an_image_that_the_server_would_look_for_itself_is_refused(
    image: Any, tokenizer: Any, guided_engine_type: type
) -> None:
    """Case B188, and what a server would read from its own disk for an agent."""
    engine = guided_engine_type(["a cat"], tokenizer=tokenizer)
    client = ArealOpenAI(engine, tokenizer)
    parts = [{"type": "image_url", "image_url": image}]
    with pytest.raises(openai.BadRequestError, match=r"messages\[0\].content\[0\].image_url.url"):
        await ask(client, messages=[{"role": "user", "content": parts}])
    with pytest.raises(openai.BadRequestError, match="image"):
        item = {"type": "input_image", "image_url": image.get("url")}
        await client.responses.create(model="m", input=[{"role": "user", "content": [item]}])
    assert engine.requests == []


async def test_seed_differs_between_choices(tokenizer: Any) -> None:
    engine = ScriptedEngine(["a"], tokenizer=tokenizer, repeat=True)
    await ask(ArealOpenAI(engine, tokenizer), n=3, seed=5)
    assert sorted(r.gconfig.seed for r in engine.requests) == [5, 6, 7]
