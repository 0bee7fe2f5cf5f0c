"""Workflows without a model: rows by hand, and workflows that replay a list of returns."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from agent_rl.config import RolloutConfig
from agent_rl.engine.scripted import ScriptedEngine
from agent_rl.record.interaction import InteractionWithTokenLogpReward
from agent_rl.rollout.executor import RolloutEngine
from agent_rl.rollout.lane import Submission
from agent_rl.rollout.workflow import RolloutWorkflow
from agent_rl.types import ModelResponse


class Replay(RolloutWorkflow):
    """Each call gives the next return; exceptions are raised, functions of the datum called."""

    def __init__(self, returns: Iterable[Any]) -> None:
        self.returns = iter(returns)
        self.calls = 0

    async def arun_episode(self, engine: Any, data: Any) -> Any:
        self.calls += 1
        value = next(self.returns)
        await asyncio.sleep(0)
        if isinstance(value, BaseException):
            raise value
        return value(data) if callable(value) else value


def make_rows(*rewards: float, length: int = 3, **extra: Any) -> dict[str, Any]:
    """One row for each reward: ids 1, 2, 3, ..., the first token is the prompt."""
    count = len(rewards)
    mask = torch.ones(count, length, dtype=torch.int32)
    mask[:, 0] = 0
    return {
        "input_ids": torch.arange(1, length + 1, dtype=torch.int32).repeat(count, 1),
        "attention_mask": torch.ones(count, length, dtype=torch.bool),
        "loss_mask": mask,
        "logprobs": -0.5 * mask.float(),
        "versions": torch.where(mask.bool(), 0, -1).int(),
        "rewards": torch.tensor(rewards, dtype=torch.float32),
        **extra,
    }


def make_interaction(
    name: str, reward: float | None, **fields: Any
) -> InteractionWithTokenLogpReward:
    response = ModelResponse(
        input_tokens=(1, 2),
        output_tokens=(3,),
        output_logprobs=(-0.5,),
        output_versions=(0,),
        stop_reason="stop",
    )
    return InteractionWithTokenLogpReward(
        interaction_id=name, model_response=response, reward=reward, **fields
    )


@pytest.fixture
def replay() -> type[Replay]:
    return Replay


@pytest.fixture
def rows() -> Callable[..., dict[str, Any]]:
    return make_rows


@pytest.fixture
def interaction() -> Callable[..., InteractionWithTokenLogpReward]:
    return make_interaction


@pytest.fixture
def submission() -> Callable[[int], Submission]:
    def make(number: int) -> Submission:
        return Submission(
            number=number,
            task_id=str(number),
            data={"i": number},
            workflow=Replay([]),
            should_accept=None,
            is_eval=False,
        )

    return make


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine([[7]], repeat=True)


@pytest.fixture
def open_rollout() -> Iterator[Callable[..., RolloutEngine]]:
    """``RolloutEngine(...)``, closed at the end of the test."""
    with ExitStack() as opened:
        yield lambda *args, **keys: opened.enter_context(RolloutEngine(*args, **keys))


@pytest.fixture
def make(open_rollout, engine):
    """RolloutEngine with these keys of ``rollout``; closed at the end."""

    def build(engine=engine, *, min_usable_group_size=1, **keys) -> RolloutEngine:
        config = RolloutConfig(**keys)
        return open_rollout(engine, config, min_usable_group_size=min_usable_group_size)

    return build
