"""Call: a Turn on its way to the engine, its prompt planned and its answer named.

A prompt that leaves no room for even one new token never reaches the engine.
"""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, replace

from agent_rl.api.grammar import after_reasoning
from agent_rl.api.session import Session
from agent_rl.api.turn import Turn
from agent_rl.engine.base import token_budget
from agent_rl.errors import ContextLengthError, RequestError
from agent_rl.record.plan import PromptPlan
from agent_rl.types import JsonObject, ModelRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """``id`` is the caller's name for the answer; its choices count from ``first_index``."""

    session: Session
    turn: Turn
    plan: PromptPlan
    id: str
    created_at: float
    first_index: int = 0

    def requests(self) -> list[ModelRequest]:
        """One for each choice: choice 0 has the call's id, choice 2 of ``cmpl-1`` ``cmpl-1/2``."""
        indices = range(self.first_index, self.first_index + self.turn.n)
        return [self._request(index) for index in indices]

    def _request(self, index: int) -> ModelRequest:
        """With a seed, choice i samples with seed + i: the same seed would give the same choice."""
        gconfig = self.turn.gconfig
        if index and gconfig.seed is not None:
            gconfig = replace(gconfig, seed=gconfig.seed + index)
        if gconfig.grammar is not None and not self.turn.is_raw:
            grammar = after_reasoning(gconfig.grammar, self.session.format, self.plan.input_ids)
            gconfig = replace(gconfig, grammar=grammar)
        return ModelRequest(
            rid=f"{self.id}/{index}" if index else self.id,
            input_ids=self.plan.input_ids,
            gconfig=gconfig,
            metadata=self.turn.labels,
            image_data=self.turn.image_data or None,
        )


def new_id(prefix: str) -> str:
    return f"{prefix}{uuid.uuid4().hex}"


def new_call(session: Session, turn: Turn, prefix: str) -> Call:
    """``prefix``: of the answer's id.

    Raises:
        RequestError, TokenError: the messages cannot be rendered, or leave no room for an answer.
    """
    plan = read_prompt(session, turn)
    check_room(session, turn, len(plan.input_ids))
    return Call(session=session, turn=turn, plan=plan, id=new_id(prefix), created_at=time.time())


def read_prompt(session: Session, turn: Turn) -> PromptPlan:
    """The ids to send and where they hang in the conversation tree.

    Raises:
        ContextLengthError: the text alone is more than the context can hold.
    """
    check_size(session, sum(map(_num_chars, turn.messages)))
    return session.cache.plan(
        turn.messages,
        turn.tools,
        session.format,
        session.chat_template_type,
        turn.chat_template_kwargs,
    )


def _num_chars(message: JsonObject) -> int:
    """Of its text; images are not looked at: the whole history is asked, at every turn."""
    content = message.get("content")
    if isinstance(content, str):
        return len(content)
    return sum(len(str(part.get("text") or "")) for part in content or ())


def check_size(session: Session, num_chars: int) -> None:
    """Refuse what cannot fit before it is encoded: that would hold up everybody for minutes."""
    limit = session.engine.max_seq_len
    if num_chars > limit and num_chars > limit * session.format.vocabulary.longest:
        least = num_chars // session.format.vocabulary.longest
        raise ContextLengthError(prompt_tokens=least, limit=limit, is_least=True)


def check_room(session: Session, turn: Turn, num_prompt_tokens: int) -> None:
    """Raises RequestError where not even one new token can follow the prompt."""
    if num_prompt_tokens == 0:
        raise RequestError("the chat template makes no text of these messages", param="messages")
    limit = session.engine.max_seq_len
    if token_budget(turn.gconfig, num_prompt_tokens, limit) < 1:
        limits = [limit, turn.gconfig.max_tokens or limit]
        raise ContextLengthError(prompt_tokens=num_prompt_tokens, limit=min(limits))
