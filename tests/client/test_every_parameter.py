"""Each parameter of chat completions does what it says on the real small model.

The tables of ``test_parameters.py`` show that a parameter reaches the engine; here it shows in what
is sampled. Greedy answers of one question are the measure: ``PLAIN`` says what comes without it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion
from test_parameters import EXTRA, HONOURED, REFUSED, takes

from agent_rl import ArealOpenAI, LocalEngine, small_model

pytestmark = pytest.mark.slow
pytest.importorskip("llguidance")

ASK: Any = [{"role": "user", "content": "What is 17 + 25? Answer briefly."}]
ADD: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two integers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
    },
}
NUMBER: Any = {
    "type": "object",
    "properties": {"number": {"type": "integer"}},
    "required": ["number"],
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True)
class Calls:
    """Asks the model; ``plain`` is its greedy answer."""

    client: ArealOpenAI
    plain: ChatCompletion

    async def __call__(self, **params: Any) -> ChatCompletion:
        defaults = {"model": "m", "messages": ASK, "max_tokens": 12, "temperature": 0}
        merged = {name: v for name, v in {**defaults, **params}.items() if v is not None}
        completion: ChatCompletion = await self.client.chat.completions.create(**merged)
        ChatCompletion.model_validate(completion.to_dict())
        return completion

    def ids(self, completion: ChatCompletion) -> tuple[int, ...]:
        response = self.client.interactions[completion.id].model_response
        assert response is not None
        return response.output_tokens


Check = Callable[[Calls], Awaitable[None]]
CHECKS: dict[str, Check] = {}


def shows(*names: str) -> Callable[[Check], Check]:
    """The decorated check is about these parameters."""

    def add(check: Check) -> Check:
        CHECKS.update(dict.fromkeys(names, check))
        return check

    return add


def text(completion: ChatCompletion) -> str:
    return completion.choices[0].message.content or ""


@shows("temperature", "seed")
async def temperature(calls: Calls) -> None:
    """0 is always the same, and what is hardly more; absent is 1.0, where seeds tell answers apart
    and repeat them."""
    for nothing in (0, 1e-8, 5e-324):  # some frameworks send 1e-8 for 0
        assert text(await calls(temperature=nothing)) == text(calls.plain)
    sampled = [text(await calls(temperature=None, seed=seed)) for seed in (1, 2, 1)]
    assert sampled[0] == sampled[2] != sampled[1]


@shows("top_p", "top_k", "min_p")
async def truncation(calls: Calls) -> None:
    """At its narrowest each leaves only what greedy takes, even when very hot."""
    for narrow in ({"top_p": 1e-9}, {"extra_body": {"top_k": 1}}, {"extra_body": {"min_p": 0.999}}):
        assert text(await calls(temperature=1.5, **narrow)) == text(calls.plain)


@shows("max_tokens", "max_completion_tokens")
async def limits(calls: Calls) -> None:
    for name in ("max_tokens", "max_completion_tokens"):
        cut = await calls(**{"max_tokens": None, name: 3})
        assert cut.usage is not None and cut.usage.completion_tokens == 3
        assert cut.choices[0].finish_reason == "length"
    with pytest.raises(openai.BadRequestError):
        await calls(max_tokens=3, max_completion_tokens=3)


@shows("stop")
async def stop(calls: Calls) -> None:
    whole = text(calls.plain)
    stopped = await calls(stop=["never there", whole[3:6]])
    assert text(stopped) == whole[: whole.find(whole[3:6])]
    assert stopped.choices[0].finish_reason == "stop"
    assert calls.ids(stopped) == calls.ids(calls.plain)[: len(calls.ids(stopped))]


@shows("stop_token_ids")
async def stop_token_ids(calls: Calls) -> None:
    third = calls.ids(calls.plain)[2]
    stopped = await calls(extra_body={"stop_token_ids": [third]})
    ids = calls.ids(stopped)
    assert ids[-1] == third and third not in ids[:-1]
    assert stopped.choices[0].finish_reason == "stop"


@shows("n")
async def n(calls: Calls) -> None:
    completion = await calls(n=3, temperature=1.0, seed=4, max_tokens=4)
    assert [choice.index for choice in completion.choices] == [0, 1, 2]
    ids = [completion.id, f"{completion.id}/1", f"{completion.id}/2"]
    assert list(calls.client.interactions)[-3:] == ids
    assert len({choice.message.content for choice in completion.choices}) > 1


@shows("frequency_penalty", "presence_penalty", "repetition_penalty")
async def penalties(calls: Calls) -> None:
    """Each makes an answer that repeats itself more varied."""
    again: dict[str, Any] = {
        "messages": [{"role": "user", "content": "Say yes twenty times."}],
        "max_tokens": 32,
    }

    def variety(completion: ChatCompletion) -> float:
        ids = calls.ids(completion)
        return len(set(ids)) / len(ids)

    before = variety(await calls(**again))
    for penalty in (
        {"frequency_penalty": 2.0},
        {"presence_penalty": 2.0},
        {"extra_body": {"repetition_penalty": 2.0}},
    ):
        assert variety(await calls(**again, **penalty)) > before


@shows("logit_bias")
async def logit_bias(calls: Calls) -> None:
    first, second = calls.ids(calls.plain)[:2]
    assert first not in calls.ids(await calls(logit_bias={str(first): -100}))
    assert set(calls.ids(await calls(logit_bias={str(second): 100}))) == {second}


@shows("logprobs", "top_logprobs")
async def logprobs(calls: Calls) -> None:
    """Alternatives in order, the first is what greedy took; without asking there are none."""
    assert calls.plain.choices[0].logprobs is None
    completion = await calls(logprobs=True, top_logprobs=2)
    found = completion.choices[0].logprobs
    assert found is not None and found.content is not None
    assert len(found.content) == len(calls.ids(completion))
    for entry in found.content:
        best, other = entry.top_logprobs
        assert (entry.token, entry.logprob) == (best.token, pytest.approx(best.logprob))
        assert best.logprob >= other.logprob


@shows("tools", "tool_choice", "parallel_tool_calls")
async def tools(calls: Calls) -> None:
    """none: no call is read; required: at least one; named and not parallel: exactly one."""
    body: dict[str, Any] = {"tools": [ADD], "max_tokens": 64}
    plain = await calls(**body, tool_choice="none")
    assert plain.choices[0].message.tool_calls is None
    auto = await calls(**body, tool_choice="auto")
    assert calls.ids(auto) == calls.ids(plain)
    assert auto.usage is not None and calls.plain.usage is not None
    assert auto.usage.prompt_tokens > calls.plain.usage.prompt_tokens  # the tools are in it
    named = {"type": "function", "function": {"name": "add"}}
    required = {"tool_choice": "required", "parallel_tool_calls": False}
    for demand in (required, {"tool_choice": named}):
        (choice,) = (await calls(**body, **demand)).choices
        (call,) = choice.message.tool_calls or []
        assert choice.finish_reason == "tool_calls" and call.type == "function"
        assert set(json.loads(call.function.arguments)) == {"a", "b"}


@shows("response_format")
async def response_format(calls: Calls) -> None:
    assert text(await calls(response_format={"type": "text"})) == text(calls.plain)
    some = await calls(response_format={"type": "json_object"}, max_tokens=100)
    assert some.choices[0].finish_reason == "stop"
    assert isinstance(json.loads(text(some)), dict)
    schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": NUMBER}}
    number = await calls(response_format=schema, max_tokens=60)
    assert type(json.loads(text(number))["number"]) is int


@shows("metadata", "user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention")
@shows("prompt_cache_options", "service_tier")
async def labels(calls: Calls) -> None:
    names = ("metadata", "user", "safety_identifier", "prompt_cache_key", "service_tier")
    names += ("prompt_cache_retention", "prompt_cache_options")
    sent = {name: HONOURED[name][0] for name in names if takes(name)}
    completion = await calls(**sent)
    assert text(completion) == text(calls.plain)
    assert calls.client.interactions[completion.id].metadata == sent


@shows("store")
async def store(calls: Calls) -> None:
    before = list(calls.client.interactions)
    assert text(await calls(store=False)) == text(calls.plain)
    assert list(calls.client.interactions) == before


@shows("return_token_ids")
async def return_token_ids(calls: Calls) -> None:
    completion = await calls(extra_body={"return_token_ids": True})
    interaction = calls.client.interactions[completion.id]
    extra = completion.model_extra or {}
    sampled = (completion.choices[0].model_extra or {})["token_ids"]
    assert (*extra["prompt_token_ids"], *sampled) == interaction.tokens


@shows("chat_template_kwargs")
async def chat_template_kwargs(calls: Calls) -> None:
    """This template reads none of its own; an unknown one changes nothing."""
    completion = await calls(extra_body={"chat_template_kwargs": {"colour": "red"}})
    assert text(completion) == text(calls.plain)


@shows("stream", "stream_options")
async def stream(calls: Calls) -> None:
    """The same text, finish reason and usage as the whole answer."""
    chunks: Any = await calls.client.chat.completions.create(
        model="m",
        messages=ASK,
        max_tokens=12,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    *pieces, last = [chunk async for chunk in chunks]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in pieces) == text(calls.plain)
    assert pieces[-1].choices[0].finish_reason == calls.plain.choices[0].finish_reason
    assert last.choices == [] and last.usage == calls.plain.usage


@pytest.fixture(scope="module")
def engine(tokenizer: Any) -> Iterator[LocalEngine]:
    local = LocalEngine(small_model(), tokenizer, max_batch_size=8, max_seq_len=512)
    yield local
    asyncio.run(local.close())


@pytest.fixture(params=["hf", "concat"])
async def calls(request: pytest.FixtureRequest, engine: LocalEngine, tokenizer: Any) -> Calls:
    client = ArealOpenAI(engine, tokenizer, chat_template_type=request.param)
    plain = await client.chat.completions.create(
        model="m", messages=ASK, max_tokens=12, temperature=0
    )
    return Calls(client, plain)


def test_each_honoured_parameter_is_checked() -> None:
    assert set(CHECKS) == {*HONOURED, *EXTRA, "stream", "stream_options"}


@pytest.mark.parametrize("check", dict.fromkeys(CHECKS.values()), ids=lambda check: check.__name__)
async def test_effect(check: Check, calls: Calls) -> None:
    await check(calls)


@pytest.mark.parametrize("name", list(filter(takes, REFUSED)))
async def test_refused(name: str, engine: LocalEngine, tokenizer: Any) -> None:
    client = ArealOpenAI(engine, tokenizer)
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(model="m", messages=ASK, **{name: REFUSED[name]})
    assert caught.value.param == name
    assert len(client.interactions) == 0
