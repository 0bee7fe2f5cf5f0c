"""Whose fault an exception is that came out of an agent.

It may be one of an SDK's, which the agent did not catch. Only SDKs that are loaded are asked, so
this module costs nothing in a process that uses none.
"""

from __future__ import annotations

import sys

from agent_rl.errors import Boundary

_SDKS = ("openai", "anthropic")


def owner_of(error: BaseException) -> Boundary:
    """engine: no answer, or a 5xx; client: the request was refused; else the agent itself."""
    for sdk in [sys.modules[name] for name in _SDKS if name in sys.modules]:
        if isinstance(error, (sdk.APIConnectionError, sdk.InternalServerError)):
            return "engine"
        if isinstance(error, sdk.APIError):
            return "client"
    return "agent"
