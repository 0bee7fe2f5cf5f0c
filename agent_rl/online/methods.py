"""Methods: what one turn becomes, by the method and by what judge and teacher said of it.

binary: a turn without next state or with score 0 is context only (mask 0), but a score-0 turn of a
session that has trained nothing yet is promoted: trained, with reward 0. opd: a turn with an
accepted hint is distilled, any other leaves nothing. combine:

    hint accepted  score +-1   the turn is
    yes            yes         distilled and rewarded
    yes            no          distilled; no reward enters, so no baseline either
    no             yes         rewarded; no teacher speaks
    no             no          left out

A reward that somebody gave the answer, through the gateway's ``rl/set_reward``, stands in for the
judge's score, any number and 0 too, and needs no next state.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from agent_rl.config import Method
from agent_rl.online.teacher import TeacherScores


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """All that is known of a turn when it is settled.

    ``given``: the reward that somebody gave it. ``num_effective``: turns of its session that are
    trained already.
    """

    has_next_state: bool
    score: float | None = None
    given: float | None = None
    teacher: TeacherScores | None = None
    num_effective: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Lesson:
    """How a turn enters training. ``reward`` None: the loss has no term of a reward."""

    reward: float | None
    is_trained: bool = True
    is_promoted: bool = False
    teacher: TeacherScores | None = None


def _binary(outcome: Outcome) -> Lesson:
    if outcome.given is not None:
        return Lesson(reward=outcome.given)
    if not outcome.has_next_state or outcome.score is None:
        return Lesson(reward=None, is_trained=False)
    is_promoted = outcome.score == 0.0 and outcome.num_effective == 0
    return Lesson(
        reward=outcome.score,
        is_trained=outcome.score != 0.0 or is_promoted,
        is_promoted=is_promoted,
    )


def _opd(outcome: Outcome) -> Lesson | None:
    if outcome.teacher is None:
        return None
    return Lesson(reward=None, teacher=outcome.teacher)


def _combine(outcome: Outcome) -> Lesson | None:
    reward = outcome.score or None if outcome.given is None else outcome.given
    if reward is None and outcome.teacher is None:
        return None
    return Lesson(reward=reward, teacher=outcome.teacher)


LESSONS: dict[Method, Callable[[Outcome], Lesson | None]] = {
    "binary": _binary,
    "opd": _opd,
    "combine": _combine,
}
