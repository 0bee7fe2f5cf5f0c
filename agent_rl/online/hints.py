r"""Hindsight hints: what, had it stood in the request, would have led to the better answer.

m votes; a vote is accepted if its last box is 1 and its last [HINT_START]..[HINT_END] block is
longer than 10 characters; the longest accepted hint wins, as in OpenClaw-RL. The teacher is the
policy itself with the hint in its prompt:

    user: "when?"   ->   user: "when?\n\n[user's hint / instruction]\nGive the date only."
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Protocol

from agent_rl.online.judge import TURN_FIELDS, parse_vote, turn_prompt
from agent_rl.online.judge_model import JudgeModel
from agent_rl.online.prompt import PromptTemplate
from agent_rl.online.verdict import JudgedTurn
from agent_rl.types import JsonObject

_BLOCK = re.compile(r"\[HINT_START\](.*?)\[HINT_END\]", re.DOTALL)
_HEADING = "[user's hint / instruction]"


class HintSource(Protocol):
    """A model, or a rule of the user's own."""

    async def hint(self, turn: JudgedTurn) -> str | None: ...


class HintJudge:
    def __init__(self, model: JudgeModel, *, min_chars: int = 11) -> None:
        self._model = model
        self._min_chars = min_chars
        self._prompt = PromptTemplate.load("hint", TURN_FIELDS, model.config.hint_prompt)

    async def hint(self, turn: JudgedTurn) -> str | None:
        """None: the next state teaches nothing, no vote was readable, or the budget is used up."""
        texts = await self._model.votes(turn_prompt(self._prompt, turn))
        return longest_hint([text for text in texts if text is not None], self._min_chars)


def longest_hint(texts: Sequence[str], min_chars: int = 11) -> str | None:
    """Of several hints of that length the first."""
    hints = [hint for text in texts if (hint := parse_hint(text)) is not None]
    accepted = [hint for hint in hints if len(hint) >= min_chars]
    return max(accepted, key=len, default=None)


def parse_hint(text: str) -> str | None:
    """The hint of one vote; None when its box is not 1 or there is no block."""
    blocks = _BLOCK.findall(text)
    if parse_vote(text) != 1 or not blocks:
        return None
    hint: str = blocks[-1].strip()
    return hint


def teacher_messages(messages: Sequence[JsonObject], hint: str) -> list[JsonObject]:
    """The request with the hint added to its last user message, else to its last message.

    Only that message is copied; those given are not changed.
    """
    users = [index for index, message in enumerate(messages) if message.get("role") == "user"]
    if not messages:
        return [{"role": "user", "content": f"{_HEADING}\n{hint}"}]
    place = users[-1] if users else len(messages) - 1
    return [
        _with_hint(message, hint) if index == place else message
        for index, message in enumerate(messages)
    ]


def _with_hint(message: JsonObject, hint: str) -> JsonObject:
    addition = f"\n\n{_HEADING}\n{hint}"
    content = message.get("content")
    if isinstance(content, list):
        return {**message, "content": [*content, {"type": "text", "text": addition}]}
    return {**message, "content": f"{content or ''}{addition}"}
