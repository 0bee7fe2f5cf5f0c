"""How much of an engine's throughput collection uses, at several bounds of staleness.

    python benchmarks/collector.py            # about a minute, hardly any CPU

The engine is simulated: 32 slots, each with a fixed token rate, so its throughput is fixed. Agents
are long-tailed: the tokens of an episode are log-normal with p99 / p50 = 20. A training step takes
a fifth of the time in which the engine could make a batch. "achieved / ideal" is the tokens that
were generated over those of an engine whose slots are never empty; "staleness" is the trainer's
version minus the oldest version in a row, over all rows that were trained.

The last line is the time of 8 episodes whose tool sleeps 0.25 s: one after the other 2 s.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from agent_rl import ModelRequest, ModelResponse, RolloutEngine, RolloutWorkflow, ScriptedEngine
from agent_rl.config import RolloutConfig
from agent_rl.rollout.dataloader import DataLoader

SLOTS = 32
BATCH_SIZE = 64
MEDIAN_S = 0.05
TAIL = 20.0
TRAIN_FRACTION = 0.2
NUM_TOOLS, TOOL_S = 8, 0.25
# The 99 % quantile of the standard normal is 2.326: sigma makes p99 / p50 = exp(2.326 sigma) = 20.
SIGMA = math.log(TAIL) / 2.326
MEAN_S = MEDIAN_S * math.exp(SIGMA**2 / 2)
BATCH_S = BATCH_SIZE * MEAN_S / SLOTS


class SlotEngine(ScriptedEngine):
    """Each request holds one slot for the seconds named in its metadata."""

    def __init__(self) -> None:
        super().__init__([])
        self._slots = asyncio.Semaphore(SLOTS)
        self._running: dict[str, tuple[float, float]] = {}
        self._done_s = 0.0

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        work_s = req.metadata["work_s"]
        async with self._slots:
            self._running[req.rid] = (time.perf_counter(), work_s)
            version = self.get_version()
            await asyncio.sleep(work_s)
            del self._running[req.rid]
            self._done_s += work_s
        return ModelResponse(
            input_tokens=tuple(req.input_ids),
            output_tokens=(7,),
            output_logprobs=(-0.5,),
            output_versions=(version,),
            stop_reason="stop",
        )

    def work_s(self) -> float:
        """Slot seconds of work done so far, that of running requests included."""
        now = time.perf_counter()
        return self._done_s + sum(min(now - t, work) for t, work in self._running.values())


class LongTailed(RolloutWorkflow):
    async def arun_episode(self, engine: Any, data: Any) -> dict[str, torch.Tensor]:
        request = ModelRequest(rid=str(data["i"]), input_ids=[1], metadata=data)
        response = await engine.agenerate(request)
        return {
            "input_ids": torch.tensor([[1, 7]]),
            "attention_mask": torch.ones(1, 2, dtype=torch.bool),
            "loss_mask": torch.tensor([[0, 1]]),
            "versions": torch.tensor([[-1, *response.output_versions]]),
            "rewards": torch.ones(1),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    achieved: float
    batches_per_s: float
    staleness: list[int]


def measure(steps: int, seed: int, staleness: int | None) -> Result:
    """``staleness=None`` collects one batch at a time with ``rollout_batch``."""
    rng = random.Random(seed)
    data = [
        {"i": i, "work_s": MEDIAN_S * math.exp(SIGMA * rng.gauss(0.0, 1.0))}
        for i in range((steps + 8) * BATCH_SIZE)
    ]
    engine, loader = SlotEngine(), DataLoader(data, BATCH_SIZE, shuffle=False)
    config = RolloutConfig(
        consumer_batch_size=BATCH_SIZE,
        max_concurrent_rollouts=SLOTS,
        max_head_offpolicyness=staleness or 0,
    )
    ages = []
    with RolloutEngine(engine, config) as rollout:
        start_s = time.perf_counter()
        for version in range(steps):
            if staleness is None:
                groups = rollout.rollout_batch(loader.take(BATCH_SIZE), LongTailed, {})
            else:
                groups = rollout.prepare_batch(loader, LongTailed, {})
            ages += [version - int(group["versions"][0, 1]) for group in groups if group]
            time.sleep(TRAIN_FRACTION * BATCH_S)
            rollout.set_version(version + 1)
        wall_s = time.perf_counter() - start_s
        achieved = engine.work_s() / (SLOTS * wall_s)
    return Result(achieved=achieved, batches_per_s=steps / wall_s, staleness=ages)


class SlowTool(RolloutWorkflow):
    async def arun_episode(self, engine: Any, data: Any) -> dict[str, torch.Tensor]:
        await asyncio.sleep(TOOL_S)
        return {
            "input_ids": torch.tensor([[1, 7]]),
            "attention_mask": torch.ones(1, 2, dtype=torch.bool),
            "rewards": torch.ones(1),
        }


def measure_tools() -> float:
    """Seconds for ``NUM_TOOLS`` episodes at once, the best of three."""
    times = []
    with RolloutEngine(ScriptedEngine([]), RolloutConfig(consumer_batch_size=NUM_TOOLS)) as rollout:
        for _ in range(3):
            start_s = time.perf_counter()
            rollout.rollout_batch([{"i": i} for i in range(NUM_TOOLS)], SlowTool, {})
            times.append(time.perf_counter() - start_s)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    table = Table("collection", "achieved / ideal", "batches / s", "staleness mean", "max")
    for name, staleness in [
        ("synchronous", None),
        ("staleness 0", 0),
        ("staleness 1", 1),
        ("staleness 2", 2),
        ("staleness 4", 4),
    ]:
        is_synchronous = not staleness  # one straggler holds up everybody: a few steps will do
        steps = arguments.steps // 5 if is_synchronous else arguments.steps
        result = measure(steps, arguments.seed, staleness)
        table.add_row(
            name,
            f"{result.achieved:.3f}",
            f"{result.batches_per_s:.2f}",
            f"{statistics.mean(result.staleness):.2f}",
            f"{max(result.staleness)}",
        )
    console = Console()
    console.print(f"{SLOTS} slots, batches of {BATCH_SIZE}, ideal {1 / BATCH_S:.2f} batches / s")
    console.print(table)
    console.print(f"{NUM_TOOLS} episodes, each with a tool of {TOOL_S} s: {measure_tools():.3f} s")


if __name__ == "__main__":
    main()
