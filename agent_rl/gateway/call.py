"""Call: one model call as its listener, its session and the journal see it.

Invariants: before the last bytes of an answer leave, its turn is on disk, the listener has heard of
it and its session has ended if it was to end. The listener hears exactly once of each accepted
call, whether it was answered, failed or its client hung up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agent_rl.gateway.listener import ServedCall, TurnListener, TurnType
from agent_rl.gateway.session_log import SessionLog
from agent_rl.gateway.sessions import LiveSession, Sessions
from agent_rl.types import JsonObject


@dataclass(slots=True, kw_only=True, eq=False)
class Call:
    """``sessions`` is None where the call's session is its own, which nobody else can reach."""

    live: LiveSession
    turn_type: TurnType
    session_done: bool
    user_id: str | None
    arrived_at: float
    sessions: Sessions | None
    log: SessionLog
    listener: TurnListener | None
    _served: ServedCall | None = None
    _is_settled: bool = False

    def accept(self, messages: Sequence[JsonObject]) -> None:
        """Raises what the listener raises: it may refuse a call."""
        served = ServedCall(
            session_id=self.live.session_id,
            user_id=self.user_id,
            turn_type=self.turn_type,
            session_done=self.session_done,
            messages=messages,
            session=self.live.session,
            arrived_at=self.arrived_at,
        )
        if self.listener is not None:
            self.listener.on_request(served)
        self._served = served

    async def before_bytes(self, interaction_id: str | None) -> None:
        """Call it before any bytes leave: the first time the answer is recorded, they wait."""
        if not self._is_settled and interaction_id in self.live.session.cache:
            self._settle(interaction_id)
            await self.log.on_disk()

    def answered(self) -> None:
        """The answer is whole, recorded or not."""
        self._settle(None)
        if self.session_done:
            self._end_session()

    def close(self) -> None:
        """Nothing more will happen; what is not recorded by now has failed."""
        self._settle(None)
        if self.sessions is None:
            self._end_session()

    def _settle(self, interaction_id: str | None) -> None:
        if self._served is None or self._is_settled:
            return
        self._is_settled = True
        if interaction_id is not None:
            self._write(interaction_id)
        if self.listener is not None:
            self.listener.on_answer(self._served, interaction_id)
        if interaction_id is not None and self.session_done:
            self._end_session()

    def _write(self, interaction_id: str) -> None:
        """Its siblings too, choices of the same call."""
        cache, index, name = self.live.session.cache, 0, interaction_id
        while self.sessions is not None and name in cache:
            self.log.turn(self.live, cache[name])
            index += 1
            name = f"{interaction_id}/{index}"

    def _end_session(self) -> None:
        if self.sessions is not None:
            self.sessions.end(self.live, "done")
        elif self.listener is not None and self._served is not None:
            self.listener.on_session_end(self.live.session_id)
            self._served = None
