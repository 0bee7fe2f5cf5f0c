"""The same surface over the embedded engine and the real small model."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion

from agent_rl import ArealOpenAI, LocalEngine, small_model

pytestmark = pytest.mark.slow

ASK: Any = [{"role": "user", "content": "What is 2+2? Answer briefly."}]


@pytest.fixture(scope="module")
def engine(tokenizer: Any) -> Iterator[LocalEngine]:
    local = LocalEngine(small_model(), tokenizer, max_batch_size=8, max_seq_len=256)
    yield local
    asyncio.run(local.close())


@pytest.fixture
def client(engine: LocalEngine, tokenizer: Any) -> ArealOpenAI:
    return ArealOpenAI(engine, tokenizer, chat_template_type="concat")


async def test_two_turns_and_a_stream_of_the_same_seed(client: ArealOpenAI) -> None:
    params: Any = {"model": "m", "max_tokens": 24, "seed": 1, "temperature": 0.7}
    first = await client.chat.completions.create(messages=ASK, **params)
    ChatCompletion.model_validate(first.to_dict())
    stream = await client.chat.completions.create(messages=ASK, stream=True, **params)
    text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    assert text == first.choices[0].message.content != ""
    more = [*ASK, first.choices[0].message, {"role": "user", "content": "And 3+3?"}]
    second = await client.chat.completions.create(messages=more, **params)
    one, two = client.interactions[first.id], client.interactions[second.id]
    assert two.parent is not None
    assert two.tokens[: two.parent.num_tokens] == two.parent.tokens
    assert one.model_response.output_tokens == two.parent.model_response.output_tokens
    client.set_last_reward(1.0)
    row = client.export_interactions("concat")[second.id].to_tensor_dict()
    trained = len(one.model_response.output_tokens) + len(two.model_response.output_tokens)
    assert int(row["loss_mask"].sum()) == trained


async def test_logprobs_are_probabilities(client: ArealOpenAI) -> None:
    completion = await client.chat.completions.create(
        model="m", messages=ASK, max_tokens=8, temperature=0, logprobs=True, top_logprobs=3
    )
    assert completion.choices[0].logprobs is not None
    content = completion.choices[0].logprobs.content or []
    assert len(content) == completion.usage.completion_tokens
    for entry in content:
        assert entry.top_logprobs[0].token == entry.token
        assert entry.logprob == pytest.approx(entry.top_logprobs[0].logprob)
        assert sum(math.exp(top.logprob) for top in entry.top_logprobs) <= 1.0 + 1e-6


async def test_limits_and_stop(client: ArealOpenAI) -> None:
    cut = await client.chat.completions.create(model="m", messages=ASK, max_tokens=3, n=2, seed=1)
    assert [choice.finish_reason for choice in cut.choices] == ["length", "length"]
    assert cut.usage.completion_tokens == 6
    greedy: Any = {"model": "m", "messages": ASK, "max_tokens": 24, "temperature": 0}
    whole = (await client.chat.completions.create(**greedy)).choices[0].message.content
    stop = whole[4:7]
    trimmed = (await client.chat.completions.create(**greedy, stop=stop)).choices[0]
    assert trimmed.message.content == whole[: whole.find(stop)]
    assert trimmed.finish_reason == "stop"
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "word " * 300}]
        )
    assert caught.value.code == "context_length_exceeded"


async def test_cancelling_frees_the_slot(client: ArealOpenAI, engine: LocalEngine) -> None:
    tasks = [
        asyncio.create_task(
            client.chat.completions.create(
                model="m", messages=ASK, max_tokens=150, logit_bias={"2": -100}
            )
        )
        for _ in range(8)
    ]
    await asyncio.sleep(0.5)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    after = await client.chat.completions.create(model="m", messages=ASK, max_tokens=2)
    assert list(client.interactions) == [after.id]


async def test_sync_client(client: ArealOpenAI) -> None:
    create = client.sync.chat.completions.create
    completion = await asyncio.to_thread(create, model="m", messages=ASK, max_tokens=4)
    assert completion.id in client.interactions


async def test_responses(client: ArealOpenAI) -> None:
    response = await client.responses.create(
        model="m", input="Say hello.", max_output_tokens=8, temperature=0
    )
    again = await client.responses.create(
        model="m", input="Again.", previous_response_id=response.id, max_output_tokens=4
    )
    parent = client.interactions[again.id].parent
    assert parent is client.interactions[response.id]
