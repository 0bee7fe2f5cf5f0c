from __future__ import annotations

import pytest

pytest.importorskip("math_verify", reason="needs pip install -e '.[math-verify]'")

from agent_rl import RolloutEngine, ScriptedEngine, small_model
from agent_rl.engine.loading import load_tokenizer
from agent_rl.integrations.math_verify import compare, score
from agent_rl.integrations.tasks import one_turn


def test_equal_is_equal_as_mathematics() -> None:
    assert compare("0.5", r"so it is $\frac{1}{2}$") == 1.0
    assert compare("0.5", r"so it is $\boxed{\frac{2}{3}}$") == 0.0
    assert compare("42", "no idea") == 0.0


def test_episodes() -> None:
    tokenizer = load_tokenizer(small_model())
    engine = ScriptedEngine([r"$\boxed{42}$"], tokenizer=tokenizer, repeat=True)
    data = [{"question": "6*7?", "answer": "42"}, {"question": "6*8?", "answer": "48"}]
    with RolloutEngine(engine, tokenizer=tokenizer) as rollout:
        groups = rollout.rollout_batch(data, one_turn(score))
    assert [group["rewards"].tolist() for group in groups if group is not None] == [[1.0], [0.0]]
