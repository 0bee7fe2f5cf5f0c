"""Agents that need an address of their own: served while their episode runs."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import openai
import pytest

from agent_rl.config import RolloutConfig
from agent_rl.engine.base import WeightUpdate
from agent_rl.engine.scripted import ScriptedEngine
from agent_rl.errors import WorkflowResolutionError
from agent_rl.rollout.agent import AgentSettings, AgentWorkflow
from agent_rl.rollout.executor import RolloutEngine


class Address:
    """Builds a client of its own from a bare address."""

    async def run(self, data: Any, base_url: str, api_key: str) -> float:
        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            messages: Any = [{"role": "user", "content": f"number {data['i']}"}]
            await client.chat.completions.create(model="m", messages=messages)
        assert base_url.startswith("http://127.0.0.1:")
        return float(data["i"])


def test_a_bare_address_is_served_by_a_gateway_of_our_own(tokenizer) -> None:
    """case B192: each episode has its own address and record; B134: nothing fails in a pause."""
    scripted = ScriptedEngine(["four", "five"], tokenizer=tokenizer, repeat=True)
    config = RolloutConfig(consumer_batch_size=4)
    with RolloutEngine(scripted, config, tokenizer=tokenizer) as rollout:
        groups = rollout.rollout_batch([{"i": i} for i in range(4)], Address)
        assert [float(group["rewards"][0]) for group in groups] == [0.0, 1.0, 2.0, 3.0]
        assert [group["rollout_group"].num_rows for group in groups] == [1] * 4
        assert len(scripted.requests) == 4
        rollout.submit({"i": 7}, Address)
        rollout.pause()
        rollout.update_weights(WeightUpdate(version=1))
        rollout.resume()
        assert rollout.wait(1, timeout=60)[0]["rewards"].tolist() == [7.0]


def test_cancelling_reaches_the_engine_behind_an_address(tokenizer) -> None:
    asked, ended = threading.Event(), threading.Event()

    class Slow(ScriptedEngine):
        async def agenerate(self, req: Any) -> Any:
            asked.set()
            try:
                return await super().agenerate(req)
            except asyncio.CancelledError:
                ended.set()
                raise

    engine = Slow(["x"], tokenizer=tokenizer, latency_s=600.0, repeat=True)
    rollout = RolloutEngine(engine, tokenizer=tokenizer)
    rollout.submit({"i": 0}, Address)
    assert asked.wait(60)
    rollout.close()
    assert ended.wait(60)


def test_only_a_rollout_engine_gives_addresses(tokenizer) -> None:
    with pytest.raises(WorkflowResolutionError, match="only a RolloutEngine can give"):
        AgentWorkflow(Address, settings=AgentSettings(tokenizer=tokenizer))
