"""ScriptedEngine keeps the seam: replies in order, versions, abort, pause, close."""

from __future__ import annotations

import asyncio

import pytest

from agent_rl.engine.base import WeightUpdate
from agent_rl.engine.scripted import ScriptedEngine
from agent_rl.errors import ContextLengthError, EngineError
from agent_rl.types import GenerationConfig, ModelRequest, ModelResponse, TokenDelta


class Bytes:
    eos_token_id = 2

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return list(text.encode())


def request(rid: str = "r", **gconfig: object) -> ModelRequest:
    return ModelRequest(rid=rid, input_ids=[7, 8], gconfig=GenerationConfig(**gconfig))


async def test_each_kind_of_reply() -> None:
    async def later(req: ModelRequest) -> list[int]:
        return [len(req.input_ids)]

    replies = ["ab", [20, 21], {"output_tokens": [5], "stop_reason": "length"}, later]
    engine = ScriptedEngine(replies, tokenizer=Bytes(), version=4)  # type: ignore[arg-type]
    responses = [await engine.agenerate(request(str(n))) for n in range(4)]
    assert [r.output_tokens for r in responses] == [(97, 98, 2), (20, 21), (5,), (2,)]
    assert responses[0].output_logprobs == (-0.1, -0.2, -0.3)
    assert responses[0].output_versions == (4, 4, 4)
    assert responses[0].input_tokens == (7, 8)
    assert [r.stop_reason for r in responses] == ["stop", "stop", "length", "stop"]
    assert [req.rid for req in engine.requests] == ["0", "1", "2", "3"]


async def test_replies_that_fail() -> None:
    engine = ScriptedEngine([ValueError("boom"), "text", 5])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="boom"):
        await engine.agenerate(request())
    with pytest.raises(EngineError, match="tokenizer="):
        await engine.agenerate(request())
    with pytest.raises(EngineError, match="type int"):
        await engine.agenerate(request())
    with pytest.raises(EngineError, match="3 replies and got request 4"):
        await engine.agenerate(request())


async def test_repeat_starts_again() -> None:
    engine = ScriptedEngine([[1], [2]], repeat=True)
    ids = [(await engine.agenerate(request())).output_tokens for _ in range(3)]
    assert ids == [(1,), (2,), (1,)]


async def test_context_limit() -> None:
    engine = ScriptedEngine([[1]], max_seq_len=2)
    with pytest.raises(ContextLengthError, match="2 tokens and the context holds 2"):
        await engine.agenerate(request())


async def test_stream() -> None:
    *deltas, response = [item async for item in ScriptedEngine([[20, 21]]).astream(request())]
    assert all(isinstance(delta, TokenDelta) for delta in deltas)
    assert isinstance(response, ModelResponse)
    assert [delta.token_ids for delta in deltas if isinstance(delta, TokenDelta)] == [(20,), (21,)]


async def test_the_version_is_that_of_the_start() -> None:
    """Case B61."""
    engine = ScriptedEngine([[20, 21], [22]], latency_s=0.01, version=3)
    running = asyncio.create_task(engine.agenerate(request()))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    await engine.update_weights(WeightUpdate(version=4))
    assert (await running).output_versions == (3, 3)
    assert (await engine.agenerate(request())).output_versions == (4,)


@pytest.mark.parametrize("is_paused", [False, True])
async def test_abort_ends_only_that_request(is_paused: bool) -> None:
    engine = ScriptedEngine([[1], [2]], latency_s=0.01)
    if is_paused:
        await engine.pause()
    tasks = [asyncio.create_task(engine.agenerate(request(rid))) for rid in ("a", "b")]
    await asyncio.sleep(0)
    await engine.abort("a")
    aborted = await tasks[0]
    assert (aborted.output_tokens, aborted.stop_reason) == ((), "abort")
    await engine.resume()
    assert (await tasks[1]).output_tokens == (2,)


@pytest.mark.parametrize("is_paused", [False, True])
async def test_close_fails_what_is_running(is_paused: bool) -> None:
    engine = ScriptedEngine([[1]], latency_s=60.0)
    if is_paused:
        await engine.pause()
    running = asyncio.create_task(engine.agenerate(request()))
    await asyncio.sleep(0)
    await engine.close()
    await engine.close()
    with pytest.raises(EngineError, match="closed"):
        await running
    with pytest.raises(EngineError, match="closed"):
        await engine.agenerate(request())
    assert not await engine.health()


async def test_pause_lets_requests_wait() -> None:
    """Case B134: none fails."""
    engine = ScriptedEngine([[1]])
    await engine.pause()
    waiting = asyncio.create_task(engine.agenerate(request()))
    await asyncio.sleep(0.01)
    assert not waiting.done()
    await engine.resume()
    assert (await waiting).output_tokens == (1,)


async def test_cancellation_reaches_the_reply() -> None:
    ended: list[str] = []

    async def slow(req: ModelRequest) -> list[int]:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(req.rid)
        return []

    engine = ScriptedEngine([slow])
    task = asyncio.create_task(engine.agenerate(request("x")))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.sleep(0)
    assert ended == ["x"]
