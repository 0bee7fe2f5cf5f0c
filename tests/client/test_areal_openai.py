"""The client object: construction, copies, the recording API."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import openai
import pytest

from agent_rl import ArealOpenAI, GenerationConfig, ScriptedEngine

HI = [{"role": "user", "content": "hi"}]


def make(tokenizer: Any, *replies: Any, **kwargs: Any) -> ArealOpenAI:
    return ArealOpenAI(ScriptedEngine(list(replies), tokenizer=tokenizer), tokenizer, **kwargs)


async def ask(client: Any, *texts: str, **params: Any) -> Any:
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
    return await client.chat.completions.create(model="m", messages=messages, **params)


async def test_a_call_is_answered_and_recorded(tokenizer: Any) -> None:
    client = make(tokenizer, "four")
    completion = await ask(client, "2+2?")
    assert completion.choices[0].message.content == "four"
    assert completion.choices[0].finish_reason == "stop"
    interaction = client.interactions[completion.id]
    sampled = (*tokenizer.encode("four"), tokenizer.eos_token_id)
    assert interaction.model_response.output_tokens == sampled
    assert interaction.messages == [{"role": "user", "content": "2+2?"}]
    assert completion.usage.prompt_tokens == len(interaction.model_response.input_tokens)
    assert completion.usage.completion_tokens == len(sampled)
    assert completion._request_id == completion.id


async def test_only_what_was_sampled_is_trained(tokenizer: Any) -> None:
    """Case B122: two turns in one row: no header, no separator, but the end token."""
    end = tokenizer.eos_token_id
    client = make(tokenizer, [40, 41, end], [50, end], chat_template_type="concat")
    first = await ask(client, "hi")
    await ask(client, "hi", first.choices[0].message.content, "and?")
    (row,) = client.export_interactions("concat").values()
    tensors = row.to_tensor_dict()
    ids, mask = tensors["input_ids"][0].tolist(), tensors["loss_mask"][0].tolist()
    assert [i for i, bit in zip(ids, mask, strict=True) if bit] == [40, 41, end, 50, end]
    start, header = ids.index(40), tokenizer.encode("<|im_start|>assistant\n")
    assert ids[start - len(header) : start] == header
    assert ids[start + 3 : start + 4] == tokenizer.encode("\n")
    assert mask[start - len(header) : start + 4] == [0] * len(header) + [1, 1, 1, 0]


def test_is_a_real_subclass_and_needs_no_key(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.setenv("OPENAI_BASE_URL", "http://elsewhere.local/v1")
    client = make(tokenizer)
    assert isinstance(client, openai.AsyncOpenAI)
    assert client.base_url.host == "agent-rl.local"


async def test_copies_share_the_record(tokenizer: Any) -> None:
    client = make(tokenizer, "a", "b", "c")
    for copy in (client.with_options(max_retries=0), client.copy(timeout=5.0), client):
        assert type(copy) is ArealOpenAI
        await ask(copy, "hi")
    assert [i.output_message_list[0]["content"] for i in client.interactions.values()] == [
        *("a", "b", "c"),
    ]
    other = ArealOpenAI(http_client=client._client)
    assert list(other.interactions) == list(client.interactions)


async def test_close_closes_nothing(tokenizer: Any) -> None:
    client = make(tokenizer, "a", "b")
    async with client as opened:
        await ask(opened, "hi")
    await client.close()
    assert not client.is_closed()
    await ask(client, "hi again")
    assert len(client.interactions) == 2


def test_what_is_missing_is_said(tokenizer: Any) -> None:
    engine = ScriptedEngine([])
    with pytest.raises(TypeError, match="needs both"):
        ArealOpenAI()
    with pytest.raises(TypeError, match="the tokenizer is missing"):
        ArealOpenAI(engine)
    with pytest.raises(TypeError, match="not both"):
        ArealOpenAI(engine, tokenizer, http_client=openai.DefaultAsyncHttpxClient())
    with pytest.raises(ValueError, match="sampling must be"):
        ArealOpenAI(engine, tokenizer, sampling="mine")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="chat_template_type must be"):
        ArealOpenAI(engine, tokenizer, chat_template_type="chatml")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="max_requests is 0"):
        ArealOpenAI(engine, tokenizer, max_requests=0)
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        ArealOpenAI(engine, tokenizer, colour="red")


async def test_rewards(tokenizer: Any) -> None:
    client = make(tokenizer, "a", "b", "c")
    with pytest.raises(RuntimeError):
        client.set_last_reward(1.0)
    first = await ask(client, "q1")
    second = await ask(client, "q1", "a", "q2")
    client.set_reward(first.id, 0.25)
    client.set_last_reward(1.0)
    assert client.get_interaction(second.id).reward == 1.0
    assert client.total_reward == 1.25
    client.set_reward(first.id, 0.5)
    assert client.total_reward == 1.5
    with pytest.raises(KeyError):
        client.set_reward("chatcmpl-unknown", 1.0)
    with pytest.raises(KeyError):
        client.get_interaction("chatcmpl-unknown")
    for bad in (math.nan, math.inf, "1", None):
        with pytest.raises(ValueError):
            client.set_reward(first.id, bad)  # type: ignore[arg-type]
    client.apply_reward_discount(0.5)
    assert [i.reward for i in client.interactions.values()] == [1.0, 1.0]
    with pytest.raises(RuntimeError):
        client.apply_reward_discount(0.5)


async def test_export_of_two_turns(tokenizer: Any) -> None:
    client = make(tokenizer, "a", "b", chat_template_type="concat")
    first = await ask(client, "q1")
    second = await ask(client, "q1", "a", "q2")
    client.set_last_reward(1.0)
    assert list(client.export_interactions("individual")) == [first.id, second.id]
    assert list(client.export_interactions("concat")) == [second.id]
    assert client.interactions[second.id].parent is client.interactions[first.id]
    with pytest.raises(ValueError):
        client.export_interactions("other")  # type: ignore[arg-type]


async def test_clients_of_one_engine_share_nothing(tokenizer: Any) -> None:
    engine = ScriptedEngine(["x"], tokenizer=tokenizer, repeat=True)
    one, two = ArealOpenAI(engine, tokenizer), ArealOpenAI(engine, tokenizer)
    await asyncio.gather(ask(one, "1"), ask(two, "2"), ask(two, "3"))
    assert [i.messages[0]["content"] for i in one.interactions.values()] == ["1"]
    assert [i.messages[0]["content"] for i in two.interactions.values()] == ["2", "3"]


async def test_store_false_answers_without_a_record(tokenizer: Any) -> None:
    client = make(tokenizer, "a")
    completion = await ask(client, "hi", store=False)
    assert completion.choices[0].message.content == "a"
    assert len(client.interactions) == 0


async def test_max_requests_ends_a_runaway_loop(tokenizer: Any) -> None:
    client = make(tokenizer, "a", "b", "c", max_requests=2)
    await ask(client, "1")
    await ask(client, "2")
    with pytest.raises(openai.RateLimitError, match="max_requests=2") as caught:
        await ask(client, "3")
    assert caught.value.response.headers["x-should-retry"] == "false"
    assert len(client.interactions) == 2


async def test_override_sampling(tokenizer: Any) -> None:
    """sampling="override": gconfig's temperature wins, the agent's own limits still count."""
    engine = ScriptedEngine(["a"], tokenizer=tokenizer, repeat=True)
    gconfig = GenerationConfig(temperature=0.5, top_p=0.9, max_new_tokens=32)
    agent = ArealOpenAI(engine, tokenizer, gconfig=gconfig)
    override = ArealOpenAI(engine, tokenizer, gconfig=gconfig, sampling="override")
    for client in (agent, override):
        await ask(client, "hi", temperature=0.1, max_tokens=5)
        await ask(client, "hi")
    used = [r.gconfig for r in engine.requests]
    assert [g.temperature for g in used] == [0.1, 0.5, 0.5, 0.5]
    assert [g.top_p for g in used] == [0.9] * 4
    assert [g.max_new_tokens for g in used] == [5, 32, 5, 32]
    assert next(iter(agent.interactions.values())).temperature == 0.1


async def test_a_temperature_of_the_agents_own_is_worth_a_warning_beside_a_gconfig(
    tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """A plain script asked for no temperature but its own; a training's gconfig is another's."""
    await ask(make(tokenizer, "a"), "hi", temperature=0.37)
    assert caplog.messages == []
    await ask(make(tokenizer, "a", gconfig=GenerationConfig()), "hi", temperature=0.37)
    assert "the agent sends temperature=0.37 but gconfig has 1.0" in caplog.text
