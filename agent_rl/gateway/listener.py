"""TurnListener: how something outside the gateway follows the turns that it serves.

For each generation request: ``on_request`` when it was accepted and is about to be generated, then
``on_answer`` exactly once, when it is recorded (or has failed) and before its last bytes leave. The
methods run on the gateway's event loop, so they must be quick and must not wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

from agent_rl.api.session import Session
from agent_rl.types import JsonObject

TurnType: TypeAlias = Literal["main", "side"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ServedCall:
    """One generation request. Its identity is the object's own: a retry is another call.

    Args:
        messages: the request's messages in chat form, whichever endpoint they came to.
        session_done: the session ends with this call's answer.
        arrived_at: time.time() of its arrival.
    """

    session_id: str
    user_id: str | None
    turn_type: TurnType
    session_done: bool
    messages: Sequence[JsonObject]
    session: Session
    arrived_at: float


class TurnListener(Protocol):
    def on_request(self, call: ServedCall) -> None: ...

    def on_answer(self, call: ServedCall, interaction_id: str | None) -> None:
        """``interaction_id`` is None when nothing was recorded: it failed, or store was false."""

    def on_reward(self, session_id: str, interaction_id: str) -> bool:
        """Somebody set this interaction's reward; returns whether it will be learnt from."""

    def on_session_end(self, session_id: str) -> None: ...
