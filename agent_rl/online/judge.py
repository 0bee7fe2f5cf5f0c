r"""TurnJudge: scores an answer by the message that followed it, by the majority of m votes.

    votes 1 1 -1 -> 1;   1 -1 fail -> 0 (tie);   fail fail fail -> 0;   0 0 1 -> 0

A vote is the last ``\boxed{...}`` of the judge's text, and only 1, 0 and -1 count. Follows the
process reward model of OpenClaw-RL; there is no other state, so any number of turns may be judged
at once.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from agent_rl.online.judge_model import JudgeModel
from agent_rl.online.prompt import PromptTemplate
from agent_rl.online.transcript import message_text
from agent_rl.online.verdict import NOT_JUDGED, JudgedTurn, Verdict
from agent_rl.stats import tracker as stats_tracker

TURN_FIELDS = ("answer", "next_state", "role")
_BOXED = re.compile(r"\\boxed\{\s*([+-]?\d)\s*\}")


class TurnJudge:
    def __init__(self, model: JudgeModel) -> None:
        self._model = model
        self._prompt = PromptTemplate.load("turn_judge", TURN_FIELDS, model.config.turn_prompt)

    async def judge(self, turn: JudgedTurn) -> Verdict:
        """Not judged once the budget is used up; votes that fail count as none."""
        if self._model.is_exhausted:
            return NOT_JUDGED
        texts = await self._model.votes(turn_prompt(self._prompt, turn))
        votes = [None if text is None else parse_vote(text) for text in texts]
        score = majority(votes)
        evaluation = _first_that_agrees(score, votes, texts)
        return Verdict(score=score, votes=tuple(votes), evaluation=evaluation)


def turn_prompt(template: PromptTemplate, turn: JudgedTurn) -> str:
    return template.fill(
        answer=message_text(turn.answer),
        next_state=message_text(turn.next_state),
        role=str(turn.next_state.get("role")),
    )


def parse_vote(text: str) -> int | None:
    r"""``so \boxed{0} ... \boxed{-1}`` -> -1; ``\boxed{2}`` and text without a box -> None."""
    boxes = _BOXED.findall(text)
    value = int(boxes[-1]) if boxes else None
    return value if value in (-1, 0, 1) else None


def majority(votes: Sequence[int | None]) -> float:
    """The value most votes agree on; 0 when there is none, or a tie for the top."""
    ranked = Counter(vote for vote in votes if vote is not None).most_common(2)
    if not ranked or (len(ranked) == 2 and ranked[0][1] == ranked[1][1]):
        return 0.0
    return float(ranked[0][0])


def record_votes(verdict: Verdict) -> None:
    """Count the votes of one turn; the keys add up over workers."""
    tracker = stats_tracker.get("online")
    for vote in verdict.votes:
        tracker.scalar(
            vote_positive=float(vote == 1),
            vote_negative=float(vote == -1),
            vote_neutral=float(vote == 0),
            vote_unreadable=float(vote is None),
        )
    if verdict.score is not None:
        tracker.scalar(score=verdict.score)


def _first_that_agrees(
    score: float, votes: Sequence[int | None], texts: Sequence[str | None]
) -> str:
    """The text of the first vote for a score other than 0."""
    agreeing = (text for vote, text in zip(votes, texts, strict=True) if vote == score and text)
    return next(agreeing, "") if score else ""
