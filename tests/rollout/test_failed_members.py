"""Agents that fail or give no reward: what their siblings train on, and what is counted."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from agent_rl import RolloutEngine, ScriptedEngine
from agent_rl.client.areal_openai import ArealOpenAI
from agent_rl.config import RolloutConfig
from agent_rl.errors import EpisodeError
from agent_rl.rollout.lane import Counts


class Ends:
    """Two calls, then the next of the outcomes: a reward, an exception or None."""

    def __init__(self, outcomes: Iterable[Any]) -> None:
        self.outcomes = iter(outcomes)

    async def run(self, data: Any, client: ArealOpenAI) -> float | None:
        outcome = next(self.outcomes)
        for text in ("one", "two"):
            await say(client, text)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


class Grades:
    """Compares the model's answer with a text; an int is none."""

    async def run(self, data: Any, client: ArealOpenAI) -> float:
        return float(await say(client, "2 + 2?") == data["answer"].strip())


async def say(client: ArealOpenAI, text: str) -> str | None:
    messages: Any = [{"role": "user", "content": text}]
    completion = await client.chat.completions.create(model="default", messages=messages)
    return completion.choices[0].message.content


@pytest.fixture
def scripted(tokenizer: Any) -> ScriptedEngine:
    return ScriptedEngine(["four"], tokenizer=tokenizer, repeat=True)


def test_a_group_is_what_is_left_of_it(scripted: ScriptedEngine, tokenizer: Any) -> None:
    """cases B82, B165: one of four members raises, one says nothing; two are left, and no zeros."""
    agent = Ends([1.0, 0.0, ConnectionError("refused"), None])
    with RolloutEngine(scripted, tokenizer=tokenizer) as rollout:
        rollout.submit({}, agent, group_size=4)
        (group,) = rollout.wait(1, timeout=30)
        counts, stats = rollout.counts(), rollout.export_stats()
    assert sorted(group["rollout_group"].rewards) == [0.0, 1.0]
    assert sorted(group["rewards"].tolist()) == [0.0, 0.0, 1.0, 1.0], "two calls each"
    assert counts == Counts(submitted=1, accepted=1)
    assert (stats["rollout/reward"], stats["rollout/reward__count"]) == (0.5, 2)
    assert (stats["rollout/failed/agent"], stats["rollout/failed/agent__count"]) == (0.25, 4)


def test_what_gives_nothing_is_counted_as_such(scripted: ScriptedEngine, tokenizer: Any) -> None:
    """case B82: the same four without company: 2 accepted, 1 failed, 1 rejected."""
    agent = Ends([1.0, 0.0, ConnectionError("refused"), None])
    with RolloutEngine(scripted, tokenizer=tokenizer) as rollout:
        groups = rollout.rollout_batch([{}] * 4, agent)
        counts = rollout.counts()
    rewards = [None if group is None else float(group["rewards"][0]) for group in groups]
    assert rewards == [1.0, 0.0, None, None]
    assert counts == Counts(submitted=4, accepted=2, failed=1, rejected=1)


def test_an_answer_of_an_odd_type_costs_its_own_datum(
    scripted: ScriptedEngine, tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """case B83: every third answer is an int: counted, said once with its task, others count."""
    rows = [{"answer": 4 if i % 3 == 2 else "four"} for i in range(6)]
    with RolloutEngine(scripted, tokenizer=tokenizer) as rollout:
        groups = rollout.rollout_batch(rows, Grades)
        stats = rollout.export_stats()
    assert [group is None for group in groups] == [False, False, True] * 2
    assert stats["rollout/failed/agent"] == pytest.approx(1 / 3)
    assert stats["rollout/failed/agent__count"] == 6
    (record,) = [r for r in caplog.records if "'int' object has no attribute" in r.getMessage()]
    assert record.getMessage().startswith("task 2: ")


def test_the_first_failure_ends_a_run_that_wants_it_so(
    open_rollout: Any, scripted: ScriptedEngine, tokenizer: Any
) -> None:
    """case B83: rollout.on_error=raise."""
    rollout = open_rollout(scripted, RolloutConfig(on_error="raise"), tokenizer=tokenizer)
    with pytest.raises(EpisodeError, match="'int' object has no attribute 'strip'"):
        rollout.rollout_batch([{"answer": "four"}, {"answer": 4}], Grades)
