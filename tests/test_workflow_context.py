from __future__ import annotations

import asyncio

from agent_rl import workflow_context
from agent_rl.workflow_context import WorkflowContext


def test_the_default_is_training_without_a_task() -> None:
    assert workflow_context.get() == WorkflowContext(is_eval=False, task_id=None)
    assert workflow_context.stat_scope() == "rollout"


async def test_an_episode_draws_its_own_numbers_whatever_runs_beside_it() -> None:
    async def episode(slot: int, pauses: int) -> list[float]:
        workflow_context.set(WorkflowContext(seed="1/7"))
        workflow_context.enter_slot(slot)
        numbers = []
        for _ in range(3):
            numbers.append(workflow_context.draw())
            for _ in range(pauses):
                await asyncio.sleep(0)
        return numbers

    first = await asyncio.gather(episode(0, 1), episode(1, 2))
    second = await asyncio.gather(episode(1, 0), episode(0, 5))
    assert first[0] == second[1] != first[1] == second[0]


async def test_concurrent_episodes_never_see_one_another() -> None:
    async def episode(task_id: str, is_eval: bool) -> tuple[str | None, str]:
        workflow_context.set(WorkflowContext(is_eval=is_eval, task_id=task_id))
        await asyncio.sleep(0)
        return workflow_context.get().task_id, workflow_context.stat_scope()

    results = await asyncio.gather(*(episode(str(i), i % 2 == 1) for i in range(4)))
    assert results == [
        ("0", "rollout"),
        ("1", "eval-rollout"),
        ("2", "rollout"),
        ("3", "eval-rollout"),
    ]
