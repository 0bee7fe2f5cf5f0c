"""Relative judging: the attempts of a group are compared with one another, scores in [0, 1].

A judge that cannot say how good one answer is may well say which of eight is best. What all
attempts have in common is shown once. ``RelativeReward`` is the same as a reward inside an agent:
episodes of one datum wait for each other, and then each gets its own score.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from agent_rl.errors import EpisodeError
from agent_rl.online.judge_model import JudgeModel
from agent_rl.online.prompt import PromptTemplate
from agent_rl.online.transcript import transcript
from agent_rl.types import JsonObject

_SCORE = re.compile(r"^\W*(\d{1,4})\W{0,4}[:.)]\W*(0(?:\.\d+)?|1(?:\.0+)?)\b", re.MULTILINE)


class RelativeJudge:
    """
    Args:
        prompt: file in place of prompts/relative.txt.
    """

    def __init__(self, model: JudgeModel, *, prompt: str | None = None) -> None:
        self._model = model
        self._prompt = PromptTemplate.load("relative", ("count", "task", "attempts"), prompt)

    async def rank(self, attempts: Sequence[Sequence[JsonObject]]) -> list[float]:
        """A score for each conversation, averaged over the votes that scored all of them.

        Attempts that are equal are judged once and get the same score; a single one gets 0.5, as
        there is nothing to compare it with.

        Raises:
            EpisodeError: no vote scored all attempts; its boundary is "judge".
        """
        num_shared = shared_messages(attempts)
        texts = [transcript(attempt[num_shared:]) for attempt in attempts]
        different = list(dict.fromkeys(texts))
        if len(different) < 2:
            return [0.5] * len(attempts)
        shown = [f"<attempt {n}>\n{t}\n</attempt {n}>" for n, t in enumerate(different, start=1)]
        prompt = self._prompt.fill(
            count=len(different),
            task=transcript(attempts[0][:num_shared]),
            attempts="\n\n".join(shown),
        )
        votes = [
            parse_scores(text or "", len(different)) for text in await self._model.votes(prompt)
        ]
        whole = [vote for vote in votes if vote is not None]
        if not whole:
            raise EpisodeError(
                "no vote of the relative judge scored all attempts", boundary="judge"
            )
        means = [math.fsum(column) / len(whole) for column in zip(*whole, strict=True)]
        score_of = dict(zip(different, means, strict=True))
        return [score_of[text] for text in texts]


def shared_messages(attempts: Sequence[Sequence[JsonObject]]) -> int:
    """How many messages all attempts begin with: [s u a1], [s u a2] -> 2."""
    shortest = min((len(attempt) for attempt in attempts), default=0)
    for index in range(shortest):
        if any(attempt[index] != attempts[0][index] for attempt in attempts):
            return index
    return shortest


def parse_scores(text: str, count: int) -> list[float] | None:
    """``1: 0.5``, ``2: 1`` -> [0.5, 1.0]; None unless each of 1 to ``count`` has a score."""
    found = {int(number): float(score) for number, score in _SCORE.findall(text)}
    numbers = range(1, count + 1)
    return [found[n] for n in numbers] if all(n in found for n in numbers) else None


@dataclass(slots=True, kw_only=True, eq=False)
class _Gathering:
    """Attempts that wait for their siblings."""

    attempts: list[Sequence[JsonObject]] = field(default_factory=list)
    scores: asyncio.Task[list[float]] | None = None
    is_full: asyncio.Event = field(default_factory=asyncio.Event)


class RelativeReward:
    """One object for all episodes, as in ``workflow_kwargs={"reward": RelativeReward(judge, 8)}``.

        return await self.reward.score(data["id"], messages)

    Args:
        group_size: episodes of one datum, ``rollout.group_size``.
        patience_s: how long an attempt waits for its siblings; failed episodes never come. Those
            that came are then ranked without them, and one that comes later is ranked apart.
    """

    def __init__(self, judge: RelativeJudge, group_size: int, *, patience_s: float = 60.0) -> None:
        if group_size < 1 or not patience_s > 0.0:
            raise ValueError("group_size must be at least 1 and patience_s above 0")
        self._judge = judge
        self._group_size = group_size
        self._patience_s = patience_s
        self._open: dict[Hashable, _Gathering] = {}

    async def score(self, group: Hashable, conversation: Sequence[JsonObject]) -> float:
        """The conversation's score among its siblings, which name the same ``group``.

        Raises:
            EpisodeError: see ``RelativeJudge.rank``.
        """
        gathering = self._open.setdefault(group, _Gathering())
        place = len(gathering.attempts)
        gathering.attempts.append(conversation)
        if len(gathering.attempts) == self._group_size:
            self._rank(group, gathering)
        try:
            async with asyncio.timeout(self._patience_s):
                await gathering.is_full.wait()
        except TimeoutError:
            self._rank(group, gathering)
        assert gathering.scores is not None, "ranked by the last to come, or by who waited longest"
        # One that is cancelled leaves the judge to its siblings.
        return (await asyncio.shield(gathering.scores))[place]

    def _rank(self, group: Hashable, gathering: _Gathering) -> None:
        if gathering.scores is None:
            if self._open.get(group) is gathering:
                del self._open[group]
            gathering.scores = asyncio.ensure_future(self._judge.rank(gathering.attempts))
            gathering.is_full.set()
