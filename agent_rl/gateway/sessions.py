"""Sessions by id and by key: who may record where.

Keys are kept as SHA-256 digests only. Any thread may attach and detach; everything else runs on
the gateway's loop.
"""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from agent_rl.api.session import Session
from agent_rl.errors import RefusedError

Origin: TypeAlias = Literal["attached", "started", "passive"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Door:
    """Where one session is reached over TCP."""

    session_id: str
    base_url: str
    api_key: str = field(repr=False)


@dataclass(slots=True, kw_only=True, eq=False)
class LiveSession:
    session_id: str
    session: Session
    origin: Origin
    user_id: str | None = None


def digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def new_key() -> str:
    return f"sk-{secrets.token_urlsafe(32)}"


class Sessions:
    def __init__(self) -> None:
        self._by_id: dict[str, LiveSession] = {}
        self._by_key: dict[bytes, LiveSession] = {}

    def attach(self, session: Session) -> tuple[LiveSession, str]:
        """Serve an existing session; the key is returned here and kept nowhere."""
        live = LiveSession(
            session_id=f"in-{secrets.token_urlsafe(12)}", session=session, origin="attached"
        )
        key = new_key()
        self._by_id[live.session_id] = live
        self._by_key[digest(key)] = live
        return live, key

    def detach(self, session_id: str) -> None:
        live = self._by_id.pop(session_id, None)
        if live is not None:
            keys = [key for key, owner in self._by_key.items() if owner is live]
            for key in keys:
                del self._by_key[key]

    def of_key(self, key: str) -> LiveSession:
        live = self._by_key.get(digest(key))
        if live is None:
            raise RefusedError(401, "this key belongs to no session", code="invalid_api_key")
        return live
