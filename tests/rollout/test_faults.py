"""Fault injection: agents that raise, hang and cancel, an engine that fails, weight updates.

Everything is seeded and counted; nothing here looks at a clock.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import Any

import pytest

from agent_rl.config import RolloutConfig
from agent_rl.engine.base import WeightUpdate
from agent_rl.engine.scripted import ScriptedEngine
from agent_rl.errors import EngineError
from agent_rl.rollout.dataloader import DataLoader
from agent_rl.rollout.executor import RolloutEngine
from agent_rl.rollout.workflow import RolloutWorkflow
from agent_rl.types import ModelRequest

GROUP_SIZE, BATCH_SIZE, NUM_STEPS = 4, 8, 25
FAULTS = ["raise"] * 10 + ["hang"] * 5 + ["engine"] * 5 + ["cancel"] * 2 + ["none"] * 2
KINDS = {"agent": ("raise", "cancel"), "engine": ("engine",), "timeout": ("hang",)}


class Faulty(RolloutWorkflow):
    """Two turns; the row's ids say which episode sampled them: unique over the whole run.

    ``ended`` counts how episodes ended. Whatever runs into the deadline is "hang", so that a slow
    machine cannot make the counts wrong.
    """

    def __init__(self, rows: Any, seed: int) -> None:
        self.rows = rows
        self.random = random.Random(seed)
        self.ended: Counter[str] = Counter()
        self.sampled: set[int] = set()
        self.num_episodes = 0

    async def arun_episode(self, engine: Any, data: Any) -> Any:
        self.num_episodes += 1
        draw = self.random.randrange(100)
        fault = FAULTS[draw] if draw < len(FAULTS) else "ok"
        try:
            return await self.run(engine, data, self.num_episodes, fault)
        except asyncio.CancelledError:
            fault = fault if fault == "cancel" else "hang"
            raise
        finally:
            self.ended[fault] += 1

    async def run(self, engine: Any, data: Any, token: int, fault: str) -> Any:
        if fault == "none":
            return None
        versions = []
        for turn in range(2):
            request = ModelRequest(rid=f"{token}/{turn}", input_ids=[token], metadata={fault: True})
            versions += (await engine.agenerate(request)).output_versions
            await asyncio.sleep(0)
        if fault == "raise":
            raise ConnectionError("the tool server refused")
        if fault == "hang":
            await asyncio.Event().wait()
        if fault == "cancel":
            raise asyncio.CancelledError
        self.sampled.add(token)
        rows = self.rows(float(data["i"]), length=3)
        rows["input_ids"][0, 1:] = token
        rows["versions"][0, 1:] = rows["versions"].new_tensor(versions)
        return rows


def reply(request: ModelRequest) -> Any:
    return EngineError("500") if "engine" in request.metadata else [7]


@pytest.mark.parametrize("seed", [1, 2])
def test_batches_fill_and_counts_add_up(rows, seed) -> None:
    """cases B82, B131, B134, B195"""
    config = RolloutConfig(
        consumer_batch_size=BATCH_SIZE,
        max_concurrent_rollouts=16,
        max_head_offpolicyness=2,
        episode_timeout_s=0.3,
    )
    engine = ScriptedEngine([reply], repeat=True)
    workflow, loader = Faulty(rows, seed), DataLoader([{"i": i} for i in range(50)], BATCH_SIZE)
    collected = []
    with RolloutEngine(engine, config, min_usable_group_size=3) as rollout:
        for step in range(NUM_STEPS):
            groups = rollout.prepare_batch(loader, workflow, group_size=GROUP_SIZE)
            assert len(groups) == BATCH_SIZE
            collected += groups
            rollout.pause()
            rollout.update_weights(WeightUpdate(version=step + 1))
            rollout.resume()
            counts = rollout.counts()
            ended = counts.accepted + counts.rejected + counts.failed
            assert counts.submitted == ended + counts.waiting + counts.running
        stats = rollout.export_stats()
    assert rollout.counts().running == 0

    tokens = [int(ids[1]) for group in collected for ids in group["input_ids"]]
    assert len(tokens) == len(set(tokens)), "no sampled token is trained twice"
    assert set(tokens) <= workflow.sampled
    assert all(3 <= group["rollout_group"].num_rollouts <= 4 for group in collected)
    for group in collected:
        versions = group["versions"][:, 1:]
        assert bool((versions[:, 1:] >= versions[:, :-1]).all()), "versions never go back"
        assert len(set(group["rewards"].tolist())) == 1, "no group mixes data"
    num_counted = stats["rollout/failed/agent__count"]
    for kind, faults in KINDS.items():
        num_failed = round(stats[f"rollout/failed/{kind}"] * num_counted)
        assert 0 < num_failed <= sum(workflow.ended[fault] for fault in faults)


def test_every_fault_is_counted_once(rows) -> None:
    """One-shot: nothing is left running, so the counts are exact."""
    config = RolloutConfig(max_concurrent_rollouts=64, episode_timeout_s=0.3)
    workflow, engine = Faulty(rows, seed=3), ScriptedEngine([reply], repeat=True)
    with RolloutEngine(engine, config) as rollout:
        groups = rollout.rollout_batch([{"i": i} for i in range(400)], workflow)
        counts, stats = rollout.counts(), rollout.export_stats()
    ended = workflow.ended
    assert sum(ended.values()) == counts.submitted == 400
    assert counts.accepted == ended["ok"] == sum(group is not None for group in groups)
    assert counts.rejected == ended["none"]
    assert counts.failed == 400 - ended["ok"] - ended["none"]
    for kind, faults in KINDS.items():
        expected = sum(ended[fault] for fault in faults)
        assert round(stats[f"rollout/failed/{kind}"] * 400) == expected > 0
    tokens = {int(group["input_ids"][0, 1]) for group in groups if group is not None}
    assert tokens == workflow.sampled, "no finished episode is lost"


def test_a_failing_evaluation_goes_on(rows) -> None:
    """case B195: the evaluation path has the same handler."""
    workflow, engine = Faulty(rows, seed=4), ScriptedEngine([reply], repeat=True)
    with RolloutEngine(engine, RolloutConfig(episode_timeout_s=0.3)) as rollout:
        groups = rollout.rollout_batch([{"i": i} for i in range(40)], workflow, is_eval=True)
        counts = rollout.counts(is_eval=True)
    assert counts.submitted == 40 and counts.accepted == workflow.ended["ok"]
    assert sum(group is None for group in groups) == 40 - counts.accepted
