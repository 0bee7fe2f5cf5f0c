"""What the running episode is: an evaluation or training, and which task.

Kept in a contextvar, so concurrent episodes on one event loop never see one another's value.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkflowContext:
    is_eval: bool = False
    task_id: str | None = None

    @property
    def scope(self) -> str:
        return "eval-rollout" if self.is_eval else "rollout"


_current: ContextVar[WorkflowContext | None] = ContextVar("agent_rl_workflow", default=None)


def get() -> WorkflowContext:
    """The context of the episode that is running here."""
    return _current.get() or WorkflowContext()


def set(context: WorkflowContext) -> None:
    """Used by the executor when it starts an episode, never by agents."""
    _current.set(context)


def stat_scope() -> str:
    """The name of the tracker for metrics of this episode: pass it to ``stats_tracker.get``."""
    return get().scope
