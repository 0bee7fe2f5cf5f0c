"""Turns, tokens and tool calls of one episode: more ends it as truncated, not as an error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest
import torch

from agent_rl.client.areal_openai import ArealOpenAI
from agent_rl.config import AgentConfig, BudgetConfig, RolloutConfig
from agent_rl.engine.scripted import ScriptedEngine
from agent_rl.errors import BudgetSpentError
from agent_rl.record.dump import read_dump
from agent_rl.rollout.budget import BudgetedEngine
from agent_rl.rollout.executor import RolloutEngine
from agent_rl.rollout.workflow import RolloutWorkflow
from agent_rl.types import GenerationConfig, ModelRequest, RolloutGroup


def request(number: int, **gconfig: Any) -> ModelRequest:
    return ModelRequest(rid=str(number), input_ids=[1], gconfig=GenerationConfig(**gconfig))


class Obeys(ScriptedEngine):
    """Answers with as many tokens as it may, at most eight."""

    def __init__(self, **keys: Any) -> None:
        super().__init__([self.fill], repeat=True, **keys)

    @staticmethod
    def fill(req: ModelRequest) -> dict[str, Any]:
        count = min(8, req.gconfig.max_new_tokens or 8)
        return {"output_tokens": [7] * count, "stop_reason": "stop" if count == 8 else "length"}


async def test_the_token_budget_cuts_the_last_answer_and_refuses_the_next_call() -> None:
    engine = BudgetedEngine(Obeys(), BudgetConfig(max_tokens=10))
    first = await engine.agenerate(request(1))
    assert len(first.output_tokens) == 8 and not engine.is_truncated
    second = await engine.agenerate(request(2, min_new_tokens=5))
    assert (len(second.output_tokens), second.stop_reason) == (2, "length")
    assert engine.is_truncated
    with pytest.raises(BudgetSpentError, match=r"rollout.budget.max_tokens=10 is used up"):
        await engine.agenerate(request(3))


async def test_a_limit_of_the_request_itself_is_no_truncation() -> None:
    engine = BudgetedEngine(Obeys(), BudgetConfig(max_tokens=10))
    answer = await engine.agenerate(request(1, max_new_tokens=3))
    assert (len(answer.output_tokens), engine.is_truncated) == (3, False)


async def test_turns_are_counted_and_failed_calls_are_none() -> None:
    engine = BudgetedEngine(ScriptedEngine([OSError("down"), [7], [8]]), BudgetConfig(max_turns=2))
    with pytest.raises(OSError, match="down"):
        await engine.agenerate(request(1))
    await engine.agenerate(request(2))
    items = [item async for item in engine.astream(request(3))]
    assert items[-1].output_tokens == (8,)
    assert not engine.is_truncated, "nothing was refused"
    with pytest.raises(BudgetSpentError, match="max_turns=2"):
        [item async for item in engine.astream(request(4))]
    assert engine.is_truncated


class Talks:
    """Asks ``turns`` times; ``reward`` of the first answer is set at once."""

    def __init__(self, turns: int, reward: float | None = None, catches: bool = False) -> None:
        self.turns = turns
        self.reward = reward
        self.catches = catches

    async def run(self, data: Any, client: ArealOpenAI) -> float:
        messages: list[Any] = [{"role": "user", "content": "hi"}]
        try:
            for turn in range(self.turns):
                answer = await client.chat.completions.create(model="m", messages=messages)
                messages.append(answer.choices[0].message)
                messages.append({"role": "user", "content": "more"})
                if turn == 0 and self.reward is not None:
                    client.set_reward(answer.id, self.reward)
        except openai.RateLimitError as error:
            assert error.code == "budget_spent"
            if not self.catches:
                raise
            return 0.75
        return 1.0


@pytest.fixture
def make(open_rollout, tokenizer, tmp_path: Path):
    def build(budget: dict[str, Any], replies: Any = ("one",), **keys: Any) -> RolloutEngine:
        config = RolloutConfig(
            budget=BudgetConfig(**budget),
            dump_to_file=True,
            fileroot=str(tmp_path),
            agent=AgentConfig(turn_discount=0.0),
            **keys,
        )
        engine = ScriptedEngine(replies, tokenizer=tokenizer, repeat=True)
        return open_rollout(engine, config, tokenizer=tokenizer)

    return build


def rewards(group: Any) -> list[float]:
    return [float(value) for value in group["rewards"]]


def test_a_truncated_episode_is_trained_on_and_says_so_everywhere(make, tmp_path) -> None:
    """case B194: the limit is the collector's own, so nothing counts as failed."""
    rollout = make({"max_turns": 3})
    long, short = rollout.rollout_batch([{}], Talks, {"turns": 9}, group_size=1) + (
        rollout.rollout_batch([{}], Talks, {"turns": 2}, group_size=1)
    )
    assert long["rollout_group"] == RolloutGroup(row_counts=(3,), rewards=(0.0,), truncated=(True,))
    assert short["rollout_group"].truncated == (False,)
    assert rewards(long) == [0.0, 0.0, 0.0] and rewards(short) == [0.0, 1.0]
    stats = rollout.export_stats()
    assert stats["rollout/truncated"] == 0.5
    assert stats["rollout/failed"] == stats["rollout/rejected"] == 0.0
    assert stats["rollout/failed/client"] == 0.0
    records = read_dump(tmp_path)
    assert [record.truncated for record in records] == [True] * 3 + [False] * 2
    assert all(record.error is None for record in records)
    text = "".join(path.read_text() for path in tmp_path.rglob("*.jsonl"))
    assert text.count('"truncated": true') == 3 and text.count('"truncated"') == 3


def test_rewards_that_the_agent_gave_are_kept(make) -> None:
    [group] = make({"max_turns": 2}).rollout_batch([{}], Talks, {"turns": 9, "reward": 0.5})
    assert rewards(group) == [0.5, 0.0]
    [group] = make({"max_turns": 2}).rollout_batch([{}], Talks, {"turns": 9, "catches": True})
    assert rewards(group) == [0.0, 0.75]
    assert group["rollout_group"].truncated == (True,)


def test_without_a_reward_it_may_be_rejected(make) -> None:
    rollout = make({"max_turns": 2, "reward": None})
    assert rollout.rollout_batch([{}], Talks, {"turns": 9}) == [None]
    stats = rollout.export_stats()
    assert (stats["rollout/rejected"], stats["rollout/truncated"]) == (1.0, 1.0)
    assert rollout.counts().rejected == 1


def test_each_episode_of_a_group_has_its_own_budget(make) -> None:
    [group] = make({"max_turns": 2}).rollout_batch([{}], Talks, {"turns": 2}, group_size=3)
    assert group["rollout_group"].truncated == (False,) * 3


CALL = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


class CallsTools:
    async def run(self, data: Any, client: ArealOpenAI) -> float:
        messages: list[Any] = [{"role": "user", "content": "hi"}]
        while True:
            answer = await client.chat.completions.create(
                model="m", messages=messages, tools=[LOOK]
            )
            message = answer.choices[0].message
            messages.append(message)
            if not message.tool_calls:
                return 1.0
            for call in message.tool_calls:
                result = {"role": "tool", "tool_call_id": call.id, "content": "nothing"}
                messages.append(result)


def test_tool_calls_are_limited_and_the_answer_after_the_last_is_not(make) -> None:
    replies = [CALL, CALL, "done"]
    [group] = make({"max_tool_calls": 2}, replies).rollout_batch([{}], CallsTools)
    assert rewards(group)[-1] == 1.0 and group["rollout_group"].truncated == (False,)
    [group] = make({"max_tool_calls": 1}, replies).rollout_batch([{}], CallsTools)
    assert rewards(group) == [0.0, 0.0] and group["rollout_group"].truncated == (True,)


class Rows(RolloutWorkflow):
    """Asks the engine until it has ten tokens, whatever happens."""

    async def arun_episode(self, engine: Any, data: Any) -> Any:
        ids: list[int] = []
        while len(ids) < 10:
            ids += (await engine.agenerate(request(len(ids)))).output_tokens
            if data.get("stops") and engine.is_truncated:
                break
        return {
            "input_ids": torch.tensor([ids]),
            "attention_mask": torch.ones(1, len(ids), dtype=torch.bool),
            "loss_mask": torch.ones(1, len(ids), dtype=torch.int32),
            "rewards": torch.tensor([1.0]),
        }


def test_low_level_workflows_have_the_same_budget() -> None:
    config = RolloutConfig(budget=BudgetConfig(max_tokens=9))
    with RolloutEngine(Obeys(), config) as rollout:
        groups = rollout.rollout_batch([{"stops": True}, {}], Rows())
        assert groups[0]["rollout_group"].truncated == (True,)
        assert groups[0]["input_ids"].shape == (1, 9)
        assert groups[1] is None, "it gave no rows"
        stats = rollout.export_stats()
    assert (stats["rollout/truncated"], stats["rollout/failed"]) == (1.0, 0.0)


async def test_it_is_an_engine() -> None:
    engine = BudgetedEngine(Obeys(version=3, max_seq_len=64), BudgetConfig(max_turns=1))
    assert (engine.get_version(), engine.max_seq_len) == (3, 64)
    assert engine.supported == Obeys.supported
    engine.set_version(4)
    await engine.pause()
    await engine.resume()
    await engine.abort("x")
    assert engine.get_version() == 4 and await engine.health()
    await engine.close()
    assert not await engine.health()


def test_limits_are_checked_and_groups_too() -> None:
    for key, value in {"max_turns": 0, "max_tokens": 0, "max_tool_calls": -1}.items():
        with pytest.raises(ValueError, match=key):
            BudgetConfig(**{key: value})
    with pytest.raises(ValueError, match=r"max_turns=64 is never reached: after rollout.agent"):
        RolloutConfig(budget=BudgetConfig(max_turns=64))
    RolloutConfig(budget=BudgetConfig(max_turns=64), agent=AgentConfig(max_requests=65))
    assert not BudgetConfig().is_limited and BudgetConfig(max_tool_calls=0).is_limited
    with pytest.raises(ValueError, match="truncated must be one bool for each row count"):
        RolloutGroup(row_counts=(1, 1), truncated=(True,))
