"""What waits, runs and is done: the collector's state, without threads and without a loop.

A Lane is one stream of groups under its own limits: training, evaluation, or one call of
``rollout_batch``. Every group is in exactly one of waiting, running, accepted, rejected, failed.
The owner holds a lock around every use.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from agent_rl.errors import AgentRLError
from agent_rl.rollout.staleness import Limits
from agent_rl.rollout.workflow import RolloutWorkflow
from agent_rl.types import JsonObject, TensorDict

Status: TypeAlias = Literal["accepted", "rejected", "failed"]
STALE = "stale"
AcceptFn: TypeAlias = Callable[[TensorDict], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """One datum on its way; ``number`` is the order of creation, ``task_id`` the user's name.

    ``draw`` is its number in the run's sequence of training data, None outside of it.
    """

    number: int
    task_id: str
    data: JsonObject
    workflow: RolloutWorkflow
    should_accept: AcceptFn | None
    is_eval: bool
    draw: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """``reason`` is a short word for why there is no trajectory; ``error`` the last failure."""

    submission: Submission
    status: Status
    trajectory: TensorDict | None = None
    reason: str = ""
    error: AgentRLError | None = None


@dataclass(slots=True, kw_only=True)
class Counts:
    """submitted = waiting + running + accepted + rejected + failed, in groups, at any time.

    ``restored`` of the accepted came out of the journal; ``dropped_stale`` of the rejected did,
    but were too old.
    """

    submitted: int = 0
    waiting: int = 0
    running: int = 0
    accepted: int = 0
    rejected: int = 0
    failed: int = 0
    restored: int = 0
    dropped_stale: int = 0

    @property
    def fruitless(self) -> int:
        return self.rejected + self.failed


@dataclass(slots=True, kw_only=True, eq=False)
class Lane:
    """
    Args:
        limits: how many may run.
        counts: of all lanes of the same kind; kept true by every method here.
        keeps_all: also what was not accepted is handed over (``rollout_batch``).

    ``accepted`` is the count of the staleness formula, ``counts.accepted`` that of this process.
    ``ended`` counts every verdict since the last ``take``, what was left over included;
    ``fruitless``, ``reasons`` and ``last_error`` speak of those since the last acceptance.
    """

    limits: Limits
    counts: Counts
    keeps_all: bool = False
    error: AgentRLError | None = None
    waiting: deque[Submission] = field(default_factory=deque)
    running: dict[int, Submission] = field(default_factory=dict)
    finished: list[Finished] = field(default_factory=list)
    accepted: int = 0
    ended: int = 0
    fruitless: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    last_error: AgentRLError | None = None

    def add(self, submission: Submission) -> None:
        self.waiting.append(submission)
        self.counts.submitted += 1
        self.counts.waiting += 1

    def start(self, version: int) -> list[Submission]:
        """Move what the limits allow from waiting to running."""
        self.accepted = max(self.accepted, self.limits.consumed(version))
        started = []
        while self.waiting and self.capacity(version) > 0:
            submission = self.waiting.popleft()
            self.running[submission.number] = submission
            started.append(submission)
        self.counts.waiting -= len(started)
        self.counts.running += len(started)
        return started

    def end(self, done: Finished) -> None:
        """Book the result; whatever it is, the group's room is free again."""
        del self.running[done.submission.number]
        self.ended += 1
        self.counts.running -= 1
        setattr(self.counts, done.status, getattr(self.counts, done.status) + 1)
        if done.status == "accepted":
            self.accepted += 1
            self.fruitless = 0
            self.reasons.clear()
        else:
            self.fruitless += 1
            self.reasons[done.reason] += 1
            self.last_error = done.error or self.last_error
        if self.keeps_all or done.status == "accepted":
            self.finished.append(done)

    def restore(self, done: Finished) -> None:
        """Book a verdict of an earlier process, which never ran here."""
        self.ended += 1
        self.counts.submitted += 1
        if done.status == "accepted":
            self.counts.accepted += 1
            self.counts.restored += 1
            self.accepted += 1
            self.finished.append(done)
        else:
            self.counts.rejected += 1
            self.counts.dropped_stale += done.reason == STALE

    def take(self, count: int) -> list[Finished]:
        """The oldest ``count`` finished by creation; the rest stays for the next call."""
        self.finished.sort(key=lambda done: done.submission.number)
        taken, self.finished = self.finished[:count], self.finished[count:]
        self.ended = len(self.finished)
        return taken

    def drop_waiting(self) -> None:
        """Take back what has not started."""
        self.counts.submitted -= len(self.waiting)
        self.counts.waiting -= len(self.waiting)
        self.waiting.clear()

    def capacity(self, version: int) -> int:
        running = len(self.running)
        return self.limits.capacity(version=version, accepted=self.accepted, running=running)

    def is_stuck(self, version: int) -> bool:
        """Nothing runs and nothing may start: no further result can come."""
        return not self.running and (not self.waiting or self.capacity(version) <= 0)

    def unconsumed(self) -> list[Submission]:
        """Everything not yet handed over, in order of creation."""
        done = [finished.submission for finished in self.finished]
        pending = [*done, *self.running.values(), *self.waiting]
        return sorted(pending, key=lambda submission: submission.number)

    def explain(self) -> str:
        """Why groups gave nothing, most frequent first: "32 x filter, 3 x agent"."""
        return ", ".join(f"{count} x {reason}" for reason, count in self.reasons.most_common())
