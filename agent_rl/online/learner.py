"""OnlineLearner: follows the turns that a gateway serves and makes samples of them.

A listener of the gateway: its methods run on the gateway's loop and never wait; judges run as tasks
beside the serving. Each main turn is settled exactly once: judged after the next message, or at the
session's end without one. The trainer takes the samples from another thread with ``drain``. Knows
neither sockets nor losses.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from agent_rl.config import OnlineConfig
from agent_rl.errors import AgentRLError, ConfigError, EpisodeError, RefusedError, boundary
from agent_rl.gateway.listener import ServedCall
from agent_rl.online.hints import HintSource
from agent_rl.online.judge import record_votes
from agent_rl.online.methods import LESSONS, Lesson, Outcome
from agent_rl.online.passive import SessionTurns, Turn
from agent_rl.online.sample import Owned
from agent_rl.online.sample_journal import SampleJournal
from agent_rl.online.teacher import Teacher, TeacherScores
from agent_rl.online.turn_store import TurnStore, turn_row
from agent_rl.online.verdict import NOT_JUDGED, Judge, JudgedTurn, Verdict
from agent_rl.online.waiting import WaitingSamples
from agent_rl.stats import tracker as stats_tracker
from agent_rl.types import TensorDict

T = TypeVar("T")
logger = logging.getLogger(__name__)

_CLOSE_S = 5.0  # how long ``close`` waits for judges that do not end when they are told to
_MAX_HINT_CHARS = 10_000


class OnlineLearner:
    """
    Args:
        judge: scores a turn; needed by the methods binary and combine.
        hints, teacher: needed by opd and combine.
        store: where judged turns are written; None: nowhere.
        journal: where samples wait as well, opened by its owner; None: nowhere.
    """

    def __init__(
        self,
        config: OnlineConfig | None = None,
        *,
        judge: Judge | None = None,
        hints: HintSource | None = None,
        teacher: Teacher | None = None,
        store: TurnStore | None = None,
        journal: SampleJournal | None = None,
    ) -> None:
        self.config = config = config or OnlineConfig()
        _check_parts(config, judge, hints, teacher)
        self.num_turns = 0
        self._judge, self._hints, self._teacher = judge, hints, teacher
        self._store = store
        self._waiting = WaitingSamples(config, journal)
        self._sessions: dict[str, SessionTurns] = {}
        self._calls: dict[ServedCall, SessionTurns] = {}
        self._judging: dict[asyncio.Task[None], SessionTurns] = {}
        self._is_gated = threading.Event()
        self._has_shed = False
        self._is_closing = False

    # The gateway's side

    def on_request(self, call: ServedCall) -> None:
        """Raises RefusedError (503) while gated."""
        if self._is_gated.is_set():
            raise RefusedError(
                503,
                "submission is paused while the weights are updated; try again",
                code="weight_update",
                retry_after_s=1,
            )
        turns = self._sessions.setdefault(
            call.session_id, SessionTurns(session_id=call.session_id, session=call.session)
        )
        if call.user_id is not None:
            turns.user_ids.add(call.user_id)
        self._calls[call] = turns
        if call.turn_type != "main":
            return
        turn = turns.follow(call.messages, call.session.cache.history(call.messages))
        if turn is not None:
            self._begin(turns, turn)

    def on_answer(self, call: ServedCall, interaction_id: str | None) -> None:
        turns = self._calls.pop(call, None)
        if turns is None:
            return
        if interaction_id is not None:
            interaction = call.session.cache[interaction_id]
            if call.turn_type != "main" or not interaction.path.num_output:
                turns.answered_aside(interaction)
            else:
                turns.answered(interaction)
                self.num_turns += 1
            stats_tracker.get("online").scalar(main_turn=float(call.turn_type == "main"))
        if turns.is_ended:
            self._settle_rest(turns)

    def on_reward(self, session_id: str, interaction_id: str) -> bool:
        """A turn's own reward stands in for the judge's score, until the turn is settled."""
        turns = self._sessions.get(session_id)
        if turns is None or turns.is_forgotten or self.config.method == "opd":
            return False
        return turns.awaits(turns.session.cache[interaction_id])

    def on_session_end(self, session_id: str) -> None:
        turns = self._sessions.pop(session_id, None)
        if turns is not None:
            self._settle_rest(turns)

    # The trainer's side

    def restore(self, version: int) -> None:
        """Take up the samples of an earlier process that these weights have not learnt.

        Before anything is served. Raises JournalError.
        """
        self._waiting.restore(version)

    def drain(self, batch_size: int, *, version: int | None = None) -> list[TensorDict]:
        """The next ``batch_size`` samples as trajectories, in the order they were settled.

        Waits for them. Raises CollectorError once the learner is closed.

        Args:
            version: of the weights that are to learn; ``config.max_staleness`` counts from it.
        """
        return self._waiting.drain(batch_size, version)

    def note_trained(self, version: int) -> None:
        """What was drained is in the weights of this version, which are served now."""
        self._waiting.note_trained(version)

    def note_saved(self, version: int) -> None:
        """Weights of this version are on disk: a restart goes on from them, or later ones."""
        self._waiting.note_saved(version)

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Around a weight update. With ``update_mode`` gate, new requests get 503 inside."""
        if self.config.update_mode == "gate":
            self._is_gated.set()
        try:
            yield
        finally:
            self._is_gated.clear()

    # Everybody's

    @property
    def num_waiting(self) -> int:
        """Samples that the trainer has not taken yet."""
        return len(self._waiting)

    @property
    def num_sessions(self) -> int:
        """Sessions that are open."""
        return len(self._sessions)

    @property
    def num_judging(self) -> int:
        return len(self._judging)

    async def judged(self) -> None:
        """Returns when no judge is running. On the gateway's loop."""
        while self._judging:
            await asyncio.wait(list(self._judging))

    async def forget(self, *, session_id: str | None = None, user_id: str | None = None) -> int:
        """Delete samples and stored turns of a session, or of a user; how many there were.

        On the gateway's loop. Their sessions that are open now are not learnt from any more. The
        record of a session is the gateway's.
        """
        if (session_id is None) == (user_id is None):
            raise ValueError("forget by session_id or by user_id, one of both")

        value = session_id if user_id is None else user_id
        assert value is not None, "one of both is given"
        names = self._waiting.names_of(value)

        def is_theirs(owner: Owned) -> bool:
            ids = owner.user_ids if session_id is None else {owner.session_id}
            return not names.isdisjoint(ids)

        everyone = (*self._sessions.values(), *self._calls.values(), *self._judging.values())
        for turns in everyone:
            turns.is_forgotten = turns.is_forgotten or is_theirs(turns)
        count = await self._waiting.delete(is_theirs)
        if self._store is not None:
            delete = partial(self._store.delete, session_id=session_id, user_id=user_id)
            count += await asyncio.to_thread(delete)
        return count

    async def close(self) -> None:
        """Cancel judges and let nobody wait in ``drain``. On the gateway's loop.

        What is still open is settled without a score, so that it is stored; what nobody has drained
        yet still can be.
        """
        self._is_closing = True
        self._waiting.queue.close()
        if self._judging:
            judging = dict(self._judging)
            for task in judging:
                task.cancel()
            _, stuck = await asyncio.wait(judging, timeout=_CLOSE_S)
            if stuck:
                logger.warning("%d judges did not end within %g s", len(stuck), _CLOSE_S)
        for turns in list(self._sessions.values()):
            self._settle_rest(turns)
        if self._store is not None:
            await asyncio.to_thread(self._store.close)
        await self._waiting.close()

    # Settling

    def _begin(self, turns: SessionTurns, turn: Turn) -> None:
        if len(self._judging) >= self.config.queue_size:
            self._shed()
            return
        task = asyncio.get_running_loop().create_task(self._learn(turns, turn))
        self._judging[task] = turns
        task.add_done_callback(partial(self._judged, turns, turn))

    def _judged(self, turns: SessionTurns, turn: Turn, task: asyncio.Task[None]) -> None:
        """What a task raises is a fault of ours: ``drain`` passes it on."""
        del self._judging[task]
        if task.cancelled():
            self._settle(turns, turn, NOT_JUDGED, None, None)
        elif (error := task.exception()) is not None:
            self._waiting.queue.close(cause=error)

    async def _learn(self, turns: SessionTurns, turn: Turn) -> None:
        async with self._waiting.queue.place():
            await self._judge_and_settle(turns, turn)

    async def _judge_and_settle(self, turns: SessionTurns, turn: Turn) -> None:
        assert turn.next_state is not None, "a turn is judged after its next state"
        judged = JudgedTurn(
            messages=turn.interaction.messages,
            answer=turn.interaction.output_message_list[0],
            next_state=turn.next_state,
            tools=turn.interaction.tools,
        )
        if turn.interaction.reward is None:
            verdict, hint = await asyncio.gather(self._verdict(judged), self._hint(judged))
        else:  # nobody has to be asked what it was worth
            verdict, hint = NOT_JUDGED, await self._hint(judged)
        teacher = None
        if hint is not None and self._teacher is not None:
            scoring = self._teacher.scores(turns.session, turn.interaction, hint)
            teacher = await self._or_none(scoring)
        self._settle(turns, turn, verdict, hint, teacher)

    async def _verdict(self, judged: JudgedTurn) -> Verdict:
        if self._judge is None:
            return NOT_JUDGED
        verdict = await self._or_none(self._judge.judge(judged))
        if verdict is not None and not isinstance(verdict, Verdict):
            logger.warning("%s returned %r, which is no Verdict", type(self._judge), verdict)
            verdict = None
        return Verdict(score=0.0) if verdict is None else verdict

    async def _hint(self, judged: JudgedTurn) -> str | None:
        if self._hints is None:
            return None
        hint = await self._or_none(self._hints.hint(judged))
        if hint is not None and len(hint) > _MAX_HINT_CHARS:
            logger.warning("a hint of %d characters is not accepted", len(hint))
            hint = None
        stats_tracker.get("online").scalar(hint_accepted=float(hint is not None))
        return hint

    async def _or_none(self, work: Coroutine[Any, Any, T]) -> T | None:
        """What a judge or teacher returns; None, with a warning, where it raises.

        Only ``close`` cancels a turn: any other CancelledError is the judge's own.
        """
        try:
            with boundary("judge"):
                return await work
        except asyncio.CancelledError:
            if self._is_closing:
                raise
            error: BaseException = EpisodeError("judge raised CancelledError", boundary="judge")
        except AgentRLError as raised:
            error = raised
        stats_tracker.get("online").scalar(judge_error=1.0)
        logger.warning("a turn was not judged: %s", error)
        return None

    def _settle_rest(self, turns: SessionTurns) -> None:
        """The session is over: what is still open has no next state."""
        for turn in turns.end():
            self._settle(turns, turn, NOT_JUDGED, None, None)

    def _settle(
        self,
        turns: SessionTurns,
        turn: Turn,
        verdict: Verdict,
        hint: str | None,
        teacher: TeacherScores | None,
    ) -> None:
        turn.is_settled = True
        if turns.is_forgotten:
            return
        outcome = Outcome(
            has_next_state=turn.next_state is not None,
            score=verdict.score,
            given=turn.interaction.reward,
            teacher=teacher,
            num_effective=turns.num_effective,
        )
        lesson = LESSONS[self.config.method](outcome)
        is_trained = lesson is not None and lesson.is_trained
        turns.num_effective += is_trained
        record_votes(verdict)
        _record_lesson(lesson, turn)
        if lesson is not None and not self._is_closing:
            self._put(turns, turn, lesson)
        if self._store is not None:
            self._store.append(turn_row(turns, turn, verdict, hint, lesson))

    def _put(self, turns: SessionTurns, turn: Turn, lesson: Lesson) -> None:
        if not lesson.is_trained and len(self._waiting) >= self.config.queue_size:
            self._shed()
            return
        self._waiting.put(turns, turn, lesson)

    def _shed(self) -> None:
        """The trainer is so far behind that a turn is not learnt from; serving is not held up."""
        stats_tracker.get("online").scalar(shed=1.0)
        if not self._has_shed:
            self._has_shed = True
            logger.warning(
                "online.queue_size=%d turns wait for the trainer; further ones are not learnt from",
                self.config.queue_size,
            )


def _check_parts(
    config: OnlineConfig, judge: Judge | None, hints: HintSource | None, teacher: Teacher | None
) -> None:
    wanted = {"binary": ("judge",), "opd": ("hints", "teacher")}
    given = {"judge": judge, "hints": hints, "teacher": teacher}
    for name in wanted.get(config.method, ("judge", "hints", "teacher")):
        if given[name] is None:
            raise ConfigError(f"online.method={config.method} needs OnlineLearner(..., {name}=)")


def _record_lesson(lesson: Lesson | None, turn: Turn) -> None:
    tracker = stats_tracker.get("online")
    tracker.scalar(
        trained=float(lesson is not None and lesson.is_trained),
        promoted=float(lesson is not None and lesson.is_promoted),
        num_sampled_tokens=turn.interaction.path.num_output,
    )
    if lesson is not None and lesson.is_trained and lesson.reward is not None:
        tracker.scalar(reward=lesson.reward)
