"""The dispatch table: what a turn becomes, by method, next state, score, teacher and counter."""

from __future__ import annotations

import pytest

from agent_rl.online.methods import LESSONS, Lesson, Outcome
from agent_rl.online.teacher import TeacherScores

TAUGHT = TeacherScores(logprobs=(-1.0,))


@pytest.mark.parametrize(
    ("has_next_state", "score", "num_effective", "reward", "is_trained", "is_promoted"),
    [
        (True, 1.0, 0, 1.0, True, False),
        (True, -1.0, 5, -1.0, True, False),
        (True, 0.0, 0, 0.0, True, True),  # at least one turn of a session is trained
        (True, 0.0, 1, 0.0, False, False),
        (False, None, 0, None, False, False),  # without next state never promoted
        (False, None, 3, None, False, False),
        (True, None, 0, None, False, False),  # the judge's budget was used up
    ],
)
def test_binary(
    has_next_state: bool,
    score: float | None,
    num_effective: int,
    reward: float | None,
    is_trained: bool,
    is_promoted: bool,
) -> None:
    outcome = Outcome(has_next_state=has_next_state, score=score, num_effective=num_effective)
    assert LESSONS["binary"](outcome) == Lesson(
        reward=reward, is_trained=is_trained, is_promoted=is_promoted
    )


def test_opd_distils_turns_with_a_teacher_and_leaves_the_others_out() -> None:
    opd = LESSONS["opd"]
    assert opd(Outcome(has_next_state=True, teacher=TAUGHT)) == Lesson(reward=None, teacher=TAUGHT)
    assert opd(Outcome(has_next_state=True, score=0.0)) is None
    assert opd(Outcome(has_next_state=False)) is None


@pytest.mark.parametrize(
    ("teacher", "score", "lesson"),
    [
        (TAUGHT, 1.0, Lesson(reward=1.0, teacher=TAUGHT)),
        (TAUGHT, -1.0, Lesson(reward=-1.0, teacher=TAUGHT)),
        (TAUGHT, 0.0, Lesson(reward=None, teacher=TAUGHT)),
        (TAUGHT, None, Lesson(reward=None, teacher=TAUGHT)),
        (None, 1.0, Lesson(reward=1.0)),
        (None, -1.0, Lesson(reward=-1.0)),
        (None, 0.0, None),
        (None, None, None),
    ],
)
def test_combine(teacher: TeacherScores | None, score: float | None, lesson: Lesson | None) -> None:
    """At most one sample for each turn, always trained in full."""
    assert LESSONS["combine"](Outcome(has_next_state=True, score=score, teacher=teacher)) == lesson
