"""Many episodes at once, and nothing left of them afterwards."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest
from transformers import AutoTokenizer

from agent_rl import small_model
from agent_rl.client.areal_openai import ArealOpenAI
from agent_rl.config import AgentConfig, RolloutConfig
from agent_rl.engine.scripted import ScriptedEngine
from agent_rl.record.interaction import InteractionWithTokenLogpReward
from agent_rl.rollout.executor import RolloutEngine


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


def collect(episodes: int, turns: int) -> list[Any]:
    tokenizer = AutoTokenizer.from_pretrained(small_model())
    engine = ScriptedEngine([[4, 5, 6, 2]], tokenizer=tokenizer, repeat=True)
    agent = AgentConfig(export_style="concat", chat_template_type="concat")
    config = RolloutConfig(max_concurrent_rollouts=episodes, agent=agent)
    with RolloutEngine(engine, config, tokenizer=tokenizer) as rollout:
        data = [{"i": i} for i in range(episodes)]
        kwargs = {"turns": turns, "at_once": asyncio.Barrier(episodes)}
        groups = rollout.rollout_batch(data, Chat, kwargs)
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


@pytest.mark.slow
def test_a_thousand_episodes_of_twenty_turns_at_once() -> None:
    """case B144"""
    check(1000, 20)
