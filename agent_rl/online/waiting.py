"""WaitingSamples: the queue of settled turns, what of it is too old, and its copy on disk.

A sample is in the journal before the trainer can see it, and noted there as learnt when the weights
that were trained on it are served.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Sequence

from agent_rl.config import OnlineConfig
from agent_rl.online.methods import Lesson
from agent_rl.online.passive import SessionTurns, Turn
from agent_rl.online.sample import KeptSample, OnlineSample, Owned
from agent_rl.online.sample_journal import SampleJournal
from agent_rl.online.sample_queue import SampleQueue
from agent_rl.stats import tracker as stats_tracker
from agent_rl.types import TensorDict

logger = logging.getLogger(__name__)


class WaitingSamples:
    """
    Args:
        journal: opened by whoever restores from it; None: a killed process loses what waits.
    """

    def __init__(self, config: OnlineConfig, journal: SampleJournal | None) -> None:
        self.queue: SampleQueue[OnlineSample | KeptSample] = SampleQueue(
            config.queue_size, no_progress_warning_s=config.no_progress_warning_s
        )
        self._max_staleness = config.max_staleness
        self._journal = journal
        self._numbers = itertools.count()
        self._untold: list[int] = []  # drained, and not in any weights yet

    def __len__(self) -> int:
        return len(self.queue)

    def restore(self, version: int) -> None:
        """Let wait what the weights of this version have not learnt; before anything is put.

        Raises:
            JournalError: see ``SampleJournal.open``.
        """
        if self._journal is None:
            return
        for sample in self._journal.open(version):
            self.queue.put(sample)
            self._numbers = itertools.count(sample.index + 1)
        if len(self):
            logger.warning("%d judged samples of an earlier process wait", len(self))

    def put(self, turns: SessionTurns, turn: Turn, lesson: Lesson) -> None:
        sample = OnlineSample(
            index=next(self._numbers),
            session_id=turns.session_id,
            user_ids=turns.user_ids,
            interaction=turn.interaction,
            lesson=lesson,
        )
        if self._journal is not None:
            self._journal.append(sample)
        self.queue.put(sample)

    def drain(self, batch_size: int, version: int | None) -> list[TensorDict]:
        """See ``OnlineLearner.drain``."""
        stale: list[int] = []

        def is_stale(sample: OnlineSample | KeptSample) -> bool:
            bound, oldest = self._max_staleness, sample.oldest_version
            if bound is None or oldest is None or version is None or version - oldest <= bound:
                return False
            stale.append(sample.index)
            return True

        try:
            samples = self.queue.drain(batch_size, drop=is_stale)
        finally:
            self._drop(stale)
        self._untold += [sample.index for sample in samples]
        stats_tracker.get("online").scalar(queue_size=len(self.queue))
        return [sample.to_trajectory() for sample in samples]

    def _drop(self, indices: Sequence[int]) -> None:
        for _ in indices:
            stats_tracker.get("online").scalar(dropped_stale=1.0)
        if indices and self._journal is not None:
            self._journal.drop(indices)

    def note_trained(self, version: int) -> None:
        indices, self._untold = self._untold, []
        if indices and self._journal is not None:
            self._journal.note_trained(indices, version)

    def note_saved(self, version: int) -> None:
        if self._journal is not None:
            self._journal.note_saved(version)

    def names_of(self, value: str) -> set[str]:
        """All that a session's or user's id may be called here: on disk it may be a digest."""
        return {value} if self._journal is None else self._journal.names_of(value)

    async def delete(self, is_theirs: Callable[[Owned], bool]) -> int:
        """Raises JournalError where the journal cannot be rewritten."""
        count = self.queue.remove(is_theirs)
        if self._journal is not None:
            await asyncio.to_thread(self._journal.delete, is_theirs)
        return count

    async def close(self) -> None:
        """What nobody has drained yet still can be."""
        if self._journal is not None:
            await asyncio.to_thread(self._journal.close)
        elif len(self):
            logger.warning("%d samples wait that no trainer has taken", len(self))
