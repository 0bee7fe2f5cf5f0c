"""A workflow that gives back its datum's number, and data with numbers."""

from __future__ import annotations

import asyncio

from agent_rl.rollout.workflow import RolloutWorkflow


class Echo(RolloutWorkflow):
    """Rows whose reward is the datum's number and whose versions are the engine's."""

    def __init__(self, rows) -> None:
        self.rows = rows
        self.starts: list[tuple[int, int]] = []

    async def arun_episode(self, engine, data):
        version = engine.get_version()
        self.starts.append((data["i"], version))
        await asyncio.sleep(0)
        rows = self.rows(float(data["i"]))
        rows["versions"][rows["loss_mask"].bool()] = version
        return rows


def numbers(groups) -> list[int]:
    return [int(group["rewards"][0]) for group in groups]


def data(count: int) -> list[dict[str, int]]:
    return [{"i": i} for i in range(count)]
