"""What a workflow may return, what becomes of everything else, and the deadline."""

from __future__ import annotations

import asyncio
import math

import numpy as np
import pytest
import torch

from agent_rl import workflow_context
from agent_rl.errors import (
    EngineError,
    EpisodeError,
    EpisodeTimeoutError,
    RequestError,
    RewardError,
    WorkflowContractError,
)
from agent_rl.rollout.clock import place_in
from agent_rl.rollout.episode import EpisodeRules, as_episode, failure_kind, run_episode
from agent_rl.rollout.workflow import RolloutWorkflow
from agent_rl.workflow_context import WorkflowContext


def test_none_and_an_empty_dict_are_unusable() -> None:
    assert as_episode(None) is None
    assert as_episode({}) is None


def test_rows_get_the_types_of_the_contract(rows) -> None:
    returned = rows(1.0, 2.0, rollout_reward=2)
    returned["input_ids"] = returned["input_ids"].long()
    returned["rewards"] = returned["rewards"].double()
    episode = as_episode(returned)
    assert episode.num_rows == 2 and episode.reference == 2.0
    assert episode.value["input_ids"].dtype == torch.int32
    assert episode.value["rewards"].dtype == torch.float32
    assert "rollout_reward" not in episode.value
    assert returned["rollout_reward"] == 2, "the returned dict itself is not changed"


def test_interactions_count_as_rows(interaction) -> None:
    found = {"a": interaction("a", 0.0), "b": interaction("b", 1.0, rollout_reward=1.0)}
    episode = as_episode(found)
    assert (episode.num_rows, episode.reference) == (2, 1.0)
    assert episode.interactions == found


def test_images_are_not_trained_on_without_their_pixels(interaction) -> None:
    """Case B186: placeholders in a row without the images that belong to them."""
    image = {"type": "image_url", "image_url": {"url": "https://a/b.png"}}
    messages = [{"role": "tool", "content": [{"type": "text", "text": "a"}, image]}]
    found = {"a": interaction("a", 0.0), "b": interaction("b", 1.0, messages=messages)}
    with pytest.raises(EpisodeError, match="interaction b holds images"):
        as_episode(found)
    workflow_context.set(WorkflowContext(is_eval=True))
    assert as_episode(found).num_rows == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input_ids": None}, "input_ids must be a tensor"),
        ({"input_ids": torch.ones(3)}, r"input_ids must be a tensor .* shape \[3\]"),
        ({"input_ids": torch.ones(1, 0)}, "input_ids must be"),
        ({"attention_mask": torch.ones(1, 4)}, r"attention_mask .*\[1, 3\], got shape \[1, 4\]"),
        ({"logprobs": torch.ones(1, 2)}, r"logprobs .*\[1, 3\], got shape \[1, 2\]"),
        ({"rewards": torch.ones(1, 1)}, r"rewards .*\[1\], got shape \[1, 1\]"),
        ({"loss_mask": [[0, 1, 1]]}, "loss_mask .* got list"),
        ({"logprobs": torch.tensor([[0.0, -0.5, math.nan]])}, r"finite, got \[-0.5, nan\]"),
        ({"logprobs": torch.tensor([[0.0, -math.inf, -0.5]])}, r"finite, got \[-inf, -0.5\]"),
    ],
)
def test_malformed_rows_are_an_error_of_the_agent(rows, change, message) -> None:
    with pytest.raises(EpisodeError, match=message):
        as_episode({**rows(1.0), **change})


def test_log_probs_off_the_mask_may_be_anything(rows) -> None:
    """Case B60."""
    episode = as_episode({**rows(1.0), "logprobs": torch.tensor([[math.nan, -0.5, -0.5]])})
    assert episode.num_rows == 1


def test_missing_keys_are_named(rows) -> None:
    returned = rows(1.0)
    del returned["attention_mask"]
    with pytest.raises(EpisodeError, match="attention_mask"):
        as_episode(returned)


@pytest.mark.parametrize("returned", [1.0, "text", [1, 2], (1.0,), True])
def test_other_types_are_refused(returned) -> None:
    with pytest.raises(EpisodeError, match="must return a dict of tensors"):
        as_episode(returned)


def test_mixed_dicts_are_refused(rows, interaction) -> None:
    with pytest.raises(EpisodeError, match="interactions and other values"):
        as_episode({"a": interaction("a", 1.0), **rows(1.0)})


@pytest.mark.parametrize("reward", [math.nan, math.inf])
def test_rewards_that_are_not_finite(rows, interaction, reward) -> None:
    """case B96: the episode is refused, so that it cannot poison its group."""
    with pytest.raises(RewardError):
        as_episode(rows(1.0, reward))
    with pytest.raises(RewardError):
        as_episode({"a": interaction("a", reward)})


@pytest.mark.parametrize("reference", [2, 2.0, np.float32(2.0), torch.tensor(2.0)])
def test_references_of_all_number_types(rows, reference) -> None:
    assert as_episode(rows(1.0, 2.0, rollout_reward=reference)).reference == 2.0


@pytest.mark.parametrize(
    "reference", [math.nan, math.inf, True, "1.0", torch.tensor([1.0, 2.0]), [1.0]]
)
def test_references_that_are_not_one_finite_number(rows, reference) -> None:
    with pytest.raises(WorkflowContractError, match="one finite number"):
        as_episode(rows(1.0, 2.0, rollout_reward=reference))


def test_references_must_agree(interaction) -> None:
    found = {
        "a": interaction("a", 1.0, rollout_reward=1.0),
        "b": interaction("b", 1.0, rollout_reward=2.0),
    }
    with pytest.raises(WorkflowContractError, match="several rollout_reward"):
        as_episode(found)


def test_failure_kinds() -> None:
    assert failure_kind(EpisodeError("x")) == "agent"
    assert failure_kind(RewardError("x")) == "reward"
    assert failure_kind(EpisodeTimeoutError("x")) == "timeout"
    assert failure_kind(EngineError("x")) == "engine"
    assert failure_kind(RequestError("x")) == "client"


class Odd(BaseException):
    """What no `except Exception` sees."""


@pytest.mark.parametrize(
    "error",
    [
        ValueError("x"),
        MemoryError(),
        SystemExit(1),
        TimeoutError(),
        ExceptionGroup("several", [ConnectionError()]),
        BaseExceptionGroup("several", [Odd()]),
        Odd("x"),
        StopAsyncIteration(),
    ],
)
async def test_whatever_an_agent_raises_is_typed(replay, engine, error) -> None:
    """cases B131, B195"""
    named = error.exceptions[0] if isinstance(error, ExceptionGroup) else error  # that of one
    with pytest.raises(EpisodeError, match=f"agent raised {type(named).__name__}") as caught:
        await run_episode(replay([error]), engine, {}, EpisodeRules())
    assert caught.value.__cause__ is error


async def test_cancelling_oneself_is_a_failure(replay, engine) -> None:
    with pytest.raises(EpisodeError, match="cancelled from inside"):
        await run_episode(replay([asyncio.CancelledError()]), engine, {}, EpisodeRules())


async def test_our_own_errors_pass_unchanged(replay, engine) -> None:
    error = EngineError("the engine is closed")
    with pytest.raises(EngineError) as caught:
        await run_episode(replay([error]), engine, {}, EpisodeRules())
    assert caught.value is error


class Waits(RolloutWorkflow):
    def __init__(self, *, stubborn: bool = False) -> None:
        self.events: list[str] = []
        self.stubborn = stubborn
        self.started = asyncio.Event()
        self.let_go = asyncio.Event()
        self.came_back = asyncio.Event()

    async def arun_episode(self, engine, data):
        self.started.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.events.append("cancelled")
            if not self.stubborn:
                raise
        await self.let_go.wait()
        self.events.append("came back late")
        self.came_back.set()


async def test_deadline_cancels_the_workflow(engine) -> None:
    workflow = Waits()
    with pytest.raises(EpisodeTimeoutError, match=r"episode_timeout_s=0\.01"):
        await run_episode(workflow, engine, {}, EpisodeRules(timeout_s=0.01))
    assert workflow.events == ["cancelled"]


async def test_the_deadline_begins_with_a_place_to_run(engine, rows) -> None:
    """Also for what waits behind more others than there are processes."""
    now, room, waits = 0.0, asyncio.Semaphore(0), asyncio.Event()

    class Waiting(RolloutWorkflow):
        async def arun_episode(self, engine, data):
            waits.set()
            async with place_in(room):
                return rows(1.0)

    rules = EpisodeRules(timeout_s=0.02, clock=lambda: now)
    episode = asyncio.create_task(run_episode(Waiting(), engine, {}, rules))
    await waits.wait()
    now = 600.0
    await asyncio.sleep(0.1)  # the deadline looks at the clock again, some times
    room.release()
    assert (await episode).num_rows == 1


async def test_a_workflow_that_ignores_cancellation_is_left_behind(engine, monkeypatch) -> None:
    """case B139: what comes back late is nobody's result."""
    monkeypatch.setattr("agent_rl.rollout.episode._CANCEL_GRACE_S", 0.01)
    workflow = Waits(stubborn=True)
    with pytest.raises(EpisodeTimeoutError):
        await run_episode(workflow, engine, {}, EpisodeRules(timeout_s=0.01))
    workflow.let_go.set()
    await workflow.came_back.wait()
    assert workflow.events == ["cancelled", "came back late"]


async def test_cancelling_the_episode_reaches_the_workflow(engine) -> None:
    workflow = Waits()
    task = asyncio.create_task(run_episode(workflow, engine, {}, EpisodeRules()))
    await workflow.started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert workflow.events == ["cancelled"]
