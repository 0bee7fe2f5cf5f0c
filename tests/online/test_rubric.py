"""The rubric judge: verdicts per criterion, weights, and votes that cannot be read."""

from __future__ import annotations

import pytest

from agent_rl.client.areal_openai import ArealOpenAI
from agent_rl.config import JudgeConfig
from agent_rl.engine.scripted import ScriptedEngine
from agent_rl.errors import EpisodeError
from agent_rl.online.judge_model import JudgeModel
from agent_rl.online.rubric import Criterion, RubricJudge, parse_verdicts

TALK = [
    {"role": "user", "content": "when?"},
    {"role": "assistant", "content": "On 30 November."},
]


@pytest.fixture
def rubric_of(tokenizer):
    """A rubric judge that gives these answers, one for each vote, and its engine."""

    def make(*votes: object) -> tuple[RubricJudge, ScriptedEngine]:
        engine = ScriptedEngine(votes, tokenizer=tokenizer)
        config = JudgeConfig(votes=len(votes), max_concurrent=1, max_retries=0)
        criteria = [Criterion("names the date", 2.0), "is polite"]
        return RubricJudge(JudgeModel(ArealOpenAI(engine, tokenizer), config), criteria), engine

    return make


def test_one_verdict_for_each_number() -> None:
    text = "1: yes\n2) No, it is rude\n**3.** yes\n 4 - yes\nso 5: yes\n1: no"
    assert parse_verdicts(text) == {1: False, 2: False, 3: True}
    assert parse_verdicts("nothing") == {}


async def test_the_weighted_share_averaged_over_the_votes(rubric_of) -> None:
    judge, _ = rubric_of("1: yes\n2: no", "1: yes\n2: yes")
    assert await judge.score(TALK) == pytest.approx((2 / 3 + 1) / 2)


async def test_a_missing_verdict_is_not_met_and_an_unreadable_vote_is_none(rubric_of) -> None:
    judge, _ = rubric_of("2: yes", "I like it", ValueError("down"))
    assert await judge.score(TALK) == pytest.approx(1 / 3)


async def test_the_judge_reads_conversation_and_criteria(rubric_of, tokenizer) -> None:
    judge, engine = rubric_of("1: yes")
    await judge.score(TALK)
    text = tokenizer.decode(engine.requests[0].input_ids)
    assert "user: when?\n\nassistant: On 30 November." in text
    assert "1. names the date\n2. is polite" in text


async def test_no_readable_vote_fails_the_episode_by_its_judge(rubric_of) -> None:
    judge, _ = rubric_of("fine", "good")
    with pytest.raises(EpisodeError, match="no vote") as failure:
        await judge.score(TALK)
    assert failure.value.boundary == "judge"


def test_a_rubric_needs_criteria_of_positive_weight(rubric_of) -> None:
    with pytest.raises(ValueError, match="at least one"):
        RubricJudge(JudgeModel(None, JudgeConfig(base_url="http://127.0.0.1:9")), [])
    for weight in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="above 0"):
            Criterion("x", weight)
