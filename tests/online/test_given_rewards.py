"""A reward that somebody gave an answer is learnt from, in place of the judge's score."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import openai
import pytest

from agent_rl.engine.scripted import ScriptedEngine
from agent_rl.online.learner import OnlineLearner
from agent_rl.online.methods import LESSONS, Lesson, Outcome
from agent_rl.online.service import OnlineService
from agent_rl.online.verdict import JudgedTurn, Verdict


class Content:
    """Whatever follows, the answer was good."""

    def __init__(self) -> None:
        self.num_asked = 0

    async def judge(self, turn: JudgedTurn) -> Verdict:
        self.num_asked += 1
        return Verdict(score=1.0)


def rows(learner: OnlineLearner) -> list[tuple[int, float | None]]:
    """(trained tokens, reward) of all samples."""
    tables = learner.drain(learner.num_waiting) if learner.num_waiting else []
    rewards = [float(table["rewards"]) for table in tables]
    return [
        (int(table["loss_mask"].sum()), None if math.isnan(reward) else reward)
        for table, reward in zip(tables, rewards, strict=True)
    ]


def give(learner: OnlineLearner, user: Any, index: int, reward: float) -> bool:
    """As the gateway does: set it, then tell the learner."""
    name = f"chatcmpl-{index}"
    user.session.cache.set_reward(name, reward)
    return learner.on_reward(user.session_id, name)


async def test_it_stands_in_for_the_judge_and_needs_no_next_message(talk: Callable) -> None:
    """Given -0.5 before the next message, and 0 to the last answer; the middle one is judged."""
    judge = Content()
    learner = OnlineLearner(judge=judge)
    user = talk(learner)
    user.say("hello", "a")
    assert give(learner, user, 0, -0.5)
    user.say("more", "b")
    user.say("more", "c")
    await learner.judged()
    assert judge.num_asked == 1
    assert give(learner, user, 2, 0.0)
    learner.on_session_end("s1")
    assert sorted(rows(learner)) == [(2, -0.5), (2, 0.0), (2, 1.0)]


async def test_what_comes_too_late_says_so(talk: Callable) -> None:
    learner = OnlineLearner(judge=Content())
    user = talk(learner)
    user.say("hello", "a")
    user.say("more", "b")
    await learner.judged()
    assert not give(learner, user, 0, -1.0)
    learner.on_session_end("s1")
    assert not give(learner, user, 1, -1.0)
    assert rows(learner) == [(2, 1.0), (0, None)]


async def test_side_turns_are_not_learnt_from(talk: Callable) -> None:
    learner = OnlineLearner(judge=Content())
    user = talk(learner)
    user.say("a title?", "a", turn_type="side")
    assert not give(learner, user, 0, 1.0)
    learner.on_session_end("s1")
    assert rows(learner) == []


@pytest.mark.parametrize(
    ("method", "lesson"),
    [
        ("binary", Lesson(reward=0.0)),
        ("combine", Lesson(reward=0.0)),
        ("opd", None),
    ],
)
def test_what_each_method_makes_of_it(method: Any, lesson: Lesson | None) -> None:
    """Zero too: unlike a judge's, it is no missing opinion."""
    outcome = Outcome(has_next_state=False, score=1.0, given=0.0)
    assert LESSONS[method](outcome) == lesson


def test_over_tcp_the_reply_tells(tokenizer: Any) -> None:
    engine = ScriptedEngine(["Rain is water."], tokenizer=tokenizer)
    with OnlineService(engine, tokenizer, judge=Content()) as service:
        session = {"X-Session-Id": "ann"}
        with openai.OpenAI(
            base_url=service.base_url, api_key=service.api_key, default_headers=session
        ) as client:
            messages: Any = [{"role": "user", "content": "What is rain?"}]
            answer = client.chat.completions.create(model="any", messages=messages)
            root = service.base_url.removesuffix("/v1")
            set_reward = f"{root}/rl/set_reward"
            reply: Any = client.post(set_reward, body={"reward": 0.25}, cast_to=object)
            assert reply == {
                "session_id": "ann",
                "interaction_id": answer.id,
                "is_learnt": True,
            }
            client.post(f"{root}/rl/end_session", body={}, cast_to=object)
        (row,) = service.drain(1)
    assert row["rewards"].tolist() == [0.25]
    assert row["loss_mask"].sum() > 0
