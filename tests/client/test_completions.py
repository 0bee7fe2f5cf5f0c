"""The old completions endpoint, and models."""

from __future__ import annotations

import inspect
from typing import Any

import openai
import pytest
from openai.resources import AsyncCompletions
from openai.types import Completion, Model

from agent_rl import ArealOpenAI, ScriptedEngine

HONOURED: dict[str, Any] = {
    "max_tokens": 7,
    "n": 2,
    "seed": 3,
    "stop": "END",
    "temperature": 0.5,
    "top_p": 0.5,
    "frequency_penalty": 0.5,
    "presence_penalty": 0.5,
    "logit_bias": {"42": 1},
    "user": "me",
    "logprobs": 0,
}
REFUSED: dict[str, Any] = {"best_of": 2, "echo": True, "suffix": "x"}
PLUMBING = {"self", "extra_headers", "extra_query", "extra_body", "timeout"}


def make(tokenizer: Any, *replies: Any) -> tuple[ArealOpenAI, ScriptedEngine]:
    engine = ScriptedEngine(list(replies), tokenizer=tokenizer, repeat=True)
    return ArealOpenAI(engine, tokenizer), engine


def test_each_parameter_of_the_sdk_is_in_a_table() -> None:
    known = {*HONOURED, *REFUSED, *PLUMBING, "model", "prompt", "stream", "stream_options"}
    assert set(inspect.signature(AsyncCompletions.create).parameters) <= known


@pytest.mark.parametrize("name", HONOURED)
async def test_honoured(name: str, tokenizer: Any) -> None:
    client, engine = make(tokenizer, "one two")
    completion = await client.completions.create(model="m", prompt="say", **{name: HONOURED[name]})
    Completion.model_validate(completion.to_dict())
    gconfig = engine.requests[0].gconfig
    interaction = client.interactions[completion.id]
    seen = {
        "max_tokens": gconfig.max_new_tokens,
        "n": len(completion.choices),
        "stop": gconfig.stop[0] if gconfig.stop else None,
        "user": interaction.metadata.get("user"),
        "logit_bias": {str(key): value for key, value in gconfig.logit_bias.items()},
        "logprobs": gconfig.top_logprobs,
    }
    value = seen[name] if name in seen else getattr(gconfig, name)
    assert value == HONOURED[name]
    assert (completion.choices[0].logprobs is not None) == (name == "logprobs")


@pytest.mark.parametrize("name", REFUSED)
async def test_refused(name: str, tokenizer: Any) -> None:
    client, _ = make(tokenizer, "a")
    with pytest.raises(openai.BadRequestError) as caught:
        await client.completions.create(model="m", prompt="say", **{name: REFUSED[name]})
    assert caught.value.param == name


async def test_prompt_reaches_the_engine_untouched(tokenizer: Any) -> None:
    client, engine = make(tokenizer, "one two")
    text = await client.completions.create(model="m", prompt="say it")
    ids = await client.completions.create(model="m", prompt=[5, 6, 7])
    assert engine.requests[0].input_ids == tuple(tokenizer.encode("say it"))
    assert engine.requests[1].input_ids == (5, 6, 7)
    assert text.choices[0].text == "one two"
    assert text.usage.prompt_tokens == 2 and ids.usage.prompt_tokens == 3
    assert all(i.parent is None for i in client.interactions.values())
    assert len(client.export_interactions("individual")) == 2


async def test_several_prompts_and_choices(tokenizer: Any) -> None:
    client, _ = make(tokenizer, lambda request: list(request.input_ids))
    completion = await client.completions.create(model="m", prompt=[[5], [6]], n=2)
    name = completion.id
    assert [choice.index for choice in completion.choices] == [0, 1, 2, 3]
    assert list(client.interactions) == [name, f"{name}/1", f"{name}/2", f"{name}/3"]
    outputs = [i.model_response.output_tokens for i in client.interactions.values()]
    assert outputs == [(5,), (5,), (6,), (6,)]
    assert (completion.usage.prompt_tokens, completion.usage.completion_tokens) == (2, 4)


async def test_stop_is_trimmed_and_log_probs_are_not(tokenizer: Any) -> None:
    client, _ = make(tokenizer, "one two END")
    completion = await client.completions.create(model="m", prompt="x", stop="END", logprobs=0)
    choice = completion.choices[0]
    assert choice.text == "one two "
    assert len(choice.logprobs.tokens) == completion.usage.completion_tokens
    assert choice.logprobs.text_offset[:3] == [0, 3, 7]


async def test_stream(tokenizer: Any) -> None:
    client, _ = make(tokenizer, "one <think>two</think>")
    options: Any = {"include_usage": True}
    stream = await client.completions.create(
        model="m", prompt="x", stream=True, stream_options=options
    )
    chunks = [chunk async for chunk in stream]
    for chunk in chunks:
        Completion.model_validate({**chunk.to_dict(), "choices": []})
    assert "".join(c.choices[0].text for c in chunks[:-1]) == "one <think>two</think>"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].choices == [] and chunks[-1].usage.prompt_tokens == 1
    assert list(client.interactions) == [chunks[0].id]


@pytest.mark.parametrize("prompt", ["", [], [[]], ["a", 3], {"a": 1}, [-1], [1 << 32]])
async def test_bad_prompts(prompt: Any, tokenizer: Any) -> None:
    client, _ = make(tokenizer, "a")
    with pytest.raises(openai.BadRequestError) as caught:
        await client.completions.create(model="m", prompt=prompt)
    assert caught.value.param == "prompt"


async def test_models(tokenizer: Any) -> None:
    client, _ = make(tokenizer)
    names = [model.id async for model in client.models.list()]
    assert names == ["default"]
    model = await client.models.retrieve("org/any-name")
    Model.model_validate(model.to_dict())
    assert model.id == "org/any-name"


async def test_one_request_holds_so_many_prompts(tokenizer: Any) -> None:
    client = ArealOpenAI(ScriptedEngine([], tokenizer=tokenizer), tokenizer)
    with pytest.raises(openai.BadRequestError, match="holds 2049 prompts; 2048 may be sent"):
        await client.completions.create(model="m", prompt=["a"] * 2049)
    assert not client.interactions
