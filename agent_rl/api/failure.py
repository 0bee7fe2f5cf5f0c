"""What an error looks like on the wire: status, OpenAI error object, and whether to try again.

Only an EngineError may pass when it is tried again; every other answer is final, because a client
that retries would pay for the generation once more and be refused once more.
"""

from __future__ import annotations

from dataclasses import dataclass

from agent_rl.errors import AgentRLError, EngineError, EpisodeError, RequestError, TokenError
from agent_rl.types import JsonObject

_TYPES = {400: "invalid_request_error", 404: "not_found_error", 429: "rate_limit_error"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    status: int
    body: JsonObject
    is_final: bool


def failure_of(error: AgentRLError) -> Failure:
    if isinstance(error, RequestError):
        return _failure(error.status, str(error), param=error.param, code=error.code)
    if isinstance(error, TokenError):
        return _failure(400, str(error), param="messages")
    if isinstance(error, EngineError):
        return _failure(500, str(error), code="engine_error", is_final=False)
    code = f"{error.boundary}_error" if isinstance(error, EpisodeError) else None
    return _failure(500, str(error), code=code)


def _failure(
    status: int,
    message: str,
    *,
    param: str | None = None,
    code: str | None = None,
    is_final: bool = True,
) -> Failure:
    error = {
        "message": message,
        "type": _TYPES.get(status, "server_error"),
        "param": param,
        "code": code,
    }
    return Failure(status=status, body={"error": error}, is_final=is_final)
