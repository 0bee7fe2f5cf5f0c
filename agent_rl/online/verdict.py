"""What a judge is given and what it returns: the nouns between the turns and the methods.

A judge may be a model (``TurnJudge``) or a rule of the user's own: anything with this ``judge``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from agent_rl.record.reward import as_reward
from agent_rl.types import JsonObject


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedTurn:
    """One answer with what came before it and right after it."""

    messages: Sequence[JsonObject]
    answer: JsonObject
    next_state: JsonObject
    tools: Sequence[JsonObject] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """``score`` None: nobody judged it. ``votes`` holds None for each that failed.

    ``evaluation`` is the text of the first vote that agrees with a score other than 0.

    Raises:
        ValueError: the score is no finite number.
    """

    score: float | None
    votes: tuple[int | None, ...] = ()
    evaluation: str = ""

    def __post_init__(self) -> None:
        if self.score is not None:
            object.__setattr__(self, "score", as_reward(self.score))


class Judge(Protocol):
    async def judge(self, turn: JudgedTurn) -> Verdict: ...


NOT_JUDGED = Verdict(score=None)
