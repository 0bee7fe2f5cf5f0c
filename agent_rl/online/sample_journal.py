"""SampleJournal: judged samples on disk, until weights are on disk that have learnt from them.

    {"sample": 7, "time": 1.7e9, "session_id": "ann", ..., "row": {...}}     judged
    {"trained": [3, 7], "version": 12}                                       weights 12 know them

A step is noted before its weights can be saved. Who goes on from version 12 finds 3 and 7 learnt;
who goes on from 11, whose weights know nothing of them, finds them waiting: each sample is in the
weights that are gone on from once. A row is token ids, exact and therefore never redacted: one that
has anything to redact is not written.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from agent_rl.config import PrivacyConfig
from agent_rl.errors import JournalError
from agent_rl.online.disk_thread import DiskThread
from agent_rl.online.redact import Redactor, redact, stored_id
from agent_rl.online.sample import KeptSample, OnlineSample, Owned
from agent_rl.record.codec import decode_trajectory, encode_trajectory
from agent_rl.record.journal import Journal
from agent_rl.stats import tracker as stats_tracker
from agent_rl.types import JsonObject

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

_FEW_LINES = 64  # of no use any more: not worth writing the file anew


@dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    """Of a sample in the file, what is needed to find it."""

    time_s: float
    session_id: str
    user_ids: Set[str]


class SampleJournal:
    """Any thread may call. Nothing is read or written before ``open``.

    Args:
        model: whose samples they are; those of another one are refused.
        max_trained: of samples whose weights are not saved yet so many are kept, the newest.
        redactor: in place of the built-in patterns; used when ``privacy.redact`` is on.
    """

    def __init__(
        self,
        path: Path,
        privacy: PrivacyConfig,
        tokenizer: PreTrainedTokenizerBase,
        *,
        model: str,
        max_trained: int,
        redactor: Redactor = redact,
    ) -> None:
        self.path = path
        self._privacy = privacy
        self._tokenizer = tokenizer
        self._model = model
        self._max_trained = max_trained
        self._redactor = redactor
        self._lines: dict[int, _Line] = {}  # by the sample's index, oldest first
        self._trained: dict[int, int] = {}  # of these, the version that has learnt each
        self._num_lines = 0  # of the file, of use or not
        self._is_behind = False
        self._has_warned = False
        self._journal: Journal | None = None
        self._disk = DiskThread(
            "sample-journal", path, tidy=self._tidy, is_timed=privacy.keep_days is not None
        )

    def open(self, version: int) -> list[KeptSample]:
        """The samples that the weights of this version have not learnt, oldest first.

        Raises:
            JournalError: it is damaged, of another model, or another process has it.
        """
        return self._disk.now(partial(self._open, version))

    def append(self, sample: OnlineSample) -> None:
        """Write it soon."""
        self._disk.soon(partial(self._append, sample))

    def note_trained(self, indices: Sequence[int], version: int) -> None:
        """The weights of this version have learnt these. Returns when that is on disk; where it
        cannot be written, a process that is killed now learns them twice, and a warning says so."""
        try:
            self._disk.now(partial(self._note_trained, indices, version))
        except JournalError as error:
            logger.warning("samples of version %d may be learnt twice: %s", version, error)

    def note_saved(self, version: int) -> None:
        """Weights of this version are on disk: what they have learnt is not needed any more."""
        self._disk.soon(partial(self._let_go, lambda index: self._is_learnt(index, version)))

    def drop(self, indices: Iterable[int]) -> None:
        """Nobody will learn these."""
        self._disk.soon(partial(self._let_go, set(indices).__contains__))

    def delete(self, is_theirs: Callable[[Owned], bool]) -> None:
        """Returns when nothing of such an owner is in the file.

        Raises:
            JournalError: it cannot be rewritten.
        """

        def work() -> None:
            self._let_go(lambda index: is_theirs(self._lines[index]))
            self._tidy()

        self._disk.now(work)

    def names_of(self, value: str) -> set[str]:
        """All that an id may be called here."""
        return {value, stored_id(value, self._redactor)}

    def close(self) -> None:
        """Returns when everything is written."""
        self._disk.close()
        if self._journal is not None:
            self._journal.close()

    # On the thread of the disk

    def _open(self, version: int) -> list[KeptSample]:
        with ExitStack() as undo:
            journal = undo.enter_context(Journal(self.path, fsync="never"))
            samples, trained = _read(self.path, self._model)
            waiting = [s for s in samples if trained.get(s.index, version + 1) > version]
            self._journal = journal
            self._lines = {sample.index: _line(sample) for sample in waiting}
            self._let_go_of_old()
            self._rewrite()
            undo.pop_all()
        return [sample for sample in waiting if sample.index in self._lines]

    def _append(self, sample: OnlineSample) -> None:
        if self._privacy.redact and self._would_redact(sample):
            self._tell_unkept()
            return
        line = _line(sample)
        entry = {
            "sample": sample.index,
            "time": line.time_s,
            "session_id": self._stored_id(line.session_id),
            "user_ids": sorted(map(self._stored_id, line.user_ids)),
            "oldest_version": sample.oldest_version,
            "row": encode_trajectory(sample.to_trajectory()),
        }
        self._write(entry)
        self._lines[sample.index] = line
        self._let_go_of_old()

    def _would_redact(self, sample: OnlineSample) -> bool:
        """Whether there is anything in the text of the ids, or of a teacher's, rank by rank."""
        texts: list[Sequence[int]] = [sample.interaction.tokens]
        teacher = sample.lesson.teacher
        if teacher is not None and teacher.top:
            by_rank = zip(*teacher.top, strict=True)
            texts += [[token_id for token_id, _ in rank] for rank in by_rank]
        decoded = (self._tokenizer.decode(ids) for ids in texts)
        return any(self._redactor(text) != text for text in decoded)

    def _tell_unkept(self) -> None:
        stats_tracker.get("online").scalar(unkept=1.0)
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "a sample with what looks like personal data or a secret is not kept on disk "
                "(online.privacy.redact): if the process is killed before it is learnt, it is lost"
            )

    def _stored_id(self, value: str) -> str:
        return stored_id(value, self._redactor) if self._privacy.redact else value

    def _note_trained(self, indices: Sequence[int], version: int) -> None:
        held = [index for index in indices if index in self._lines]
        if held:
            self._trained |= dict.fromkeys(held, version)
            self._write({"trained": held, "version": version})
            too_many = set(list(self._trained)[: -self._max_trained])
            self._let_go(too_many.__contains__)

    def _is_learnt(self, index: int, version: int) -> bool:
        return self._trained.get(index, version + 1) <= version

    def _let_go(self, is_unwanted: Callable[[int], bool]) -> None:
        """The file is written anew where most of it is of no use, so its size stays bounded."""
        for index in [index for index in self._lines if is_unwanted(index)]:
            del self._lines[index]
            self._trained.pop(index, None)
        if self._num_lines > _FEW_LINES + 2 * len(self._lines):
            self._rewrite()

    def _let_go_of_old(self) -> None:
        """What is older than ``privacy`` allows, or more."""
        rows, oldest_s = self._privacy.keep_rows, self._privacy.oldest_s()
        if rows is not None:
            self._let_go(set(list(self._lines)[:-rows]).__contains__)
        self._let_go(lambda index: self._lines[index].time_s < oldest_s)

    def _tidy(self) -> None:
        """Nothing that is of no use stays."""
        self._let_go_of_old()
        if self._num_lines > len(self._lines):
            self._rewrite()

    def _write(self, entry: JsonObject) -> None:
        """What could not be written of the steps before is written first."""
        if self._is_behind:
            self._rewrite()
        self._is_behind = True
        self._opened.append(entry)
        self._is_behind = False
        self._num_lines += 1

    def _rewrite(self) -> None:
        self._opened.rewrite(self._entries())
        self._num_lines = len(self._lines)

    @property
    def _opened(self) -> Journal:
        assert self._journal is not None, "samples are restored before any is put"
        return self._journal

    def _entries(self) -> Iterator[JsonObject]:
        yield {"model": self._model}
        for entry in Journal.read(self.path):
            if entry.get("sample") in self._lines:
                yield entry
        for version in sorted(set(self._trained.values())):
            indices = [index for index, at in self._trained.items() if at == version]
            yield {"trained": indices, "version": version}


def _line(sample: OnlineSample | KeptSample) -> _Line:
    return _Line(time_s=sample.time_s, session_id=sample.session_id, user_ids=sample.user_ids)


def _read(path: Path, model: str) -> tuple[list[KeptSample], dict[int, int]]:
    """Samples, and the version that has learnt each of some."""
    samples: list[KeptSample] = []
    trained: dict[int, int] = {}
    for entry in Journal.read(path):
        try:
            if "sample" in entry:
                samples.append(_kept(entry))
            elif "trained" in entry:
                trained |= dict.fromkeys(entry["trained"], int(entry["version"]))
            elif entry["model"] != model:
                raise JournalError(
                    f"the samples in {path} are of the model {entry['model']}, not {model}; move "
                    "the file away to start without them"
                )
        except (KeyError, TypeError, ValueError) as error:
            raise JournalError(f"{path} has an entry that is no sample's: {error!r}") from error
    return samples, trained


def _kept(entry: JsonObject) -> KeptSample:
    return KeptSample(
        index=int(entry["sample"]),
        time_s=float(entry["time"]),
        session_id=str(entry["session_id"]),
        user_ids=frozenset(map(str, entry["user_ids"])),
        oldest_version=entry["oldest_version"],
        trajectory=decode_trajectory(entry["row"]),
    )
