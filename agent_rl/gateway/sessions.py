"""Sessions by id, by key and by user: who records where, for how long, how many at a time.

    attached   a client's own record, served until it is detached
    started    opened by the admin for one attempt at a task, with a key of its own
    passive    what one user sends under one X-Session-Id; opened by the first call

Keys are kept as SHA-256 digests. Any thread may attach and detach; everything else runs on the
gateway's loop. It knows neither HTTP nor the journal.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from agent_rl.api.session import Session
from agent_rl.errors import RefusedError

Origin: TypeAlias = Literal["attached", "started", "passive"]
EndReason: TypeAlias = Literal["done", "idle", "superseded", "forgotten"]

_NUM_REMEMBERED = 4096  # ended keys that are told from unknown ones


@dataclass(frozen=True, slots=True, kw_only=True)
class Door:
    """Where one session is reached over TCP."""

    session_id: str
    base_url: str
    api_key: str = field(repr=False)


@dataclass(slots=True)
class Usage:
    """``last_used`` and the starts of recent calls by the clock of ``Sessions``."""

    num_running: int = 0
    last_used: float = 0.0
    starts: deque[float] = field(default_factory=deque)


@dataclass(slots=True, kw_only=True, eq=False)
class LiveSession:
    """``attempt`` is None where the caller of ``start`` counts none.

    ``user_id`` owns the session, ``named_users`` are all whom its calls were for. ``is_held`` is
    false once it is dropped, though calls may still run in it.
    """

    session_id: str
    session: Session
    origin: Origin
    user_id: str | None = None
    task_id: str | None = None
    attempt: int | None = None
    key: bytes | None = None
    named_users: set[str] = field(default_factory=set)
    is_held: bool = True
    usage: Usage = field(default_factory=Usage)
    end_reason: EndReason | None = None
    is_discounted: bool = False
    is_over: asyncio.Event = field(default_factory=asyncio.Event)


def digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _nothing(live: LiveSession) -> None:
    pass


class Sessions:
    """
    Args:
        new_session: makes the record and engine side of a session.
        timeout_s: see ``GatewayConfig.session_timeout_s``.
        on_start, on_end, on_drop: called with each session that starts, or gets another key; that
            ends, before its waiters run; that is forgotten.
        clock: seconds; any zero.
    """

    def __init__(
        self,
        new_session: Callable[[], Session],
        *,
        max_sessions: int,
        timeout_s: float | None,
        on_start: Callable[[LiveSession], None] = _nothing,
        on_end: Callable[[LiveSession], None] = _nothing,
        on_drop: Callable[[LiveSession], None] = _nothing,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.new_session = new_session
        self.clock = clock
        self._max_sessions = max_sessions
        self._timeout_s = timeout_s
        self._on_start, self._on_end, self._on_drop = on_start, on_end, on_drop
        self._by_id: dict[str, LiveSession] = {}
        self._by_key: dict[bytes, LiveSession] = {}
        self._by_task: dict[str, LiveSession] = {}
        self._gone: OrderedDict[bytes, None] = OrderedDict()
        self._last_number = 0
        self.num_open = 0  # without attached ones, which the owner of their record counts

    def __iter__(self) -> Iterator[LiveSession]:
        return iter(list(self._by_id.values()))

    def attach(self, session: Session) -> tuple[LiveSession, str]:
        key = f"sk-{secrets.token_urlsafe(32)}"
        name = f"in-{secrets.token_urlsafe(12)}"
        live = LiveSession(session_id=name, session=session, origin="attached", key=digest(key))
        return self.add(live), key

    def detach(self, session_id: str) -> None:
        live = self._by_id.get(session_id)
        if live is not None and live.origin == "attached":
            self.drop(live)

    def start(
        self, task_id: str, attempt: int | None, key: str | None, user_id: str | None
    ) -> tuple[LiveSession, str]:
        """A new session and its key.

        The same attempt once more is the same session, under a new key: the answer to the first
        call was lost. A later attempt ends the earlier one, whose calls then reach no record.

        Raises:
            RefusedError: 409 for a key or an attempt that is in use, 429 at capacity.
        """
        key = key or f"sk-{secrets.token_urlsafe(32)}"
        hashed = digest(key)
        bound = self._by_key.get(hashed)
        if bound is not None and bound.end_reason is None:
            raise RefusedError(
                409, "this key is bound to a session that is open", code="key_in_use"
            )
        if attempt is not None and task_id in self._by_task:
            earlier = self._by_task[task_id]
            if self._is_repeated(earlier, attempt):
                self._bind(earlier, hashed)
                self._on_start(earlier)
                return earlier, key
            self.end(earlier, "superseded")
        self._check_capacity()
        self._last_number += 1
        while f"{task_id}-{self._last_number}" in self._by_id:
            self._last_number += 1
        live = LiveSession(
            session_id=f"{task_id}-{self._last_number}",
            session=self.new_session(),
            origin="started",
            user_id=user_id,
            task_id=task_id,
            attempt=attempt,
            key=hashed,
        )
        self._on_start(self.add(live))
        return live, key

    def passive(self, user_id: str | None, name: str) -> LiveSession:
        """The open session of that user and name, a new one where there is none."""
        session_id = name if user_id is None else f"{user_id}:{name}"
        if session_id in self._by_id:
            return self.of_name(user_id, name)
        self._check_capacity()
        live = LiveSession(
            session_id=session_id, session=self.new_session(), origin="passive", user_id=user_id
        )
        self._on_start(self.add(live))
        return live

    def add(self, live: LiveSession) -> LiveSession:
        """Hold a session that is complete, such as one of an earlier process."""
        live.usage.last_used = self.clock()
        self._by_id[live.session_id] = live
        if live.key is not None:
            self._bind(live, live.key)
        if live.end_reason is not None:
            live.is_over.set()
        elif live.origin != "attached":
            self.num_open += 1
        if live.task_id is not None:
            number = live.session_id.rpartition("-")[2]
            self._last_number = max(self._last_number, int(number))
            if live.attempt is not None:
                self._by_task[live.task_id] = live
        return live

    def of_key(self, key: str) -> LiveSession:
        """Raises RefusedError: 401 for a key of no session, 410 for that of an ended one."""
        hashed = digest(key)
        live = self._by_key.get(hashed)
        if hashed in self._gone or (live is not None and live.end_reason is not None):
            raise RefusedError(410, "the session of this key has ended", code="session_ended")
        if live is None:
            raise RefusedError(
                401, "this key is neither the gateway's nor of a session", code="invalid_api_key"
            )
        return live

    def of_id(self, session_id: str) -> LiveSession:
        """Ended ones too. Raises RefusedError (404)."""
        live = self._by_id.get(session_id)
        if live is None:
            raise RefusedError(
                404,
                f"there is no session {session_id!r}: it never was, it was exported already, or it "
                "was idle for too long",
                code="unknown_session",
            )
        return live

    def of_name(self, user_id: str | None, name: str) -> LiveSession:
        """Raises RefusedError: 404 for a session that is not there, 403 for somebody else's."""
        live = self.of_id(name if user_id is None else f"{user_id}:{name}")
        if live.origin != "passive" or live.user_id != user_id:
            raise RefusedError(403, f"session {name!r} has another key", code="wrong_session")
        return live

    def end(self, live: LiveSession, reason: EndReason) -> None:
        """Ended sessions take no calls; they are kept for the export. Twice is once."""
        if live.end_reason is not None:
            return
        live.end_reason = reason
        self.num_open -= live.origin != "attached"
        live.usage.last_used = self.clock()
        self._on_end(live)
        live.is_over.set()
        if live.origin != "started":
            self.drop(live)  # nobody exports it from here

    def drop(self, live: LiveSession) -> None:
        """Forget a session that has ended, or an attached one; its key counts as an ended one's.

        Twice is once.
        """
        if not live.is_held:
            return
        live.is_held = False
        del self._by_id[live.session_id]
        if live.task_id is not None and self._by_task.get(live.task_id) is live:
            del self._by_task[live.task_id]
        if live.key is not None and self._by_key.get(live.key) is live:
            self._remove_key(live.key)
        self._on_drop(live)

    def expire(self) -> None:
        """End what was not called for ``timeout_s``; forget what ended as long ago."""
        if self._timeout_s is None:
            return
        before = self.clock() - self._timeout_s
        for live in self:
            usage = live.usage
            if live.origin == "attached" or usage.num_running or usage.last_used > before:
                continue
            if live.end_reason is None:
                self.end(live, "idle")
            else:
                self.drop(live)

    def _is_repeated(self, earlier: LiveSession, attempt: int) -> bool:
        """Is this the same attempt once more? Raises RefusedError (409) if it comes too late."""
        number = earlier.attempt or 0
        is_used = bool(earlier.session.cache) or earlier.usage.num_running > 0
        if attempt < number or (attempt == number and (is_used or earlier.end_reason is not None)):
            raise RefusedError(
                409,
                f"attempt {number} at task {earlier.task_id!r} was started before; a retry needs a "
                "higher attempt",
                code="attempt_in_use",
            )
        return attempt == number

    def _bind(self, live: LiveSession, hashed: bytes) -> None:
        if live.key is not None and self._by_key.get(live.key) is live:
            self._remove_key(live.key)
        live.key = hashed
        self._by_key[hashed] = live
        self._gone.pop(hashed, None)

    def _remove_key(self, hashed: bytes) -> None:
        del self._by_key[hashed]
        self._gone[hashed] = None
        while len(self._gone) > _NUM_REMEMBERED:
            self._gone.popitem(last=False)

    def _check_capacity(self) -> None:
        if self.num_open >= self._max_sessions:
            raise RefusedError(
                429,
                f"max_sessions={self._max_sessions} sessions are open",
                code="no_capacity",
                retry_after_s=1,
            )
