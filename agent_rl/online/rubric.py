"""RubricJudge: grades a conversation against criteria, one verdict for each; a reward in [0, 1].

    criteria "names the date" (weight 2), "is polite"; votes "1: yes / 2: no" and "1: yes / 2: yes"
    ->  per vote 2/3 and 1, so 0.83

For use as a reward inside an agent: ``return await rubric.score(messages)``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from agent_rl.errors import EpisodeError
from agent_rl.online.judge_model import JudgeModel
from agent_rl.online.prompt import PromptTemplate
from agent_rl.online.transcript import transcript
from agent_rl.types import JsonObject

_VERDICT = re.compile(r"^\W*(\d{1,4})\W{0,4}[:.)]\W*(yes|no)\b", re.IGNORECASE | re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Criterion:
    text: str
    weight: float = 1.0

    def __post_init__(self) -> None:
        if not (self.weight > 0.0 and math.isfinite(self.weight)):
            raise ValueError(f"the weight of {self.text!r} is {self.weight}; it must be above 0")


class RubricJudge:
    """
    Args:
        criteria: at least one; a plain text has weight 1.
        prompt: file in place of prompts/rubric.txt.
    """

    def __init__(
        self, model: JudgeModel, criteria: Sequence[Criterion | str], *, prompt: str | None = None
    ) -> None:
        if not criteria:
            raise ValueError("a rubric needs at least one criterion")
        self._model = model
        self._criteria = [Criterion(c) if isinstance(c, str) else c for c in criteria]
        self._prompt = PromptTemplate.load("rubric", ("conversation", "criteria"), prompt)

    async def score(self, conversation: Sequence[JsonObject]) -> float:
        """The weighted share of criteria that are met, averaged over the votes.

        A vote that leaves a criterion out counts it as not met; one without any verdict is none.

        Raises:
            EpisodeError: no vote was readable; its boundary is "judge".
        """
        numbered = [f"{number}. {c.text}" for number, c in enumerate(self._criteria, start=1)]
        prompt = self._prompt.fill(
            conversation=transcript(conversation), criteria="\n".join(numbered)
        )
        texts = await self._model.votes(prompt)
        shares = [share for text in texts if (share := self._share(text)) is not None]
        if not shares:
            raise EpisodeError("no vote of the rubric judge was readable", boundary="judge")
        return math.fsum(shares) / len(shares)

    def _share(self, text: str | None) -> float | None:
        verdicts = parse_verdicts(text or "")
        if not verdicts:
            return None
        met = [c.weight for n, c in enumerate(self._criteria, start=1) if verdicts.get(n)]
        return math.fsum(met) / math.fsum(c.weight for c in self._criteria)


def parse_verdicts(text: str) -> dict[int, bool]:
    """``1: yes``, ``2) No`` -> {1: True, 2: False}; of several for one number the last counts."""
    return {int(number): word.lower() == "yes" for number, word in _VERDICT.findall(text)}
