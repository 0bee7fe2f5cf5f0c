"""Whose fault an exception is that came out of an agent.

It may be one of an SDK's, which the agent did not catch, or what a framework made of it
(``raise ... from``). Only SDKs that are loaded are asked, so this module costs nothing in a process
that uses none.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from agent_rl.errors import Boundary

_SDKS = ("openai", "anthropic")


def owner_of(error: BaseException) -> Boundary:
    """engine: no answer, or a 5xx; client: the request was refused; else the agent itself."""
    sdks = [sys.modules[name] for name in _SDKS if name in sys.modules]
    for cause in _causes(error):
        for sdk in sdks:
            if isinstance(cause, (sdk.APIConnectionError, sdk.InternalServerError)):
                return "engine"
            if isinstance(cause, sdk.APIError):
                return "client"
    return "agent"


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error, and what it was explicitly raised from; a group of one is that one."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        if isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
            error = error.exceptions[0]
        else:
            error = error.__cause__
