"""SessionLog: started and passive sessions on disk, so that a killed gateway goes on with them.

What is noted while a write runs goes into the next one: one fsync serves all who wait. A turn is
written against the interactions before it, so an entry is as long as what is new, and what could
not be written is written first the next time: a gap would make the turns after it unreadable. Keys
are on disk as digests only. Without a journal nothing is kept.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import get_args

from agent_rl.api.session import Session
from agent_rl.errors import JournalError
from agent_rl.gateway.marks import user_of
from agent_rl.gateway.sessions import EndReason, LiveSession, Origin, Sessions
from agent_rl.record.codec import decode_interaction, encode_interaction
from agent_rl.record.interaction import InteractionWithTokenLogpReward
from agent_rl.record.journal import Journal
from agent_rl.types import JsonObject

logger = logging.getLogger(__name__)

# How a tokenizer writes this tells it from the others: ids mean nothing to another one.
PROBE = "Rain, 0123 häßlich 你好 🙂\n\tdef f(x): return x  # <|im_end|></s>"
_MANY_STALE = 10_000  # entries of forgotten sessions at which the file is written anew

Entry = Callable[[], JsonObject]


class SessionLog:
    """Forgets everything until it is opened. On the gateway's loop."""

    def __init__(self) -> None:
        self._journal: Journal | None = None
        self._sessions: Callable[[], Sequence[LiveSession]] = list
        self._probe: Sequence[int] = ()
        self._waiting: list[Entry] = []
        self._next_write: asyncio.Task[JournalError | None] | None = None
        self._writes: set[asyncio.Task[JournalError | None]] = set()
        self._writing = asyncio.Lock()
        self._num_stale = 0

    def open(
        self,
        journal: Journal,
        sessions: Callable[[], Sequence[LiveSession]],
        probe: Sequence[int],
    ) -> None:
        """
        Args:
            journal: closed by ``close``.
            sessions: all that are held, for writing the journal anew.
            probe: the ids of PROBE.
        """
        self._journal, self._sessions, self._probe = journal, sessions, probe

    def started(self, live: LiveSession) -> None:
        self._note(live, partial(_start_entry, live))

    def turn(self, live: LiveSession, interaction: InteractionWithTokenLogpReward) -> None:
        if live.is_held:  # else the call ran when its session ended or was forgotten
            self._note(live, partial(_turn_entry, live, interaction))

    def rewarded(self, live: LiveSession, interaction_id: str) -> None:
        if live.is_held:
            self._note(live, partial(_reward_entry, live, interaction_id))

    def ended(self, live: LiveSession) -> None:
        self._note(live, partial(_end_entry, live))

    def dropped(self, live: LiveSession) -> None:
        if live.origin != "attached":
            self._num_stale += 3 + len(live.session.cache)
        self._note(live, lambda: {"kind": "drop", "session_id": live.session_id})

    def _note(self, live: LiveSession, entry: Entry) -> None:
        if self._journal is None or live.origin == "attached":
            return
        self._waiting.append(entry)
        self._write_soon(self._journal)

    def _write_soon(self, journal: Journal) -> None:
        if self._next_write is None:
            self._next_write = asyncio.create_task(self._write(journal))
            self._writes.add(self._next_write)
            self._next_write.add_done_callback(self._writes.discard)

    async def on_disk(self) -> None:
        """Returns when all that was noted so far is written.

        Raises:
            JournalError: it cannot be written.
        """
        if self._waiting and self._journal is not None:
            self._write_soon(self._journal)
        # The next write comes after the one that runs, and writes what that one could not.
        write = self._next_write or next(iter(self._writes), None)
        # A client that hangs up does not end the write that others wait for.
        if write is not None and await asyncio.shield(write) is not None:
            raise JournalError("the gateway's journal cannot be written; its log says why")

    async def forget_dropped(self) -> None:
        """Leave nothing in the file but the sessions that are held.

        Raises:
            JournalError: it cannot be written.
        """
        await self.on_disk()
        if self._journal is not None:
            async with self._writing:
                await self._rewrite(self._journal)

    async def close(self) -> None:
        """Write what waits."""
        if self._waiting and self._journal is not None:
            self._write_soon(self._journal)
        while self._writes:
            await asyncio.wait(list(self._writes))
        if self._journal is not None:
            self._journal.close()
            self._journal = None

    async def _write(self, journal: Journal) -> JournalError | None:
        async with self._writing:
            self._next_write = None
            entries, self._waiting = self._waiting, []
            try:
                await asyncio.to_thread(_append, journal, entries)
            except JournalError as error:
                logger.error("sessions are not on disk: %s", error)
                self._waiting = [*entries, *self._waiting]
                return error
            if self._num_stale >= _MANY_STALE:
                await self._shorten(journal)
        return None

    async def _shorten(self, journal: Journal) -> None:
        try:
            await self._rewrite(journal)
        except JournalError as error:
            logger.warning("ended sessions stay in the journal for now: %s", error)

    async def _rewrite(self, journal: Journal) -> None:
        self._num_stale = 0
        await asyncio.to_thread(_rewrite, journal, self._sessions(), self._probe)


def restore(journal: Journal, sessions: Sessions, probe: Sequence[int]) -> None:
    """Hold the sessions of an earlier process again, and leave only them in the journal.

    Raises:
        JournalError: an entry is none of ours, or the ids are of another tokenizer.
    """
    held: dict[str, LiveSession] = {}
    for line in Journal.read(journal.path):
        if line.get("probe", list(probe)) != list(probe):
            raise JournalError(
                f"the sessions in {journal.path} are of a model with another tokenizer; give this "
                "one another gateway.journal"
            )
        for entry in line.get("entries", ()):
            _replay(entry, held, sessions.new_session)
    for live in held.values():
        sessions.add(live)
    _rewrite(journal, list(held.values()), probe)


def _rewrite(journal: Journal, sessions: Sequence[LiveSession], probe: Sequence[int]) -> None:
    lines = ({"entries": list(_entries_of(live))} for live in sessions)
    journal.rewrite(itertools.chain([{"probe": list(probe), "entries": []}], lines))


def _append(journal: Journal, entries: Sequence[Entry]) -> None:
    journal.append({"entries": [entry() for entry in entries]})


def _replay(
    entry: JsonObject, held: dict[str, LiveSession], new_session: Callable[[], Session]
) -> None:
    try:
        kind, name = entry["kind"], entry["session_id"]
        if kind == "start" and name not in held:
            held[name] = _live(entry, new_session())
        elif kind == "start":
            held[name].key = _key(entry)
        elif kind == "drop":
            held.pop(name, None)
        elif name in held:
            _REPLAYS[kind](held[name], entry)
    except (KeyError, TypeError, ValueError) as error:
        raise JournalError(f"this is no entry of a gateway's journal: {error!r}") from error


def _live(entry: JsonObject, session: Session) -> LiveSession:
    if entry["origin"] not in get_args(Origin):
        raise ValueError(f"origin is {entry['origin']!r}")
    return LiveSession(
        session_id=entry["session_id"],
        session=session,
        origin=entry["origin"],
        user_id=entry["user_id"],
        task_id=entry["task_id"],
        attempt=entry["attempt"],
        key=_key(entry),
    )


def _key(entry: JsonObject) -> bytes | None:
    return None if entry["key"] is None else bytes.fromhex(entry["key"])


def _replay_turn(live: LiveSession, entry: JsonObject) -> None:
    cache = live.session.cache
    interaction = decode_interaction(entry["interaction"], cache)
    if interaction.interaction_id not in cache:
        cache.append(interaction)
    user_id = live.user_id or user_of(interaction.metadata or {})
    if user_id is not None:
        live.named_users.add(user_id)


def _replay_reward(live: LiveSession, entry: JsonObject) -> None:
    live.session.cache.set_reward(entry["interaction_id"], entry["reward"])


def _replay_end(live: LiveSession, entry: JsonObject) -> None:
    if entry["reason"] not in get_args(EndReason):
        raise ValueError(f"reason is {entry['reason']!r}")
    live.end_reason = entry["reason"]


_REPLAYS = {"turn": _replay_turn, "reward": _replay_reward, "end": _replay_end}


def _entries_of(live: LiveSession) -> Iterator[JsonObject]:
    """Everything that makes the session as it is now."""
    if live.origin == "attached":
        return
    yield _start_entry(live)
    for name, interaction in live.session.cache.items():
        yield _turn_entry(live, interaction)
        if interaction.reward is not None:
            yield _reward_entry(live, name)
    if live.end_reason is not None:
        yield _end_entry(live)


def _start_entry(live: LiveSession) -> JsonObject:
    return {
        "kind": "start",
        "session_id": live.session_id,
        "origin": live.origin,
        "user_id": live.user_id,
        "task_id": live.task_id,
        "attempt": live.attempt,
        "key": None if live.key is None else live.key.hex(),
    }


def _turn_entry(live: LiveSession, interaction: InteractionWithTokenLogpReward) -> JsonObject:
    encoded = encode_interaction(interaction, live.session.cache)
    return {"kind": "turn", "session_id": live.session_id, "interaction": encoded}


def _reward_entry(live: LiveSession, interaction_id: str) -> JsonObject:
    return {
        "kind": "reward",
        "session_id": live.session_id,
        "interaction_id": interaction_id,
        "reward": live.session.cache[interaction_id].reward,
    }


def _end_entry(live: LiveSession) -> JsonObject:
    return {"kind": "end", "session_id": live.session_id, "reason": live.end_reason}
