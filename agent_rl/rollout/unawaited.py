"""An agent that forgot an ``await``: its ``run`` returned a coroutine in place of what it gives."""

from __future__ import annotations

import inspect

from agent_rl.errors import RewardError
from agent_rl.foreign_error import FORGOTTEN


def refuse_unawaited(returned: object, name: str) -> None:
    """Raises RewardError where ``returned`` must be awaited first; Python then warns of nothing."""
    if not inspect.isawaitable(returned):
        return
    kind = type(returned).__name__
    if inspect.iscoroutine(returned):
        kind = f"coroutine ({returned.__qualname__})"
        returned.close()
    raise RewardError(f"{name}.run returned a {kind}, not a reward; {FORGOTTEN}")
