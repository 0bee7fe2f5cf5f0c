"""Many episodes at once, and nothing left of them afterwards."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from agent_rl import small_model
from agent_rl.client.areal_openai import ArealOpenAI
from agent_rl.config import AgentConfig, RolloutConfig
from agent_rl.engine.scripted import ScriptedEngine
from agent_rl.record.interaction import InteractionWithTokenLogpReward
from agent_rl.rollout.executor import RolloutEngine
from agent_rl.rollout.lane import Finished, Lane, Submission
from agent_rl.rollout.workflow import RolloutWorkflow


class Chat:
    """``turns`` calls with the whole history, once all agents are there."""

    def __init__(self, turns: int, at_once: asyncio.Barrier) -> None:
        self.turns = turns
        self.at_once = at_once

    async def run(self, data: Any, client: ArealOpenAI) -> float:
        messages: list[Any] = [{"role": "user", "content": f"question {data['i']}"}]
        await self.at_once.wait()
        for _ in range(self.turns):
            answer = await client.chat.completions.create(model="default", messages=messages)
            messages.append({"role": "assistant", "content": answer.choices[0].message.content})
            messages.append({"role": "user", "content": "more"})
        return 1.0


def collect(episodes: int, turns: int, agent_class: type[Chat] = Chat) -> list[Any]:
    tokenizer = AutoTokenizer.from_pretrained(small_model())
    engine = ScriptedEngine([[4, 5, 6, 2]], tokenizer=tokenizer, repeat=True)
    agent = AgentConfig(export_style="concat", chat_template_type="concat")
    config = RolloutConfig(max_concurrent_rollouts=episodes, agent=agent)
    with RolloutEngine(engine, config, tokenizer=tokenizer) as rollout:
        data = [{"i": i} for i in range(episodes)]
        kwargs = {"turns": turns, "at_once": asyncio.Barrier(episodes)}
        groups = rollout.rollout_batch(data, agent_class, kwargs)
        assert len(engine.requests) == episodes * turns
        engine.requests.clear()
    return groups


def num_interactions() -> int:
    gc.collect()
    return sum(type(found) is InteractionWithTokenLogpReward for found in gc.get_objects())


def check(episodes: int, turns: int) -> None:
    before = num_interactions()
    groups = collect(episodes, turns)
    assert all(group is not None for group in groups)
    for group in groups:
        assert int(group["loss_mask"].sum()) == 4 * turns
    assert num_interactions() == before, "the rows are tensors; nothing else is kept"


def test_twenty_episodes_of_three_turns_leave_nothing_behind() -> None:
    """case B144"""
    check(20, 3)


class Rows(RolloutWorkflow):
    async def arun_episode(self, engine: Any, data: Any) -> Any:
        ids = torch.tensor([[1, 2]])
        return {"input_ids": ids, "attention_mask": ids > 0, "loss_mask": ids - 1}


def test_batches_leave_nothing_in_the_collector() -> None:
    """case B144: whatever was submitted, ran and was handed over is forgotten."""

    def num_kept() -> int:
        gc.collect()
        return sum(type(found) in (Submission, Finished, Lane) for found in gc.get_objects())

    with RolloutEngine(ScriptedEngine([])) as rollout:
        before = num_kept()
        for _ in range(3):
            assert None not in rollout.rollout_batch([{"i": i} for i in range(20)], Rows())
            rollout.submit({}, Rows())
            rollout.wait(1, timeout=30)
        assert num_kept() == before


class Measured(Chat):
    """Notes how much is allocated when the last of its calls is answered."""

    peaks: list[int]

    async def run(self, data: Any, client: ArealOpenAI) -> float:
        reward = await super().run(data, client)
        await self.at_once.wait()
        if data["i"] == 0:
            self.peaks.append(tracemalloc.get_traced_memory()[0])
        await self.at_once.wait()
        return reward


def peak_and_rest(episodes: int, turns: int) -> tuple[int, int]:
    """Bytes held while all episodes are at their end, and what is left of them afterwards."""
    gc.collect()
    tracemalloc.start()
    try:
        Measured.peaks = []
        groups = collect(episodes, turns, Measured)
        assert all(group is not None for group in groups)
        del groups
        gc.collect()
        return Measured.peaks[0], tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


def check_memory(episodes: int, turns: int) -> None:
    """Twice the turns hold at most about twice the memory, and nearly nothing of it stays."""
    collect(2, 1)  # what is made once and kept: imports, the tokenizer's format
    half, _ = peak_and_rest(episodes, turns)
    whole, rest = peak_and_rest(episodes, 2 * turns)
    assert whole < 2.5 * half, f"{half} bytes for {turns} turns, {whole} for {2 * turns}"
    assert rest < 0.1 * whole, f"{rest} of {whole} bytes stay"


def test_memory_is_linear_in_tokens_and_goes_back_to_the_baseline() -> None:
    """case B144"""
    check_memory(16, 4)


@pytest.mark.slow
def test_memory_of_many_long_episodes_is_linear_and_goes_back() -> None:
    """case B144"""
    check_memory(250, 10)


@pytest.mark.slow
def test_a_thousand_episodes_of_twenty_turns_at_once() -> None:
    """case B144"""
    check(1000, 20)
