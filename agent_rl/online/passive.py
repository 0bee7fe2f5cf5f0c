"""SessionTurns: the main turns of one served session, and which message judges which answer.

Nothing is asked of the client: users drive, and the reward of an answer comes from what follows it.

    request 1 [u1]          -> a1
    request 2 [u1 a1 u2]    -> a2      u2 is what a1 led to: turn 1 can be judged now
    request 3 [u1 a1 u2 a2 u3] ...     u3 judges turn 2; the last turn has no next state

A turn is found by the conversation tree: the request that goes on from answer N has N's next state,
in whatever order concurrent requests arrive. Only where the client rewrote its history (compaction)
the newest open turn is taken. Knows neither judges nor tensors nor files; not thread-safe.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from agent_rl.api.session import Session
from agent_rl.record.history import History
from agent_rl.record.interaction import InteractionWithTokenLogpReward
from agent_rl.types import JsonObject


@dataclass(slots=True, kw_only=True, eq=False)
class Turn:
    """One main turn. ``number`` counts from 1 in its session.

    Open until its next state is known or its session ends; then judged, then settled.
    """

    number: int
    interaction: InteractionWithTokenLogpReward
    next_state: JsonObject | None = None
    is_settled: bool = False


@dataclass(slots=True, kw_only=True, eq=False)
class SessionTurns:
    """
    Args:
        user_ids: whose data it is: all whom its calls named.
        num_effective: turns that were trained; it lives until all judges of the session are done,
            which may be after its end.
        is_forgotten: somebody asked that nothing be kept of it.
    """

    session_id: str
    session: Session
    user_ids: set[str] = field(default_factory=set)
    num_effective: int = 0
    num_turns: int = 0
    is_ended: bool = False
    is_forgotten: bool = False
    _open: dict[str, Turn] = field(default_factory=dict)  # by the id of the request
    _seen: dict[str, Turn | None] = field(default_factory=dict)  # all; a side turn is none

    def answered(self, interaction: InteractionWithTokenLogpReward) -> Turn:
        """A main turn was recorded; it is open until ``follow`` or ``end``."""
        self.num_turns += 1
        turn = Turn(number=self.num_turns, interaction=interaction)
        self._seen[interaction.request_id] = turn
        self._open[interaction.request_id] = turn
        return turn

    def answered_aside(self, interaction: InteractionWithTokenLogpReward) -> None:
        """A side turn was recorded: it is never judged and judges nothing."""
        self._seen[interaction.request_id] = None

    def awaits(self, interaction: InteractionWithTokenLogpReward) -> bool:
        """Whether this is the answer of a main turn that is not settled yet."""
        turn = self._seen.get(interaction.request_id)
        return turn is not None and turn.interaction is interaction and not turn.is_settled

    def follow(self, messages: Sequence[JsonObject], history: History) -> Turn | None:
        """The turn whose next state is the last of these messages; None: there is none.

        A turn takes its first next state only: a user who goes back and says something else judges
        it once. An answer that the session holds from before a restart becomes a turn here.
        """
        before = history.interaction
        if before is not None:
            turn = self._open.pop(before.request_id, None)
            if turn is None and before.request_id not in self._seen and before.is_complete:
                turn = self.answered(before)
                del self._open[before.request_id]
        elif history.fork_reason is not None and self._open:
            turn = self._open.pop(next(reversed(self._open)))
        else:
            return None
        if turn is None:
            return None
        if before is not None:
            turn.interaction = before  # of several choices the one that was gone on from
        turn.next_state = messages[-1]
        return turn

    def end(self) -> list[Turn]:
        """The turns that will have no next state any more, in order; without those that a retry
        of the same request replaced."""
        self.is_ended = True
        orphans = self.session.cache.orphans
        left = [t for t in self._open.values() if t.interaction.interaction_id not in orphans]
        self._open.clear()
        return left
