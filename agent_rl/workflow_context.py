"""What the running episode is: an evaluation or training, which task, and its own randomness.

Kept in a contextvar, so concurrent episodes on one event loop never see one another's value.
"""

from __future__ import annotations

import random
from contextvars import ContextVar
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkflowContext:
    """``episode`` stands for the running one: by it a client knows who calls."""

    is_eval: bool = False
    task_id: str | None = None
    seed: str | None = None
    noise: random.Random | None = None
    episode: object | None = None

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


def enter_slot(slot: int) -> None:
    """An episode begins in this slot of its group; where there is a seed, with its own numbers."""
    context = get()
    noise = None if context.seed is None else random.Random(f"{context.seed}/{slot}")
    set(replace(context, noise=noise, episode=object()))


def draw() -> float:
    """A random number for the running episode.

    From its own generator, so that what it samples does not depend on what runs beside it; without
    one from Python's, which a trainer seeds.
    """
    own = get().noise
    return random.random() if own is None else own.random()


def stat_scope() -> str:
    """The name of the tracker for metrics of this episode: pass it to ``stats_tracker.get``."""
    return get().scope
