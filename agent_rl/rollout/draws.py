"""Draws: the run's one sequence of training data, numbered over all processes of the run.

    drawn 0 1 2 3 4 5 | 6 ...      num_drawn 6
    of these 3 and 5 are not handed over: pending 3 5

The state is what was drawn and not handed over. With a journal every verdict is on disk before it
counts, so a process that restarts from a state asks here, for each datum that it draws again, what
became of it after that state was made: a finished group is handed over, not run a second time.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent_rl.config import Fsync, RolloutConfig
from agent_rl.errors import ConfigError, JournalError
from agent_rl.record.codec import decode_trajectory, encode_trajectory
from agent_rl.record.journal import Journal
from agent_rl.rollout.dataloader import DataSource, as_native
from agent_rl.rollout.lane import STALE, Finished, Submission
from agent_rl.rollout.staleness import head_version
from agent_rl.types import JsonObject

logger = logging.getLogger(__name__)

_KEYS = {"draw", "datum", "status", "reason", "rows"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """One datum of the training stream and its number."""

    number: int
    data: JsonObject


class Draws:
    """
    Args:
        journal: file of the verdicts; None: nothing is kept.

    Raises:
        JournalError: see ``Journal``.
    """

    def __init__(self, journal: Path | None = None, *, fsync: Fsync = "always") -> None:
        self._journal = None if journal is None else Journal(journal, fsync=fsync)
        self._pending: deque[Draw] = deque()
        self._num_drawn = 0
        self._untrained: tuple[int, frozenset[int]] = (0, frozenset())
        self._kept: dict[int, JsonObject] = {}
        try:
            self._kept = {} if journal is None else _verdicts(journal)
        except JournalError:
            self.close()
            raise
        if self._kept:
            logger.warning("%s has %d finished groups", journal, len(self._kept))

    def next(self, data: JsonObject) -> Draw:
        draw = Draw(number=self._num_drawn, data=as_native(data))
        self._num_drawn += 1
        return draw

    def take(self, source: DataSource, count: int) -> list[Draw]:
        """Pending data first, then new ones from the source."""
        again = [self._pending.popleft() for _ in range(min(count, len(self._pending)))]
        return again + [self.next(data) for data in source.take(count - len(again))]

    def keep(self, done: Finished) -> None:
        """Put a verdict on disk. What failed is not kept: a restarted run tries it again.

        Raises:
            JournalError: it cannot be written.
        """
        draw = done.submission.draw
        if self._journal is None or draw is None or done.status == "failed":
            return
        rows = None if done.trajectory is None else encode_trajectory(done.trajectory)
        self._journal.append(
            {
                "draw": draw,
                "datum": _digest(done.submission.data),
                "status": done.status,
                "reason": done.reason,
                "rows": rows,
            }
        )

    def verdict(self, submission: Submission, *, version: int, bound: int) -> Finished | None:
        """What an earlier process found for this datum; asked once.

        A group whose oldest token is more than ``bound`` versions old is rejected as ``stale``.
        """
        if submission.draw is None or submission.draw not in self._kept:
            return None
        entry = self._kept.pop(submission.draw)
        if entry["datum"] != _digest(submission.data):
            logger.warning(
                "the journal's group number %d is of another datum and is not used: the dataset "
                "or the seed was changed",
                submission.draw,
            )
            return None
        if entry["status"] != "accepted":
            return Finished(submission=submission, status="rejected", reason=entry["reason"])
        rows = decode_trajectory(entry["rows"])
        if 0 <= head_version(rows) < version - bound:
            return Finished(submission=submission, status="rejected", reason=STALE)
        return Finished(submission=submission, status="accepted", trajectory=rows)

    def state(self, unconsumed: Iterable[Submission]) -> JsonObject:
        """Args: what was drawn and not handed over, oldest first."""
        draws = [
            Draw(number=each.draw, data=each.data) for each in unconsumed if each.draw is not None
        ]
        draws += self._pending
        self._untrained = self._num_drawn, frozenset(draw.number for draw in draws)
        return {
            "num_drawn": self._num_drawn,
            "pending": [[draw.number, draw.data] for draw in draws],
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from a state: its pending data come first."""
        self._num_drawn = int(state["num_drawn"])
        self._pending = deque(Draw(number=number, data=data) for number, data in state["pending"])
        self._untrained = self._num_drawn, frozenset(draw.number for draw in self._pending)
        self._kept = {n: entry for n, entry in self._kept.items() if self._is_untrained(n)}

    def mark_trained(self, step: int) -> None:
        """The state that was asked for last is on disk: forget what it has trained."""
        if self._journal is None:
            return
        path = self._journal.path
        kept = (entry for entry in Journal.read(path) if self._is_untrained(entry.get("draw", -1)))
        self._journal.rewrite(_chain({"trained_steps": step}, kept))

    def close(self) -> None:
        if self._journal is not None:
            self._journal.close()

    def _is_untrained(self, number: int) -> bool:
        num_drawn, pending = self._untrained
        return number >= num_drawn or number in pending


def _verdicts(path: Path) -> dict[int, JsonObject]:
    """By number; of two for one datum the later one."""
    found = {}
    for entry in Journal.read(path):
        if entry.keys() == _KEYS:
            found[entry["draw"]] = entry
        elif entry.keys() != {"trained_steps"}:
            raise JournalError(f"{path} has an entry with {sorted(entry)}: not of a rollout")
    return found


def _chain(first: JsonObject, rest: Iterable[JsonObject]) -> Iterable[JsonObject]:
    yield first
    yield from rest


def _digest(data: JsonObject) -> str:
    text = json.dumps(data, sort_keys=True, default=repr)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def open_draws(config: RolloutConfig, journal: Path | None) -> Draws:
    """With the journal that ``rollout.journal`` asks for.

    Raises:
        ConfigError: it is asked for, and nothing says where.
    """
    if not config.journal:
        return Draws()
    if journal is None and config.fileroot is None:
        raise ConfigError(
            "rollout.journal=true needs a folder: set rollout.fileroot, or give RolloutEngine "
            "journal="
        )
    path = journal or Path(config.fileroot or "") / "rollout.journal"
    return Draws(path, fsync=config.journal_fsync)
