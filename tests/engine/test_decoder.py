"""Which tokens are computed and which are reused, and that reuse changes no result."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

from transformers import LlamaForCausalLM

from agent_rl.engine.decoder import EngineCounters, _similar_rows
from agent_rl.engine.local import LocalEngine
from agent_rl.types import GenerationConfig, ModelRequest

Check = Callable[..., None]


def request(input_ids: list[int], num_new: int) -> ModelRequest:
    gconfig = GenerationConfig(min_new_tokens=num_new, max_new_tokens=num_new)
    return ModelRequest(rid="r", input_ids=input_ids, gconfig=gconfig)


def prompt(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(3, 97), k=length)


async def test_the_prompt_of_a_group_is_computed_once(
    engine: LocalEngine, model: LlamaForCausalLM, assert_fresh: Check
) -> None:
    """8 samples of 50 tokens: 49 computed, the last is the first decode step's input."""
    await engine.pause()  # all are queued before the first step
    samples = [asyncio.create_task(engine.agenerate(request(prompt(0, 50), 6))) for _ in range(8)]
    await asyncio.sleep(0)
    await engine.resume()
    responses = await asyncio.gather(*samples)
    assert engine.counters == EngineCounters(
        generated_tokens=48, prefill_tokens=49, reused_tokens=7 * 49, decode_steps=6
    )
    for response in responses:
        assert_fresh(model, response)


async def test_questions_after_the_same_system_prompt(
    engine: LocalEngine, model: LlamaForCausalLM, assert_fresh: Check
) -> None:
    """4 prompts of 60 + 10 tokens: 69 for the first, 9 for each other one."""
    system = prompt(0, 60)
    requests = [request([*system, 10 + n, *prompt(n, 9)], 4) for n in range(4)]
    responses = await asyncio.gather(*map(engine.agenerate, requests))
    assert engine.counters.prefill_tokens == 69 + 3 * 9
    assert engine.counters.reused_tokens == 3 * 60
    for response in responses:
        assert_fresh(model, response)


async def test_a_next_turn_computes_only_what_is_new(
    engine: LocalEngine, model: LlamaForCausalLM, assert_fresh: Check
) -> None:
    """Turn 1: 30 + 8 tokens, the last of them never was an input. Turn 2 adds 5."""
    first = await engine.agenerate(request(prompt(0, 30), 8))
    await engine.agenerate(request(prompt(1, 30), 3))  # another conversation meanwhile
    turn_2 = [*first.input_tokens, *first.output_tokens, *prompt(2, 5)]
    second = await engine.agenerate(request(turn_2, 4))
    assert engine.counters.reused_tokens == 37
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 37)
    assert engine.counters.prefill_tokens == 29 + 29 + (43 - 1 - 37)
    assert_fresh(model, second)


async def test_a_shared_prefix_does_not_destroy_the_longer_conversation(
    engine: LocalEngine, model: LlamaForCausalLM, assert_fresh: Check
) -> None:
    """B begins like A, so it copies; A's next turn still finds all of A."""
    system = prompt(0, 20)
    a = await engine.agenerate(request(system + prompt(1, 20), 5))
    b = await engine.agenerate(request(system + prompt(2, 20), 5))
    reused = engine.counters.reused_tokens
    next_a = await engine.agenerate(request([*a.input_tokens, *a.output_tokens, 5, 6], 3))
    assert reused == 20
    assert engine.counters.reused_tokens == reused + 44
    assert_fresh(model, b)
    assert_fresh(model, next_a)


async def test_few_slots_and_many_lengths(model: LlamaForCausalLM, assert_fresh: Check) -> None:
    """Sequences move between slots, slots are taken over, capacity grows: results stay right."""
    engine = LocalEngine(model, max_batch_size=3, max_seq_len=400)
    choose = random.Random(0)
    shared = prompt(0, 130)

    async def converse(n: int) -> None:
        ids = shared[: choose.randrange(1, 130)] + prompt(n, choose.randrange(1, 60))
        for _ in range(2):
            response = await engine.agenerate(request(ids, choose.randrange(1, 12)))
            assert_fresh(model, response)
            ids = [*ids, *response.output_tokens, *prompt(n + 50, choose.randrange(0, 9))]

    await asyncio.gather(*(converse(n) for n in range(20)))
    assert engine.counters.reused_tokens > engine.counters.prefill_tokens
    await engine.close()


async def test_a_prompt_longer_than_one_prefill_pass(
    model: LlamaForCausalLM, assert_fresh: Check
) -> None:
    model.config.max_position_embeddings = 4096
    engine = LocalEngine(model, max_seq_len=4096)
    assert_fresh(model, await engine.agenerate(request(prompt(0, 2300), 2)))
    await engine.close()


def test_similar_rows() -> None:
    assert _similar_rows({0: 100, 1: 10, 2: 11}) == [1, 2]
    assert _similar_rows({3: 5000}) == [3]
    assert _similar_rows({0: 500, 1: 500, 2: 500}) == [0, 1]  # 1500 would be above 1024
