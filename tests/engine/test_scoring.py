"""Log-probs of given ids: equal to a plain forward pass, in whatever chunks, beside decoding."""

from __future__ import annotations

import asyncio
import math
import random

import pytest
import torch
from transformers import LlamaForCausalLM

from agent_rl.engine.base import ScoringEngine
from agent_rl.engine.local import LocalEngine
from agent_rl.engine.scoring import ScoreJob
from agent_rl.engine.scripted import ScriptedEngine
from agent_rl.errors import ContextLengthError, EngineError, RequestError
from agent_rl.types import GenerationConfig, ModelRequest


def ids(length: int) -> list[int]:
    return random.Random(length).choices(range(3, 97), k=length)


@torch.no_grad()
def expected(model: LlamaForCausalLM, input_ids: list[int], temperature: float) -> torch.Tensor:
    """[T - 1, V] log-probs of what follows each id."""
    logits = model(input_ids=torch.tensor([input_ids])).logits[0, :-1]
    return (logits.float() / temperature).log_softmax(-1)


@pytest.mark.parametrize(("length", "num_scored"), [(2, 1), (9, 8), (300, 20), (400, 399)])
async def test_scores_equal_a_plain_forward_pass(
    engine: LocalEngine, model: LlamaForCausalLM, length: int, num_scored: int
) -> None:
    """Also over several chunks of 256 tokens, of which the first may hold no scored one."""
    input_ids = ids(length)
    scores = await engine.score(input_ids, num_scored, temperature=0.7)
    rows = expected(model, input_ids, 0.7)[-num_scored:]
    chosen = torch.tensor(input_ids[-num_scored:])[:, None]
    assert torch.allclose(torch.tensor(scores), rows.gather(1, chosen)[:, 0], atol=1e-4)


async def test_the_most_likely_ids_of_each_place(
    engine: LocalEngine, model: LlamaForCausalLM
) -> None:
    input_ids = ids(12)
    top = await engine.score_top(input_ids, 3, 4)
    best = expected(model, input_ids, 1.0)[-3:].topk(4)
    assert [[token for token, _ in place] for place in top] == best.indices.tolist()
    values = torch.tensor([[value for _, value in place] for place in top])
    assert torch.allclose(values, best.values, atol=1e-4)


async def test_what_was_sampled_scores_as_it_was_sampled(engine: LocalEngine) -> None:
    gconfig = GenerationConfig(max_new_tokens=20, min_new_tokens=20, temperature=0.8)
    response = await engine.agenerate(ModelRequest(rid="r", input_ids=ids(7), gconfig=gconfig))
    sequence = [*response.input_tokens, *response.output_tokens]
    scores = await engine.score(sequence, 20, temperature=0.8)
    assert scores == pytest.approx(response.output_logprobs, abs=1e-4)


async def test_scoring_beside_decoding_changes_neither(
    engine: LocalEngine, model: LlamaForCausalLM, assert_fresh
) -> None:
    gconfig = GenerationConfig(max_new_tokens=30, min_new_tokens=30)
    running = [
        asyncio.create_task(
            engine.agenerate(ModelRequest(rid=f"r{n}", input_ids=ids(5 + n), gconfig=gconfig))
        )
        for n in range(3)
    ]
    scores = await asyncio.gather(*(engine.score(ids(40 + n), 10) for n in range(6)))
    for response in await asyncio.gather(*running):
        assert_fresh(model, response)
    for n, found in enumerate(scores):
        rows = expected(model, ids(40 + n), 1.0)[-10:]
        chosen = torch.tensor(ids(40 + n)[-10:])[:, None]
        assert torch.allclose(torch.tensor(found), rows.gather(1, chosen)[:, 0], atol=1e-4)


async def test_scores_wait_while_paused_and_use_the_weights_of_after(
    engine: LocalEngine, model: LlamaForCausalLM
) -> None:
    await engine.pause()
    job = asyncio.create_task(engine.score(ids(9), 4))
    await asyncio.sleep(0)
    with torch.no_grad():
        model.lm_head.weight.mul_(0.5)
    assert not job.done()
    engine.set_version(1)
    await engine.resume()
    rows = expected(model, ids(9), 1.0)[-4:]
    chosen = torch.tensor(ids(9)[-4:])[:, None]
    assert torch.allclose(torch.tensor(await job), rows.gather(1, chosen)[:, 0], atol=1e-4)


async def test_a_cancelled_job_is_not_computed_and_a_closed_engine_fails_it(
    model: LlamaForCausalLM,
) -> None:
    engine = LocalEngine(model, max_batch_size=2, max_seq_len=64)
    await engine.pause()
    dropped = asyncio.create_task(engine.score(ids(9), 4))
    waiting = asyncio.create_task(engine.score(ids(9), 4))
    await asyncio.sleep(0)
    dropped.cancel()
    await engine.close()
    with pytest.raises(EngineError, match="closed"):
        await waiting
    with pytest.raises(asyncio.CancelledError):
        await dropped
    with pytest.raises(EngineError, match="closed"):
        await engine.score(ids(9), 4)


async def test_a_forward_pass_that_fails_costs_its_own_job_only(
    engine: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    score, failures = engine._decoder.score, ["out of memory"]

    def flaky(job: ScoreJob) -> list:
        if failures:
            raise RuntimeError(failures.pop())
        return score(job)

    monkeypatch.setattr(engine._decoder, "score", flaky)
    with pytest.raises(EngineError, match="scoring failed: out of memory"):
        await engine.score(ids(9), 4)
    assert len(await engine.score(ids(9), 4)) == 4


async def test_wrong_jobs_are_refused(engine: LocalEngine) -> None:
    for num_scored in (0, -1, 3, 9):
        with pytest.raises(ValueError, match="num_scored"):
            await engine.score([5, 6, 7], num_scored)
    with pytest.raises(ValueError, match="temperature"):
        await engine.score([5, 6, 7], 1, temperature=0.0)
    with pytest.raises(RequestError, match="97"):
        await engine.score([5, 97], 1)
    with pytest.raises(ContextLengthError):
        await engine.score(ids(401), 1)


async def test_the_scripted_engine_scores_by_rule() -> None:
    engine = ScriptedEngine([])
    assert isinstance(engine, ScoringEngine)
    assert await engine.score([5, 6, 7, 8], 3) == (-0.1, -0.2, -0.3)
    top = await engine.score_top([5, 6, 0, 8], 2, 3)
    assert [[token for token, _ in place] for place in top] == [[0, 1, 2], [8, 0, 1]]
    assert all(sum(math.exp(value) for _, value in place) < 1.0 for place in top)
