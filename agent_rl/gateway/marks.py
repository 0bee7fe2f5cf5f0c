"""Marks: what a request says of its turn besides the model's parameters.

Headers win over fields of the body; the fields are taken out of it, because no endpoint of
``api/`` knows them. Either place suffices to end the session.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from agent_rl.errors import RefusedError
from agent_rl.gateway.listener import TurnType
from agent_rl.gateway.wire import Head
from agent_rl.types import JsonObject

_TRUE = frozenset({"1", "true", "yes", "on"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Marks:
    """``user_id`` as the body labels it: ``user``, or Anthropic's ``metadata.user_id``."""

    session_name: str | None
    turn_type: TurnType | None
    session_done: bool
    user_id: str | None


def take_marks(head: Head, body: JsonObject) -> Marks:
    """Raises RefusedError (400) for a mark that is none."""
    in_body = {name: body.pop(name, None) for name in ("session_id", "turn_type", "session_done")}
    done = (head.header(b"x-session-done") or "", str(in_body["session_done"] or ""))
    return Marks(
        session_name=session_name(head, in_body["session_id"]),
        turn_type=_turn_type(head.header(b"x-turn-type") or in_body["turn_type"]),
        session_done=any(value.strip().lower() in _TRUE for value in done),
        user_id=user_of(body),
    )


def session_name(head: Head, in_body: object) -> str | None:
    name = head.session_name
    if name is not None or in_body is None:
        return name
    if not isinstance(in_body, str):
        raise RefusedError(400, "session_id must be a string", param="session_id")
    return in_body


def _turn_type(value: object) -> TurnType | None:
    if value is None or value == "":
        return None
    word = value.strip().lower() if isinstance(value, str) else value
    if word == "main":
        return "main"
    if word == "side":
        return "side"
    raise RefusedError(400, f"the turn type is {value!r}; use main or side", param="turn_type")


def user_of(labels: Mapping[str, Any]) -> str | None:
    """Whom a call is for, by its body or by what the record keeps of it."""
    metadata = labels.get("metadata")
    found = labels.get("user")
    if found is None and isinstance(metadata, dict):
        found = metadata.get("user_id")
    return found if isinstance(found, str) else None
