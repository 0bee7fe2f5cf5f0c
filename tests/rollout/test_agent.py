"""Agents as workflows: arguments, rewards, isolation and failures, over the scripted engine."""

from __future__ import annotations

import asyncio
import gc
import math
import signal
from decimal import Decimal
from typing import Any

import numpy as np
import openai
import pytest
import torch

from agent_rl.client.areal_openai import ArealOpenAI
from agent_rl.config import AgentConfig, RolloutConfig
from agent_rl.engine.scripted import ScriptedEngine
from agent_rl.errors import (
    EngineError,
    EpisodeError,
    EpisodeRejectedError,
    RewardError,
    WorkflowResolutionError,
)
from agent_rl.rollout.agent import AgentSettings, AgentWorkflow
from agent_rl.rollout.executor import RolloutEngine
from agent_rl.types import GenerationConfig


@pytest.fixture
def scripted(tokenizer) -> ScriptedEngine:
    return ScriptedEngine(["four", "five"], tokenizer=tokenizer, repeat=True)


async def ask(client: Any, text: str = "hi") -> Any:
    messages = [{"role": "user", "content": text}]
    return await client.chat.completions.create(model="default", messages=messages)


class Returns:
    """Two separate calls, then what the test says."""

    def __init__(self, value: Any) -> None:
        self.value = value

    async def run(self, data: Any, client: ArealOpenAI) -> Any:
        first, second = await ask(client, "one"), await ask(client, "two")
        value = self.value
        return value(client, first.id, second.id) if callable(value) else value


@pytest.fixture
def episode(tokenizer, scripted):
    """Run an agent once; the exported interactions."""

    async def run(agent: Any, engine: Any = scripted, **config: Any) -> Any:
        settings = AgentSettings(tokenizer=tokenizer, config=AgentConfig(**config))
        return await AgentWorkflow(agent, settings=settings).arun_episode(engine, {})

    return run


def rewards(exported: Any) -> list[float | None]:
    return [interaction.reward for interaction in exported.values()]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1, 1.0),
        (0.5, 0.5),
        (0, 0.0),
        (True, 1.0),
        (Decimal("0.5"), 0.5),
        (np.float32(0.5), 0.5),
        (np.int64(2), 2.0),
        (np.bool_(True), 1.0),
        (torch.tensor(0.5), 0.5),
    ],
)
async def test_a_number_is_the_reward_of_the_last_interaction(episode, value, expected) -> None:
    """case B86"""
    exported = await episode(Returns(value), turn_discount=0.0)
    assert rewards(exported) == [0.0, expected]
    assert [i.rollout_reward for i in exported.values()] == [expected, expected]


@pytest.mark.parametrize(
    "value", ["0.5", (0.5,), [0.5], math.nan, math.inf, np.array([1.0, 2.0]), object()]
)
async def test_other_returns_are_reward_errors(episode, value) -> None:
    """case B86"""
    with pytest.raises(RewardError, match="return a number or a dict"):
        await episode(Returns(lambda *_: value))


async def test_rewards_by_id(episode) -> None:
    """cases B80, B91: each id its own, carried back with the discount."""
    exported = await episode(
        Returns(lambda client, first, second: {first: 0.5, second: np.float64(1.0)}),
        turn_discount=0.5,
    )
    assert rewards(exported) == [1.0, 1.0]
    exported = await episode(Returns(lambda client, first, second: {first: 0.5, second: 1}))
    assert rewards(exported) == [1.5, 1.0]


async def test_unknown_id_is_named(episode) -> None:
    """cases B86, B91"""
    with pytest.raises(RewardError, match="'chatcmpl-none'"):
        await episode(Returns({"chatcmpl-none": 1.0}))
    with pytest.raises(RewardError, match="must be one finite number"):
        await episode(Returns(lambda client, first, second: {first: "good"}))
    with pytest.raises(
        RewardError, match=r"'format'; .* of the parts of one reward return the sum"
    ):
        await episode(Returns({"format": 1.0, "correct": 0.0}))


async def test_rewards_set_through_the_client(episode) -> None:
    """case B91: None keeps them; a returned number replaces the last one only."""

    def set_both(client: Any, first: str, second: str) -> None:
        client.set_reward(first, 0.25)
        client.set_last_reward(0.75)

    exported = await episode(Returns(set_both), turn_discount=0.0)
    assert rewards(exported) == [0.25, 0.75]

    def set_and_return(client: Any, first: str, second: str) -> float:
        set_both(client, first, second)
        return 2.0

    exported = await episode(Returns(set_and_return), turn_discount=0.0)
    assert rewards(exported) == [0.25, 2.0]


async def test_no_reward_is_a_rejection(episode) -> None:
    for value in (None, {}):
        with pytest.raises(EpisodeRejectedError, match="returned no reward") as caught:
            await episode(Returns(value))
        assert caught.value.reason == "no_reward"


async def test_no_model_call_is_a_rejection(episode, tokenizer) -> None:
    """case B191: another client, or every call refused; the message names the likely cause."""

    class Elsewhere:
        async def run(self, data: Any) -> float:
            return 1.0

    class Refused:
        async def run(self, data: Any, client: ArealOpenAI) -> float:
            with pytest.raises(openai.BadRequestError):
                await client.chat.completions.create(model="default", messages=[])
            return 1.0

    for agent in (Elsewhere(), Refused()):
        with pytest.raises(EpisodeRejectedError, match="used another client") as caught:
            await episode(agent)
        assert caught.value.reason == "no_model_call"


async def test_a_forgotten_await_is_named(episode) -> None:
    """Returned, or used in place of the completion; warnings are errors here."""

    class Returned:
        async def run(self, data: Any, client: ArealOpenAI) -> Any:
            return client.chat.completions.create(model="m", messages=[])

    class Used:
        async def run(self, data: Any, client: ArealOpenAI) -> Any:
            return client.chat.completions.create(model="m", messages=[]).choices[0]

    with pytest.raises(RewardError, match=r"Returned.run returned a coroutine .*forgot `await`"):
        await episode(Returned())
    with pytest.raises(EpisodeError, match=r"has no attribute 'choices'; forgot `await`\?") as used:
        await episode(Used())
    assert used.value.place.endswith("messages=[]).choices[0]")
    used.value.__cause__ = None
    gc.collect()


async def test_explicit_reference_is_kept(episode) -> None:
    def give(client: Any, first: str, second: str) -> float:
        client.get_interaction(first).rollout_reward = 7.0
        return 1.0

    exported = await episode(Returns(give))
    assert [i.rollout_reward for i in exported.values()] == [7.0, None]


async def test_concat_exports_leaves(episode) -> None:
    class Chat:
        async def run(self, data: Any, client: ArealOpenAI) -> float:
            messages: list[Any] = [{"role": "user", "content": "one"}]
            answer = await client.chat.completions.create(model="default", messages=messages)
            messages.append(answer.choices[0].message.model_dump(exclude_none=True))
            messages.append({"role": "user", "content": "two"})
            await client.chat.completions.create(model="default", messages=messages)
            return 1.0

    exported = await episode(Chat(), export_style="concat", chat_template_type="concat")
    [row] = [interaction.to_tensor_dict() for interaction in exported.values()]
    runs = "".join(map(str, row["loss_mask"][0].tolist())).strip("0").split("0")
    assert len([run for run in runs if run]) == 2, "both answers train in one row"


async def test_arguments_are_passed_by_name(episode, scripted) -> None:
    seen: dict[str, Any] = {}

    class All:
        async def run(self, data: Any, session: Any, **kwargs: Any) -> None:
            seen.update(kwargs, session=session)
            client = openai.AsyncOpenAI(
                base_url=kwargs["base_url"],
                api_key=kwargs["api_key"],
                http_client=kwargs["http_client"],
            )
            await ask(client)
            session.set_last_reward(0.5)

    exported = await episode(All())
    assert rewards(exported) == [0.5]
    assert isinstance(seen["client"], ArealOpenAI)
    assert len(scripted.requests) == 1


async def test_a_class_gives_a_fresh_instance_to_each_episode(tokenizer, scripted) -> None:
    """case B192: eight at once, each with its own self and its own record."""

    class Keeps:
        def __init__(self, factor: int) -> None:
            self.seen: list[int] = []
            self.factor = factor

        async def run(self, data: Any, client: ArealOpenAI) -> float:
            self.seen.append(data["i"])
            await asyncio.sleep(0.001 * (8 - data["i"]))
            await ask(client, f"number {data['i']}")
            assert self.seen == [data["i"]] and len(client.interactions) == 1
            return data["i"] * self.factor

    rollout = RolloutEngine(scripted, RolloutConfig(consumer_batch_size=8), tokenizer=tokenizer)
    with rollout:
        groups = await asyncio.to_thread(
            rollout.rollout_batch, [{"i": i} for i in range(8)], Keeps, {"factor": 2}
        )
        stats = rollout.export_stats()
    assert [float(group["rewards"][0]) for group in groups] == [2.0 * i for i in range(8)]
    assert stats["rollout/reward"] == 7.0


async def test_failures_name_their_boundary(episode, tokenizer) -> None:
    """case B194: the error keeps the agent's own traceback as its cause."""

    class Raises:
        def __init__(self, error: BaseException) -> None:
            self.error = error

        async def run(self, data: Any, client: ArealOpenAI) -> float:
            await ask(client)
            raise self.error

    for error in (Limit("five turns"), ExceptionGroup("tools", [OSError()]), SystemExit(1)):
        with pytest.raises(EpisodeError) as caught:
            await episode(Raises(error))
        assert caught.value.boundary == "agent" and caught.value.__cause__ is error

    class Asks:
        async def run(self, data: Any, client: ArealOpenAI) -> float:
            await ask(client.with_options(max_retries=0))
            return 1.0

    dead = ScriptedEngine([EngineError("out of memory")], repeat=True)
    with pytest.raises(EpisodeError, match="out of memory") as caught:
        await episode(Asks(), dead)
    assert caught.value.boundary == "engine"

    small = ScriptedEngine(["x"], tokenizer=tokenizer, max_seq_len=4)
    with pytest.raises(EpisodeError) as caught:
        await episode(Asks(), small)
    assert caught.value.boundary == "client"


class Limit(Exception):
    """What a framework raises when its turns are used up."""


class EndsEarly:
    def __init__(self, *, reward: float | None) -> None:
        self.reward = reward

    async def run(self, data: Any, client: ArealOpenAI) -> float:
        first = await ask(client, "one")
        await ask(client, "two")
        if self.reward is not None:
            client.set_reward(first.id, self.reward)
        raise Limit("recursion limit")


async def test_what_becomes_of_an_agent_that_raises_after_its_turns(episode) -> None:
    """case B194: dropped by default; or used, with 0 or with the rewards that were set."""
    with pytest.raises(EpisodeError, match="recursion limit"):
        await episode(EndsEarly(reward=0.5))
    zero = await episode(EndsEarly(reward=0.5), on_agent_error="zero", turn_discount=0.0)
    assert rewards(zero) == [0.5, 0.0]
    keep = await episode(EndsEarly(reward=0.5), on_agent_error="keep", turn_discount=0.0)
    assert rewards(keep) == [0.5, 0.0]
    assert isinstance(keep.error.__cause__, Limit)
    with pytest.raises(EpisodeRejectedError, match="returned no reward"):
        await episode(EndsEarly(reward=None), on_agent_error="keep")


def test_an_error_whose_turns_are_used_is_still_counted(tokenizer, scripted, caplog) -> None:
    """case B194"""
    config = RolloutConfig(agent=AgentConfig(on_agent_error="zero"))
    with RolloutEngine(scripted, config, tokenizer=tokenizer) as rollout:
        groups = rollout.rollout_batch([{}] * 3, EndsEarly, {"reward": None}, group_size=2)
        stats = rollout.export_stats()
    assert [group["rollout_group"].row_counts for group in groups] == [(2, 2)] * 3
    assert stats["rollout/failed/agent"] == 1.0 and stats["rollout/failed"] == 0.0
    assert stats["rollout/reward"] == 0.0
    assert sum("recursion limit" in said for said in caplog.messages) == 1


async def test_a_verifier_that_needs_the_main_thread_is_visible(tokenizer, scripted) -> None:
    """case B84: an error with its cause, never a reward of 0 for all."""

    class Alarm:
        async def run(self, data: Any, client: ArealOpenAI) -> float:
            await ask(client)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            return 1.0

    with RolloutEngine(scripted, tokenizer=tokenizer) as rollout:
        assert await asyncio.to_thread(rollout.rollout_batch, [{}], Alarm) == [None]
        stats = rollout.export_stats()
    assert stats["rollout/failed/agent"] == 1.0
    assert "rollout/reward" not in stats


async def test_runaway_agents_are_stopped(episode) -> None:
    class Forever:
        async def run(self, data: Any, client: ArealOpenAI) -> float:
            while True:
                await ask(client)

    with pytest.raises(EpisodeError, match="max_requests=5"):
        await episode(Forever(), max_requests=5)


def test_deadline_ends_the_generation(tokenizer) -> None:
    class Slow(ScriptedEngine):
        cancelled = 0

        async def agenerate(self, req: Any) -> Any:
            try:
                return await super().agenerate(req)
            except asyncio.CancelledError:
                Slow.cancelled += 1
                raise

    class Asks:
        async def run(self, data: Any, client: ArealOpenAI) -> float:
            await ask(client)
            return 1.0

    engine = Slow(["x"], tokenizer=tokenizer, latency_s=60.0, repeat=True)
    config = RolloutConfig(episode_timeout_s=0.2)
    with RolloutEngine(engine, config, tokenizer=tokenizer) as rollout:
        assert rollout.rollout_batch([{}, {}], Asks) == [None, None]
        assert rollout.export_stats()["rollout/failed/timeout"] == 1.0
    assert Slow.cancelled == 2


def test_evaluation_samples_with_its_own_gconfig(tokenizer, scripted) -> None:
    class Asks:
        async def run(self, data: Any, client: ArealOpenAI) -> float:
            await client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": "hi"}]
            )
            return 1.0

    rollout = RolloutEngine(
        scripted,
        tokenizer=tokenizer,
        gconfig=GenerationConfig(max_new_tokens=7),
        eval_gconfig=GenerationConfig(max_new_tokens=9),
    )
    with rollout:
        rollout.rollout_batch([{}], Asks)
        rollout.rollout_batch([{}], Asks, is_eval=True)
    assert [request.gconfig.max_new_tokens for request in scripted.requests] == [7, 9]


async def test_blocking_agents_are_for_another_mode(episode) -> None:
    class Blocking:
        def run(self, data: Any) -> float:
            return 1.0

    with pytest.raises(WorkflowResolutionError, match=r"async def run.*mode=subproc"):
        await episode(Blocking)


def test_online_runs_no_agent_but_in_evaluation(tokenizer, scripted) -> None:
    class Asks:
        async def run(self, data: Any, client: ArealOpenAI) -> float:
            await ask(client)
            return 1.0

    config = RolloutConfig(agent=AgentConfig(mode="online"))
    with RolloutEngine(scripted, config, tokenizer=tokenizer) as rollout:
        with pytest.raises(WorkflowResolutionError, match="mode=online runs no agent here"):
            rollout.rollout_batch([{}], Asks)
        assert rollout.rollout_batch([{}], Asks, is_eval=True)[0] is not None
