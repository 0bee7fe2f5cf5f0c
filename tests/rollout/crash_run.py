"""A run that kills itself with SIGKILL at its n-th event, to be started again until it is done.

Events are the writes, flushes and renames of the whole process (a killed write leaves a part of its
bytes) and the borders between the steps of the loop. The "trainer" learns nothing: it notes what it
was handed, and saves that with the state of rollout and dataloader every second step.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from pathlib import Path
from typing import Any

import torch

from agent_rl.config import RolloutConfig
from agent_rl.engine.scripted import ScriptedEngine
from agent_rl.rollout.dataloader import DataLoader
from agent_rl.rollout.executor import RolloutEngine
from agent_rl.rollout.workflow import RolloutWorkflow

NUM_DATA, BATCH_SIZE, GROUP_SIZE = 400, 4, 2
STALENESS = 1


def new_loader() -> DataLoader:
    return DataLoader([{"i": i} for i in range(NUM_DATA)], BATCH_SIZE, seed=7)


class Killer:
    """Counts events; the one with number ``kill_at`` is the last. 0: none is."""

    def __init__(self, kill_at: int, seed: int) -> None:
        self.left = kill_at
        self.random = random.Random(seed)
        self.write, self.fsync, self.replace = os.write, os.fsync, os.replace

    def install(self) -> None:
        os.write = self.torn_write  # type: ignore[assignment]
        os.fsync = lambda file: (self.event(), self.fsync(file))[1]  # type: ignore[assignment]
        os.replace = lambda old, new: (self.event(), self.replace(old, new))[1]  # type: ignore[assignment]

    def event(self) -> None:
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def torn_write(self, file: int, data: Any) -> int:
        if self.left == 1:
            self.write(file, data[: self.random.randrange(len(data) + 1)])
        self.event()
        return self.write(file, data)


class Logged(RolloutWorkflow):
    """Notes which data it starts; every tenth goes on until the weights are two versions newer.

    Not for ever: where several of them hold all the room, no version comes before one has ended.
    """

    def __init__(self, log: Path) -> None:
        self.log = log

    async def arun_episode(self, engine: Any, data: Any) -> Any:
        with self.log.open("a", encoding="ascii") as file:
            file.write(f"{data['i']}\n")
        version = engine.get_version()
        for _ in range(300 if data["i"] % 10 == 3 else 0):
            if engine.get_version() >= version + 2:
                break
            await asyncio.sleep(0.001)
        return {
            "input_ids": torch.tensor([[1, data["i"]]]),
            "attention_mask": torch.ones(1, 2, dtype=torch.bool),
            "loss_mask": torch.tensor([[0, 1]]),
            "logprobs": torch.tensor([[0.0, -1 / (1 + data["i"])]]),
            "versions": torch.tensor([[-1, version]]),
            "rewards": torch.tensor([float(data["i"])]),
        }


def start_state() -> dict[str, Any]:
    return {"step": 0, "trained": [], "dropped": 0, "rollout": None, "loader": None}


def read_state(folder: Path) -> dict[str, Any]:
    path = folder / "state.json"
    return json.loads(path.read_text()) if path.exists() else start_state()


def save_state(folder: Path, state: dict[str, Any]) -> None:
    new = folder / "state.new"
    with new.open("w", encoding="ascii") as file:
        file.write(json.dumps(state))
        file.flush()
        os.fsync(file.fileno())
    os.replace(new, folder / "state.json")


def run(folder: Path, num_steps: int, kill_at: int, seed: int) -> None:
    killer = Killer(kill_at, seed)
    killer.install()
    state, loader = read_state(folder), new_loader()
    engine = ScriptedEngine([], version=state["step"])
    config = RolloutConfig(
        journal=True,
        fileroot=str(folder),
        consumer_batch_size=BATCH_SIZE,
        max_concurrent_rollouts=6,
        max_head_offpolicyness=STALENESS,
    )
    with RolloutEngine(engine, config) as rollout:
        if state["rollout"] is not None:
            rollout.load_state_dict(state["rollout"])
            loader.load_state_dict(state["loader"])
        dropped_before = state["dropped"]
        workflow = Logged(folder / "started")
        for step in range(state["step"], num_steps):
            groups = rollout.prepare_batch(loader, workflow, group_size=GROUP_SIZE)
            killer.event()
            for group in groups:
                assert group["rollout_group"].num_rollouts == GROUP_SIZE
                state["trained"].append(int(group["rewards"][0]))
            killer.event()
            rollout.set_version(step + 1)
            killer.event()
            if step % 2 == 1 or step == num_steps - 1:
                state |= {
                    "step": step + 1,
                    "dropped": dropped_before + rollout.counts().dropped_stale,
                    "rollout": rollout.state_dict(),
                    "loader": loader.state_dict(),
                }
                save_state(folder, state)
                killer.event()
                rollout.mark_trained(step + 1)
                killer.event()
