"""Errors are the SDK's own classes; a call that fails leaves nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import random
from typing import Any

import openai
import pytest

from agent_rl import ArealOpenAI, GenerationConfig, ScriptedEngine
from agent_rl.errors import EngineError

HI = [{"role": "user", "content": "hi"}]


def make(tokenizer: Any, *replies: Any, **kwargs: Any) -> tuple[ArealOpenAI, ScriptedEngine]:
    engine = ScriptedEngine(list(replies), tokenizer=tokenizer, **kwargs)
    return ArealOpenAI(engine, tokenizer), engine


async def ask(client: Any, **params: Any) -> Any:
    return await client.chat.completions.create(**{"model": "m", "messages": HI, **params})


@pytest.fixture
def no_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    """The SDK waits between its retries; the waiting itself is not what is tested."""

    async def sleep(self: Any, **_: Any) -> None:
        await asyncio.sleep(0)

    monkeypatch.setattr("openai._base_client.AsyncAPIClient._sleep_for_retry", sleep)


async def test_engine_error_is_retried_and_then_internal_server_error(
    tokenizer: Any, no_backoff: None
) -> None:
    client, engine = make(tokenizer, EngineError("GPU is gone"), repeat=True)
    with pytest.raises(openai.InternalServerError, match="GPU is gone"):
        await ask(client)
    assert len(engine.requests) == 3
    assert len(client.interactions) == 0


@pytest.mark.parametrize(
    ("params", "place"),
    [
        ({"messages": [{"role": "user", "content": "a\ud83d"}]}, "messages[0].content"),
        ({"temperature": float("nan")}, "temperature"),
        ({"metadata": {"a": float("inf")}}, "metadata.a"),
        ({"extra_body": {"top_k": float("nan")}}, "top_k"),
    ],
)
async def test_what_the_sdk_cannot_write_is_a_bad_request(
    tokenizer: Any, params: dict[str, Any], place: str
) -> None:
    client, engine = make(tokenizer, "never")
    with pytest.raises(openai.BadRequestError) as caught:
        await ask(client, **params)
    assert caught.value.param == place and caught.value.status_code == 400
    with pytest.raises(openai.BadRequestError, match="which"):
        await asyncio.to_thread(
            client.sync.chat.completions.create, **{"model": "m", "messages": HI, **params}
        )
    assert engine.requests == []


async def test_endless_nesting_is_a_bad_request(tokenizer: Any) -> None:
    client, engine = make(tokenizer, "never")
    arguments: dict[str, Any] = {}
    for _ in range(5000):
        arguments = {"a": arguments}
    call = {"id": "x", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [*HI, {"role": "assistant", "tool_calls": [call]}]
    with pytest.raises(openai.BadRequestError, match=r"messages\[1\].* levels deep"):
        await ask(client, messages=messages)
    with pytest.raises(TypeError):
        await ask(client, metadata={"a": object()})
    assert engine.requests == []


async def test_a_retry_of_the_sdk_that_succeeds_is_one_call(
    tokenizer: Any, no_backoff: None
) -> None:
    """Cases B19, B68: one interaction, and max_requests counts the call once."""
    engine = ScriptedEngine([EngineError("busy"), "a", "b"], tokenizer=tokenizer)
    client = ArealOpenAI(engine, tokenizer, max_requests=2)
    await ask(client)
    await ask(client)
    assert len(client.interactions) == 2
    with pytest.raises(openai.RateLimitError):
        await ask(client)


async def test_a_retry_of_the_sdk_after_its_timeout_is_one_call(
    tokenizer: Any, no_backoff: None
) -> None:
    """Case B68: the first answer never comes; what is recorded is the one that the agent got."""

    async def never(request: Any) -> None:
        await asyncio.Event().wait()

    client, engine = make(tokenizer, "warm", never, "a", "a", "b")
    await ask(client, store=False)  # the first prompt of a format takes its time
    first = await asyncio.wait_for(ask(client.with_options(max_retries=2, timeout=0.5)), 60)
    more = [*HI, first.choices[0].message, {"role": "user", "content": "and?"}]
    second = await ask(client, messages=more)
    assert len(engine.requests) >= 4
    assert list(client.interactions) == [first.id, second.id]
    client.set_last_reward(1.0)
    client.apply_reward_discount(0.5)
    assert [turn.reward for turn in client.interactions.values()] == [0.5, 1.0]


async def test_a_bug_of_the_engine_is_final(tokenizer: Any) -> None:
    client, engine = make(tokenizer, ZeroDivisionError("oops"), repeat=True)
    with pytest.raises(openai.InternalServerError, match="engine raised ZeroDivisionError: oops"):
        await ask(client)
    assert len(engine.requests) == 1


async def test_failed_call_is_nobodys_parent(tokenizer: Any) -> None:
    """Case B19: after the failure only c1 is there; c3 goes on from c1."""
    client, _ = make(tokenizer, "a", EngineError("down"), "c")
    first = await ask(client)
    more = [*HI, {"role": "assistant", "content": "a"}, {"role": "user", "content": "and?"}]
    with pytest.raises(openai.InternalServerError):
        await ask(client.with_options(max_retries=0), messages=more)
    assert list(client.export_interactions("individual")) == [first.id]
    third = await ask(client, messages=more)
    assert list(client.interactions) == [first.id, third.id]
    assert client.interactions[third.id].parent is client.interactions[first.id]


async def test_prompt_longer_than_the_context(tokenizer: Any) -> None:
    """Case B39: a code of its own, turn 1 stays exportable, the engine is not asked."""
    client, engine = make(tokenizer, "a", max_seq_len=60)
    first = await ask(client)
    long = [*HI, {"role": "assistant", "content": "a"}, {"role": "user", "content": "x y " * 40}]
    with pytest.raises(openai.BadRequestError, match="shorten the messages") as caught:
        await ask(client, messages=long)
    assert caught.value.code == "context_length_exceeded"
    assert caught.value.param == "messages"
    assert len(engine.requests) == 1
    client.set_last_reward(0.5)
    rows = client.export_interactions("individual")
    assert [(name, row.reward) for name, row in rows.items()] == [(first.id, 0.5)]


async def test_engine_max_tokens_bounds_prompt_and_answer_together(tokenizer: Any) -> None:
    engine = ScriptedEngine(["a"], tokenizer=tokenizer)
    gconfig = GenerationConfig(max_tokens=200)
    client = ArealOpenAI(engine, tokenizer, gconfig=gconfig, engine_max_tokens=64)
    await ask(client)
    assert engine.requests[0].gconfig.max_tokens == 64
    with pytest.raises(openai.BadRequestError, match="the context holds 64"):
        await ask(client, messages=[{"role": "user", "content": "x y " * 40}])


async def test_timeout_aborts_the_generation(tokenizer: Any) -> None:
    ended = asyncio.Event()

    async def slow(request: Any) -> str:
        try:
            await asyncio.sleep(30)
        finally:
            ended.set()
        return "late"

    client, engine = make(tokenizer, "a", slow)
    await ask(client, store=False)  # the first prompt of a format takes its time
    with pytest.raises(openai.APITimeoutError):
        await ask(client.with_options(max_retries=0), timeout=0.5)
    await asyncio.wait_for(ended.wait(), 10)
    assert len(engine.requests) == 2 and len(client.interactions) == 0


async def test_cancelling_reaches_the_engine(tokenizer: Any) -> None:
    started, ended = asyncio.Event(), asyncio.Event()

    async def slow(request: Any) -> str:
        started.set()
        try:
            await asyncio.sleep(30)
        finally:
            ended.set()
        return "late"

    client, _ = make(tokenizer, slow)
    task = asyncio.create_task(ask(client))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.wait_for(ended.wait(), 10)
    assert len(client.interactions) == 0


@pytest.mark.parametrize("kind", ["whole", "choices", "stream", "responses", "completions"])
async def test_cancelling_at_every_step_leaves_all_or_nothing(tokenizer: Any, kind: str) -> None:
    """Step by step of the event loop: the call is recorded as a whole, or not at all."""

    async def call(client: ArealOpenAI) -> None:
        if kind == "responses":
            async for _ in await client.responses.create(model="m", input="hi", stream=True):
                pass
        elif kind == "completions":
            await client.completions.create(model="m", prompt=["a", "b"])
        elif kind == "stream":
            async for _ in await ask(client, stream=True, n=2):
                pass
        else:
            await ask(client, n=3 if kind == "choices" else 1)

    whole = {"whole": 1, "choices": 3, "stream": 2, "responses": 1, "completions": 2}[kind]
    num_recorded = set()
    for num_steps in range(60):
        client, _ = make(tokenizer, "one two", repeat=True)
        task = asyncio.create_task(call(client))
        for _ in range(num_steps):
            await asyncio.sleep(0)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        num_recorded.add(len(client.interactions))
        assert len(client.interactions) in (0, whole)
        assert task.cancelled() or len(client.interactions) == whole
    assert 0 in num_recorded


async def test_one_failing_choice_cancels_its_siblings(tokenizer: Any) -> None:
    ended = []

    async def reply(request: Any) -> str:
        if request.rid.endswith("/1"):
            raise EngineError("choice 1 broke")
        try:
            await asyncio.sleep(30)
        finally:
            ended.append(request.rid)
        return "late"

    client, _ = make(tokenizer, reply, repeat=True)
    with pytest.raises(openai.InternalServerError, match="choice 1 broke"):
        await ask(client.with_options(max_retries=0), n=3)
    await asyncio.sleep(0.01)
    assert len(ended) == 2
    assert len(client.interactions) == 0


async def test_aborted_generation_is_no_answer(tokenizer: Any) -> None:
    """Case B45: aborted with no token at all; nothing is recorded and nothing retried."""
    client, engine = make(tokenizer, {"output_tokens": [], "stop_reason": "abort"}, repeat=True)
    with pytest.raises(openai.InternalServerError, match="aborted after 0 tokens"):
        await ask(client)
    assert len(engine.requests) == 1 and len(client.interactions) == 0


async def test_empty_answer_is_an_answer(tokenizer: Any) -> None:
    """Case B45: no token, stop."""
    client, _ = make(tokenizer, {"output_tokens": [], "stop_reason": "stop"})
    completion = await ask(client)
    assert completion.choices[0].message.content == ""
    assert completion.usage.completion_tokens == 0
    assert int(client.interactions[completion.id].to_tensor_dict()["loss_mask"].sum()) == 0


async def test_unknown_endpoint_is_named(tokenizer: Any) -> None:
    client, _ = make(tokenizer)
    with pytest.raises(openai.NotFoundError, match="POST /embeddings is not served here"):
        await client.embeddings.create(model="m", input="x")
    with pytest.raises(openai.NotFoundError, match="GET /files"):
        await client.files.list()


async def test_images_are_refused_by_an_engine_without_eyes(tokenizer: Any) -> None:
    parts = [
        {"type": "text", "text": "what is this?"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}},
    ]
    client, _ = make(tokenizer, "a")
    with pytest.raises(openai.BadRequestError, match="cannot read"):
        await ask(client, messages=[{"role": "user", "content": parts}])
    with pytest.raises(openai.BadRequestError, match="type 'input_audio'") as caught:
        audio = [{"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}]
        await ask(client, messages=[{"role": "user", "content": audio}])
    assert caught.value.param == "messages[0].content[0]"


async def test_messages_without_any_text_are_refused(tokenizer: Any) -> None:
    silent = copy.copy(tokenizer)
    silent.chat_template = (
        "{% for m in messages if m.role == 'assistant' %}{{ m.content }}{% endfor %}"
    )
    client, engine = make(silent, "a")
    for style in (True, False):
        with pytest.raises(openai.BadRequestError, match="no text of these messages") as caught:
            await ask(client, stream=style)
        assert caught.value.param == "messages"
    assert engine.requests == []


async def test_text_parts_are_text(tokenizer: Any) -> None:
    client, engine = make(tokenizer, "a", "a")
    await ask(client, messages=[{"role": "user", "content": [{"type": "text", "text": "hi"}]}])
    await ask(client)
    assert engine.requests[0].input_ids == engine.requests[1].input_ids


async def test_many_episodes_at_once_with_random_cancellation(tokenizer: Any) -> None:
    """64 clients x 8 calls on one loop: no cross-talk; cancelled calls leave nothing."""
    chance = random.Random(0)
    running = 0

    async def echo(request: Any) -> list[int]:
        nonlocal running
        running += 1
        try:
            for _ in range(chance.randrange(4)):
                await asyncio.sleep(0)
            return [int(request.metadata["user"]), tokenizer.eos_token_id]
        finally:
            running -= 1

    engine = ScriptedEngine([echo], tokenizer=tokenizer, repeat=True)
    finished: dict[int, list[str]] = {}

    async def episode(number: int) -> ArealOpenAI:
        client = ArealOpenAI(engine, tokenizer)
        finished[number] = []
        for call in range(8):
            message = {"role": "user", "content": f"{number} {call}"}
            task = asyncio.create_task(ask(client, messages=[message], user=str(100 + number)))
            if chance.random() < 0.3:
                for _ in range(chance.randrange(3)):
                    await asyncio.sleep(0)
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                finished[number].append((await task).id)
        return client

    clients = await asyncio.gather(*[episode(number) for number in range(64)])
    await asyncio.sleep(0.01)
    assert running == 0
    assert len(asyncio.all_tasks()) == 1
    for number, client in enumerate(clients):
        assert list(client.interactions) == finished[number]
        for interaction in client.interactions.values():
            assert interaction.model_response.output_tokens[0] == 100 + number
            assert interaction.messages[0]["content"].startswith(f"{number} ")
    total = sum(len(names) for names in finished.values())
    assert 300 < total < 512


async def test_concurrent_calls_of_one_client(tokenizer: Any) -> None:
    """Case B73: 20 calls, answers in another order; the last recorded one gets the reward."""
    gates = [asyncio.Event() for _ in range(20)]

    async def reply(request: Any) -> list[int]:
        number = int(request.metadata["user"])
        await gates[number].wait()
        if number > 0:
            gates[number - 1].set()
        return [100 + number]

    client, _ = make(tokenizer, reply, repeat=True)
    calls = [
        ask(client, messages=[{"role": "user", "content": str(i)}], user=str(i)) for i in range(20)
    ]
    gates[19].set()
    completions = await asyncio.gather(*calls)
    for number, completion in enumerate(completions):
        interaction = client.interactions[completion.id]
        assert interaction.messages[0]["content"] == str(number)
        assert interaction.model_response.output_tokens == (100 + number,)
    assert len(client.interactions) == 20
    client.set_last_reward(1.0)
    assert client.interactions[completions[0].id].reward == 1.0


async def test_a_text_that_cannot_fit_is_not_even_encoded(tokenizer: Any) -> None:
    """Encoding megabytes would hold up every other episode of the process."""
    engine = ScriptedEngine(["a"], tokenizer=tokenizer, max_seq_len=60)
    short_sighted = copy.copy(tokenizer)
    short_sighted._tokenizer = OnlyShortTexts(tokenizer.backend_tokenizer)
    client = ArealOpenAI(engine, short_sighted)
    text = "x y " * 1_000_000
    for content in (text, [{"type": "text", "text": text}]):
        with pytest.raises(openai.BadRequestError, match="has at least") as caught:
            await ask(client, messages=[{"role": "user", "content": content}])
        assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="has at least"):
        await client.completions.create(model="m", prompt=text)
    assert (await ask(client)).choices[0].message.content == "a"


class OnlyShortTexts:
    """A Rust tokenizer that may not be given long ones."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def encode(self, text: str, **options: Any) -> Any:
        assert len(text) < 100_000
        return self._inner.encode(text, **options)
