from __future__ import annotations

import json

import pytest

pytest.importorskip("reasoning_gym", reason="needs pip install -e '.[reasoning-gym]'")

from agent_rl import RolloutEngine, ScriptedEngine, small_model
from agent_rl.engine.loading import load_tokenizer
from agent_rl.integrations.reasoning_gym import score, tasks
from agent_rl.integrations.tasks import one_turn


def test_tasks_and_their_rewards() -> None:
    rows = tasks("chain_sum", size=3, seed=7, min_terms=2, max_terms=2)
    assert rows == json.loads(json.dumps(rows))
    assert rows == tasks("chain_sum", size=3, seed=7, min_terms=2, max_terms=2)
    for row in rows:
        assert score(row, row["answer"]) == 1.0
        assert score(row, f"I add. <answer> {row['answer']}</answer> Done.") == 1.0
        assert score(row, "<answer>12345678</answer>") < 1.0


def test_an_episode() -> None:
    rows = tasks("chain_sum", size=2, seed=7)
    tokenizer = load_tokenizer(small_model())
    engine = ScriptedEngine([rows[0]["answer"], "no"], tokenizer=tokenizer)
    with RolloutEngine(engine, tokenizer=tokenizer) as rollout:
        right = rollout.rollout_batch(rows[:1], one_turn(score))[0]
        wrong = rollout.rollout_batch(rows[1:], one_turn(score))[0]
    assert right is not None and wrong is not None
    assert right["rewards"].tolist() == [1.0]
    assert wrong["rewards"].item() < 0.5
