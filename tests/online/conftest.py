"""Turns as a gateway would report them, without a gateway."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest

from agent_rl.api.session import Session
from agent_rl.engine.scripted import ScriptedEngine
from agent_rl.gateway.listener import ServedCall, TurnListener
from agent_rl.record.cache import InteractionCache
from agent_rl.tokens.format import ChatFormat
from agent_rl.types import JsonObject, ModelResponse

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(slots=True)
class Conversation:
    """A client of one session: each ``say`` is a request, answered by the given text."""

    listener: TurnListener
    tokenizer: PreTrainedTokenizerBase
    session_id: str = "s1"
    user_id: str | None = None
    messages: list[JsonObject] = field(default_factory=list)
    session: Session | None = None

    def __post_init__(self) -> None:
        self.session = self.session or Session(
            engine=ScriptedEngine([]),
            format=ChatFormat.of(self.tokenizer),
            cache=InteractionCache(),
        )

    def ask(
        self,
        messages: list[JsonObject],
        *,
        turn_type: str = "main",
        is_done: bool = False,
    ) -> ServedCall:
        """The request arrives; it is answered by ``reply``."""
        call = ServedCall(
            session_id=self.session_id,
            user_id=self.user_id,
            turn_type=turn_type,
            session_done=is_done,
            messages=list(messages),
            session=self.session,
            arrived_at=time.time(),
        )
        self.listener.on_request(call)
        return call

    def reply(self, call: ServedCall, text: str) -> JsonObject:
        """The answer is recorded: two sampled tokens at least, log-probs -0.1, -0.2, ..."""
        session = call.session
        plan = session.cache.plan(call.messages, None, session.format, "hf")
        ids = [*self.tokenizer.encode(text), self.tokenizer.eos_token_id] if text else []
        name = f"chatcmpl-{len(session.cache)}"
        message = {"role": "assistant", "content": text}
        response = ModelResponse(
            input_tokens=plan.input_ids,
            output_tokens=ids,
            output_logprobs=[-0.1 * (i + 1) for i in range(len(ids))],
            output_versions=[0] * len(ids),
            stop_reason="stop",
        )
        session.cache.append(
            plan.interaction(
                interaction_id=name, model_response=response, output_message_list=[message]
            )
        )
        self.listener.on_answer(call, name)
        if call.session_done:
            self.listener.on_session_end(call.session_id)
        return message

    def say(self, text: str, answer: str, **options: object) -> JsonObject:
        """A whole turn: what the user says joins the conversation, and so does the answer."""
        self.messages.append({"role": "user", "content": text})
        message = self.reply(self.ask(self.messages, **options), answer)
        self.messages.append(message)
        return message


@pytest.fixture
def talk(tokenizer: PreTrainedTokenizerBase) -> Callable[..., Conversation]:
    def make(listener: TurnListener, session_id: str = "s1", **fields: object) -> Conversation:
        return Conversation(listener, tokenizer, session_id, **fields)

    return make
