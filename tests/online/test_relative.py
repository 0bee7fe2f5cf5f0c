"""The relative judge: what is shown of a group, how scores are read, and how siblings wait."""

from __future__ import annotations

import asyncio

import pytest

from agent_rl.client.areal_openai import ArealOpenAI
from agent_rl.config import JudgeConfig, RolloutConfig
from agent_rl.engine.scripted import ScriptedEngine
from agent_rl.errors import EpisodeError
from agent_rl.online.judge_model import JudgeModel
from agent_rl.online.relative import RelativeJudge, RelativeReward, parse_scores, shared_messages
from agent_rl.rollout.executor import RolloutEngine

TASK = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "when?"}]


def attempt(answer: str) -> list[dict[str, str]]:
    return [*TASK, {"role": "assistant", "content": answer}]


@pytest.fixture
def judge_of(tokenizer):
    """A relative judge that gives these answers, one for each vote, and its engine."""

    def make(*votes: object, repeat: bool = False) -> tuple[RelativeJudge, ScriptedEngine]:
        engine = ScriptedEngine(votes, tokenizer=tokenizer, repeat=repeat)
        config = JudgeConfig(votes=len(votes), max_concurrent=1, max_retries=0)
        return RelativeJudge(JudgeModel(ArealOpenAI(engine, tokenizer), config)), engine

    return make


@pytest.mark.parametrize(
    ("text", "scores"),
    [
        ("1: 0.5\n2: 1\n3: 0", [0.5, 1.0, 0.0]),
        ("2) 0.25\n1. 1.0\n3: 0.75\nthe best is 1", [1.0, 0.25, 0.75]),
        ("1: 0.1\n1: 0.2\n2: 0\n3: 0", [0.2, 0.0, 0.0]),
        ("1: 0.5\n2: 1", None),
        ("1: 2\n2: 1\n3: 0", None),
        ("1: -1\n2: 1\n3: nan", None),
        ("", None),
    ],
)
def test_a_vote_scores_every_attempt_between_0_and_1(text: str, scores: list[float] | None) -> None:
    assert parse_scores(text, 3) == scores


def test_what_attempts_have_in_common() -> None:
    assert shared_messages([attempt("a"), attempt("b")]) == 2
    assert shared_messages([TASK, attempt("a")]) == 2
    assert shared_messages([attempt("a"), attempt("a")]) == 3
    assert shared_messages([[{"role": "user", "content": "x"}], TASK]) == 0
    assert shared_messages([]) == 0


async def test_the_common_part_is_shown_once(judge_of, tokenizer) -> None:
    judge, engine = judge_of("1: 0.2\n2: 0.8", "1: 0.4\n2: 0.6")
    assert await judge.rank([attempt("Monday"), attempt("30 November")]) == pytest.approx(
        [0.3, 0.7]
    )
    text = tokenizer.decode(engine.requests[0].input_ids)
    assert text.count("when?") == text.count("be brief") == 1
    assert "<attempt 1>\nassistant: Monday\n</attempt 1>" in text
    assert "You compare 2 attempts" in text


async def test_equal_attempts_are_judged_once(judge_of) -> None:
    judge, engine = judge_of("1: 0\n2: 1")
    talks = [attempt("a"), attempt("b"), attempt("a")]
    assert await judge.rank(talks) == [0.0, 1.0, 0.0]
    assert await judge.rank([attempt("a")]) == [0.5]
    assert await judge.rank([attempt("a"), attempt("a")]) == [0.5, 0.5]
    assert await judge.rank([]) == []
    assert len(engine.requests) == 1


async def test_no_whole_vote_fails_the_episode_by_its_judge(judge_of) -> None:
    judge, _ = judge_of("1: 1", RuntimeError("down"))
    with pytest.raises(EpisodeError, match="no vote") as failure:
        await judge.rank([attempt("a"), attempt("b")])
    assert failure.value.boundary == "judge"


async def test_siblings_wait_for_each_other_and_groups_do_not_mix(judge_of) -> None:
    judge, engine = judge_of("1: 0\n2: 1", repeat=True)
    reward = RelativeReward(judge, 2)
    scores = await asyncio.gather(
        reward.score("x", attempt("a")),
        reward.score("y", attempt("c")),
        reward.score("x", attempt("b")),
        reward.score("y", attempt("d")),
    )
    assert scores == [0.0, 0.0, 1.0, 1.0]
    assert len(engine.requests) == 2
    assert reward._open == {}


async def test_a_sibling_that_never_comes_is_not_waited_for_forever(judge_of) -> None:
    judge, _ = judge_of("1: 0\n2: 1")
    reward = RelativeReward(judge, 3, patience_s=0.01)
    scores = await asyncio.gather(reward.score("x", attempt("a")), reward.score("x", attempt("b")))
    assert scores == [0.0, 1.0]
    assert await reward.score("x", attempt("late")) == 0.5


async def test_a_cancelled_sibling_takes_no_other_along(judge_of) -> None:
    judge, engine = judge_of("1: 0\n2: 1")
    await engine.pause()
    reward = RelativeReward(judge, 2)
    tasks = [asyncio.create_task(reward.score("x", attempt(text))) for text in "ab"]
    while not engine.requests:  # noqa: ASYNC110 - the engine sets no event
        await asyncio.sleep(0)
    tasks[0].cancel()
    await engine.resume()
    assert await tasks[1] == 1.0


def test_as_a_reward_in_ordinary_training(judge_of, tokenizer) -> None:
    """The episodes of one datum are scored together; each row has its own reward."""
    judge, _ = judge_of("1: 0\n2: 0.5\n3: 1", repeat=True)

    class Agent:
        def __init__(self, reward: RelativeReward) -> None:
            self.reward = reward

        async def run(self, data: dict, client: ArealOpenAI) -> float:
            messages = [{"role": "user", "content": data["question"]}]
            completion = await client.chat.completions.create(model="any", messages=messages)
            messages.append(completion.choices[0].message.model_dump())
            return await self.reward.score(data["id"], messages)

    engine = ScriptedEngine(["a", "b", "c"], tokenizer=tokenizer)
    with RolloutEngine(engine, RolloutConfig(), tokenizer=tokenizer) as rollout:
        (group,) = rollout.rollout_batch(
            [{"id": 1, "question": "when?"}],
            Agent,
            workflow_kwargs={"reward": RelativeReward(judge, 3)},
            group_size=3,
        )
    assert sorted(group["rewards"].tolist()) == [0.0, 0.5, 1.0]


def test_what_cannot_be_waited_for_is_refused(judge_of) -> None:
    judge, _ = judge_of("1: 0")
    for size, patience_s in [(0, 1.0), (2, 0.0), (2, float("nan"))]:
        with pytest.raises(ValueError, match="group_size must be"):
            RelativeReward(judge, size, patience_s=patience_s)
