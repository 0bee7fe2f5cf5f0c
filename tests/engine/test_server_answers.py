"""What becomes of a server's answers, good and bad, in both protocols, whole and as a stream."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import pytest_asyncio
from live_server import LiveServer
from scripted_server import Answer, Kind, ScriptedServer

from agent_rl.engine.remote import RemoteEngine
from agent_rl.engine.sglang import SGLang
from agent_rl.engine.vllm import VLLM
from agent_rl.errors import EngineError
from agent_rl.types import GenerationConfig, ModelRequest, ModelResponse, TokenDelta

PROMPT = [1, 5, 3]
Connect = Callable[..., Awaitable[tuple[RemoteEngine, ScriptedServer]]]


@pytest.fixture(params=["sglang", "vllm"])
def kind(request: pytest.FixtureRequest) -> Kind:
    return request.param


@pytest.fixture(params=[False, True], ids=["whole", "stream"])
def streams(request: pytest.FixtureRequest) -> bool:
    return request.param


@pytest_asyncio.fixture
async def connect(kind: Kind) -> AsyncIterator[Connect]:
    """``await connect(answer, answer, ...)``: an engine over one server with that script."""
    engines: list[RemoteEngine] = []
    servers: list[LiveServer] = []

    async def make(*script: Any, **options: Any) -> tuple[RemoteEngine, ScriptedServer]:
        scripted = ScriptedServer(kind=kind, script=script, **options)
        server = await LiveServer(scripted.app()).start()
        servers.append(server)
        api = SGLang() if kind == "sglang" else VLLM()
        engine = await asyncio.to_thread(lambda: RemoteEngine(api, [server.address]))
        engines.append(engine)
        scripted.controls.clear()
        return engine, scripted

    yield make
    for engine in engines:
        await engine.close()
    for server in servers:
        await server.close()


async def generate(engine: RemoteEngine, streams: bool) -> ModelResponse:
    """Ten tokens at most. What a stream shows is what its response holds."""
    req = ModelRequest(rid="r", input_ids=PROMPT, gconfig=GenerationConfig(max_new_tokens=10))
    if not streams:
        return await engine.agenerate(req)
    *deltas, last = [item async for item in engine.astream(req)]
    assert isinstance(last, ModelResponse)
    shown = [each for each in deltas if isinstance(each, TokenDelta)]
    assert [i for each in shown for i in each.token_ids] == list(last.output_tokens)
    assert [v for each in shown for v in each.versions] == list(last.output_versions)
    return last


SIX, THREE = [30, 31, 32, 33, 34, 35], [36, 37, 2]


@pytest.mark.parametrize("num_empty", [0, 1])
async def test_an_aborted_completion_goes_on(
    connect: Connect, streams: bool, num_empty: int
) -> None:
    """Case B35: 6 tokens, abort, perhaps 0 tokens and abort again, then 3 tokens."""
    empty = [Answer(finish="abort")] * num_empty
    engine, server = await connect(
        Answer(token_ids=SIX, finish="abort"), *empty, Answer(token_ids=THREE)
    )
    response = await generate(engine, streams)
    assert response.output_tokens == (*SIX, *THREE)
    assert response.output_logprobs == (-0.1, -0.2, -0.3, -0.4, -0.5, -0.6, -0.1, -0.2, -0.3)
    assert (response.stop_reason, response.input_tokens) == ("stop", tuple(PROMPT))
    assert server.asked == [(PROMPT, 10), *[([*PROMPT, *SIX], 4)] * (num_empty + 1)]


async def test_a_resumed_completion_keeps_to_its_budget(connect: Connect, streams: bool) -> None:
    """Case B36: 7 of 10 tokens, abort; 3 are left to ask for."""
    seven = [*SIX, 36]
    full = Answer(token_ids=[37, 38, 39], finish="length")
    engine, server = await connect(Answer(token_ids=seven, finish="abort"), full)
    response = await generate(engine, streams)
    assert (len(response.output_tokens), response.stop_reason) == (10, "length")
    assert server.asked == [(PROMPT, 10), ([*PROMPT, *seven], 3)]


async def test_an_abort_at_the_very_end_is_not_asked_again(connect: Connect, streams: bool) -> None:
    """Case B36, in reverse: all 10 tokens are there when it is aborted."""
    engine, server = await connect(Answer(token_ids=range(30, 40), finish="abort"))
    response = await generate(engine, streams)
    assert (response.output_tokens, response.stop_reason) == (tuple(range(30, 40)), "length")
    assert server.asked == [(PROMPT, 10)]


async def test_an_answer_longer_than_asked_for_is_refused(connect: Connect, streams: bool) -> None:
    """Case B36: the budget holds, and no token is cut off."""
    engine, _ = await connect(Answer(token_ids=range(30, 44), finish="length"))
    with pytest.raises(EngineError, match="14 tokens where at most 10"):
        await generate(engine, streams)


@pytest.mark.parametrize("is_cumulative", [True, False])
async def test_events_that_tell_all_tokens_or_the_new_ones(
    connect: Connect, kind: Kind, is_cumulative: bool
) -> None:
    """Case B53: each token once, in order, with its own log-prob."""
    if kind == "vllm" and is_cumulative:
        pytest.skip("vLLM tells the new tokens only")
    ids, logprobs = [30, 31, 32, 33, 2], [-0.1, -0.2, -0.3, -0.4, -0.5]
    events = tuple(
        Answer(
            token_ids=ids[0 if is_cumulative else start : end],
            logprobs=logprobs[0 if is_cumulative else start : end],
            finish="stop" if end == 5 else None,
            num_before=0 if is_cumulative else start,
        )
        for start, end in ((0, 1), (1, 4), (4, 5))
    )
    engine, _ = await connect(events)
    response = await generate(engine, True)
    assert response.output_tokens == tuple(ids)
    assert response.output_logprobs == tuple(logprobs)


async def test_an_empty_answer(connect: Connect, streams: bool) -> None:
    """Case B45."""
    engine, _ = await connect(Answer())
    response = await generate(engine, streams)
    assert (response.output_tokens, response.stop_reason) == ((), "stop")
    assert response.latency_s >= response.ttft_s > 0.0


async def test_an_aborted_answer_without_versions(connect: Connect, streams: bool) -> None:
    """Case B63: nothing is missed in an aborted answer that tells no version."""
    engine, _ = await connect(Answer(finish="abort"), Answer(token_ids=[20, 2]))
    await asyncio.to_thread(engine.set_version, 3)
    response = await generate(engine, streams)
    assert (response.output_tokens, response.output_versions) == ((20, 2), (3, 3))


@pytest.mark.parametrize("tells", [True, False])
async def test_a_version_is_of_the_weights_that_sampled(
    connect: Connect, streams: bool, tells: bool
) -> None:
    """Case B61: version 3 when it is sent, 4 when the answer comes; and [3, 3, 4, 4] over an
    abort."""
    spans = {n: [(str(n), 0, 2)] if tells else None for n in (3, 4)}
    script = (
        Answer(token_ids=[20, 21], finish="abort", spans=spans[3]),
        Answer(token_ids=[22, 2], spans=spans[4]),
    )

    async def rename(number: int) -> None:
        if number == 1:
            await asyncio.to_thread(engine.set_version, 4)

    engine, _ = await connect(*script, before=rename)
    await asyncio.to_thread(engine.set_version, 3)
    response = await generate(engine, streams)
    assert response.output_versions == (3, 3, 4, 4)


async def test_weights_of_somebody_else_are_not_given_a_version(
    connect: Connect, streams: bool
) -> None:
    foreign = Answer(token_ids=[20, 2], spans=[("theirs", 0, 2)])
    engine, server = await connect(foreign, Answer(token_ids=[21, 2]))
    response = await generate(engine, streams)
    assert (response.output_tokens, response.output_versions) == ((21, 2), (0, 0))
    assert server.asked == [(PROMPT, 10)] * 2


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (Answer(token_ids=[20, 21], logprobs=[-0.1, -0.2, -0.3]), "2 token ids and 3 log-probs"),
        (Answer(token_ids=[20, 2], logprobs=[-0.1, None]), "form of its protocol .TypeError"),
        (Answer(token_ids=[20, 2], logprobs=[-0.1, math.nan]), "must be finite, got .-0.1, nan"),
        (Answer(token_ids=[20, 2], finish="bored"), "'bored', which is not known here"),
        ({"choices": [], "object": "chat.completion"}, "form of its protocol"),
        ([], "form of its protocol"),
    ],
)
async def test_a_bad_answer_is_refused_with_what_is_wrong(
    connect: Connect, kind: Kind, streams: bool, answer: Any, message: str
) -> None:
    """Case B41, and others of its kind: never a token whose log-prob is not its own."""
    if kind == "vllm" and streams and isinstance(answer, dict):
        pytest.skip("an event without choices tells the usage")
    engine, _ = await connect(answer)
    with pytest.raises(EngineError, match=message):
        await generate(engine, streams)


async def test_a_server_of_another_kind_is_named_when_connecting(connect: Connect) -> None:
    with pytest.raises(EngineError, match=r"no inference server answers: .*check engine\.backend"):
        await connect(models=[])
