"""What an error looks like on the wire: status, OpenAI error object, and whether to try again.

Only an EngineError and a refusal that names a delay may pass when it is tried again; every other
answer is final, because a client that retries would pay for the generation once more and be refused
once more.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from agent_rl.errors import (
    AgentRLError,
    EngineError,
    EpisodeError,
    RefusedError,
    RequestError,
    TokenError,
)
from agent_rl.types import JsonObject

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    status: int
    body: JsonObject
    is_final: bool
    retry_after_s: int | None = None


def failure_of(error: AgentRLError) -> Failure:
    if isinstance(error, RefusedError):
        failure = _failure(error.status, str(error), param=error.param, code=error.code)
        delay = error.retry_after_s
        return replace(failure, is_final=delay is None, retry_after_s=delay)
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
    other = "invalid_request_error" if status < 500 else "server_error"
    error = {
        "message": message,
        "type": _TYPES.get(status, other),
        "param": param,
        "code": code,
    }
    return Failure(status=status, body={"error": error}, is_final=is_final)
