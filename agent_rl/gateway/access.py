"""Who calls, and which session that is.

    key of a session        that session; X-Session-Id means nothing, a URL must not name another
    admin key               any started or attached session, which the URL or X-Session-Id names
    api key, user's key     that user's passive sessions by name; without a name, no session

Keys are compared as SHA-256 digests in constant time. A name never opens anything by itself.
"""

from __future__ import annotations

import hmac
import secrets
from dataclasses import dataclass
from typing import Literal, TypeAlias

from agent_rl.config import GatewayConfig
from agent_rl.errors import ConfigError, RefusedError
from agent_rl.gateway.sessions import LiveSession, Sessions, digest
from agent_rl.gateway.wire import Head, check_id

Role: TypeAlias = Literal["session", "user", "admin"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """``live`` is the session of a session's key; ``user_id`` belongs to a user's own key."""

    role: Role
    live: LiveSession | None = None
    user_id: str | None = None


class Access:
    """Raises ConfigError when two keys of the config are the same."""

    def __init__(self, config: GatewayConfig, sessions: Sessions) -> None:
        self.admin_key = config.admin_key or secrets.token_urlsafe(32)
        self.api_key = config.api_key or secrets.token_urlsafe(32)
        self._sessions = sessions
        self._admin = digest(self.admin_key)
        self._users: dict[bytes, str | None] = {digest(self.api_key): None}
        self._users |= {digest(key): user_id for user_id, key in config.user_keys.items()}
        if len({self._admin, *self._users}) < 2 + len(config.user_keys):
            raise ConfigError(
                "gateway.admin_key, gateway.api_key and gateway.user_keys must all differ"
            )

    def identify(self, head: Head) -> Caller:
        """
        Raises:
            RefusedError: 401 for no known key, 403 for a URL of another session, 410 for the key
                of a session that has ended.
        """
        key = _key(head)
        hashed = digest(key)
        if hmac.compare_digest(hashed, self._admin):
            return Caller(role="admin")
        for known, user_id in self._users.items():
            if hmac.compare_digest(hashed, known):
                return Caller(role="user", user_id=user_id)
        live = self._sessions.of_key(key)
        if head.url_session not in (None, live.session_id):
            raise RefusedError(403, "this key is of another session", code="wrong_session")
        return Caller(role="session", live=live)

    def require_admin(self, head: Head) -> None:
        """Raises RefusedError: 401 without a key, 403 with another one."""
        if not hmac.compare_digest(digest(_key(head)), self._admin):
            raise RefusedError(403, "this route needs the admin key", code="not_admin")

    def check_new(self, key: str) -> None:
        """Raises RefusedError (400) for a key that no session can have."""
        hashed = digest(key)
        if hmac.compare_digest(hashed, self._admin) or hashed in self._users:
            raise RefusedError(400, "api_key is the gateway's own", param="api_key")
        if not (key and key.isascii() and key.isprintable()) or " " in key:
            raise RefusedError(
                400, "api_key must be printable ASCII without spaces", param="api_key"
            )

    def find(self, caller: Caller, name: str | None) -> LiveSession:
        """The session of a call that makes none.

        Raises:
            RefusedError: 400 without a proper name where one is needed, 403 for another's
                session, 404 for none, 410 for one that has ended.
        """
        if caller.live is not None:
            return caller.live
        if name is None:
            raise RefusedError(
                400, "name the session: X-Session-Id, session_id or /s/ID", param="session_id"
            )
        check_id(name, "the session id")
        if caller.role == "user":
            return self._sessions.of_name(caller.user_id, name)
        live = self._sessions.of_id(name)
        if live.end_reason is not None:
            raise RefusedError(410, f"session {name!r} has ended", code="session_ended")
        return live

    def enter(self, caller: Caller, name: str | None, *, may_open: bool) -> LiveSession | None:
        """The session of a model call; None for a user's call that needs none.

        Raises RefusedError as ``find``, and 429 when a new session finds no room.
        """
        if caller.role != "user":
            return self.find(caller, name)
        if name is None:
            return None
        if may_open:
            return self._sessions.passive(caller.user_id, check_id(name, "the session id"))
        return self.find(caller, name)


def _key(head: Head) -> str:
    if head.key is None:
        raise RefusedError(
            401, "no key was sent: Authorization: Bearer KEY, or x-api-key: KEY", code="no_api_key"
        )
    return head.key
