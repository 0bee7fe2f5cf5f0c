"""The trajectory dump: every row that was collected, as one JSON line for people to read.

    {root}/{rollout|eval-rollout}/{version}/{task_id}.jsonl

Rejected rows, orphans and failed episodes are dumped too. A record is a view for reading, nothing
is trained from it. Writing never fails an episode: what goes wrong is one warning with the reason.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import compress, groupby
from pathlib import Path
from typing import Any, Literal, TypeAlias

from agent_rl.errors import DatasetError
from agent_rl.record.jsonl import append_lines, json_line, read_lines
from agent_rl.types import JsonObject, RolloutGroup, TensorDict

Decode: TypeAlias = Callable[[Sequence[int]], str]
TaskId: TypeAlias = str | int

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A run of tokens of one kind in a row with several turns."""

    role: Literal["prompt", "gen", "context"]
    len: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryRecord:
    """One row. Token counts and versions speak of the row itself, never of the batch.

    ``prompt_len`` is the index of the first sampled token; ``head_version`` and ``tail_version``
    are the least and greatest version over sampled tokens, -1 where there are none;
    ``version_rle`` has [version, count] over sampled tokens in order, context does not break a run.
    ``segments`` is there for rows with more than one run of sampled tokens, ``error`` for episodes
    that failed, ``orphan`` for an answer that a retry replaced, ``truncated`` for an episode that
    ended where its budget did.
    """

    task_id: TaskId
    sample_idx: int
    seqlen: int
    prompt_len: int
    head_version: int
    tail_version: int
    version_rle: tuple[tuple[int, int], ...]
    reward: float | None
    prompt: str
    completion: str
    original_reward: float | None = None
    segments: tuple[Segment, ...] | None = None
    orphan: bool = False
    truncated: bool = False
    error: str | None = None


def trajectory_record(
    token_ids: Sequence[int],
    loss_mask: Sequence[int],
    versions: Sequence[int],
    *,
    decode: Decode,
    task_id: TaskId,
    sample_idx: int,
    reward: float | None,
    original_reward: float | None = None,
    orphan: bool = False,
    truncated: bool = False,
) -> TrajectoryRecord:
    """The record of one row without padding.

    mask 0 0 1 1 0 0 1 1, versions -1 -1 5 5 -1 -1 6 6: head 5, tail 6, rle [[5, 2], [6, 2]],
    prompt_len 2, segments prompt 2, gen 2, context 2, gen 2.

    Raises:
        ValueError: the three have different lengths.
    """
    if not len(token_ids) == len(loss_mask) == len(versions):
        raise ValueError(
            f"row {sample_idx} of task {task_id!r} has {len(token_ids)} token ids, "
            f"{len(loss_mask)} loss_mask and {len(versions)} versions; they must be one per token"
        )
    sampled = [version for version, bit in zip(versions, loss_mask, strict=True) if bit]
    runs = [(bit, len(list(run))) for bit, run in groupby(bool(bit) for bit in loss_mask)]
    prompt_len = len(token_ids) if not sampled else 0 if runs[0][0] else runs[0][1]
    is_multi_turn = sum(bit for bit, _ in runs) > 1
    return TrajectoryRecord(
        task_id=task_id,
        sample_idx=sample_idx,
        seqlen=len(token_ids),
        prompt_len=prompt_len,
        head_version=min(sampled, default=-1),
        tail_version=max(sampled, default=-1),
        version_rle=tuple((version, len(list(run))) for version, run in groupby(sampled)),
        reward=reward,
        prompt=decode(token_ids[:prompt_len]),
        completion=decode(token_ids[prompt_len:]),
        original_reward=original_reward,
        segments=tuple(_segments(token_ids, runs, decode)) if is_multi_turn else None,
        orphan=orphan,
        truncated=truncated,
    )


def _segments(
    token_ids: Sequence[int], runs: Sequence[tuple[bool, int]], decode: Decode
) -> Iterator[Segment]:
    start = 0
    for is_sampled, length in runs:
        text = decode(token_ids[start : start + length])
        role: Literal["prompt", "gen", "context"] = (
            "gen" if is_sampled else "context" if start else "prompt"
        )
        yield Segment(role=role, len=length, text=text)
        start += length


class TrajectoryDump:
    """Writes below ``{fileroot}/{experiment_name}/{trial_name}``.

    Args:
        decode: ids to text with special tokens; without it nothing is dumped, after one warning.
    """

    def __init__(self, root: str | Path, decode: Decode | None) -> None:
        self._root = Path(root)
        self._decode = decode
        if decode is None:
            logger.warning("trajectories are not dumped: there is no tokenizer for their text")

    def write(
        self,
        task_id: object,
        rows: TensorDict | None,
        *,
        version: int,
        scope: str = "rollout",
        orphans: TensorDict | None = None,
        errors: Sequence[str] = (),
    ) -> Path | None:
        """Append the task's rows, its orphans, and one record for each error.

        ``version`` is the engine's, for rows that say nothing of versions. Returns the file.
        """
        if self._decode is None:
            return None
        try:
            records, tail = self._records(task_id, rows, orphans, errors, version)
            if not records:
                raise ValueError("there is no trajectory")
            path = self._root / scope / str(tail) / f"{safe_name(task_id)}.jsonl"
            append_lines(path, [json_line(record) for record in records])
        except Exception as error:  # the edge of the episode: a dump must never fail it
            logger.warning("the trajectory of task %r is not dumped: %s", task_id, error)
            return None
        return path

    def _records(
        self,
        task_id: object,
        rows: TensorDict | None,
        orphans: TensorDict | None,
        errors: Sequence[str],
        version: int,
    ) -> tuple[list[JsonObject], int]:
        """The records, and the greatest version in them: the name of their folder."""
        assert self._decode is not None, "checked by write"
        name = task_id if isinstance(task_id, int | str) else str(task_id)
        records: list[TrajectoryRecord] = []
        for table, is_orphan in ((rows, False), (orphans, True)):
            for row in _rows_of(table, version) if table is not None else ():
                index = len(records)
                if is_orphan:
                    row["reward"] = None  # nobody gave it one; tensors cannot say so
                records.append(
                    trajectory_record(
                        **row, decode=self._decode, task_id=name, sample_idx=index, orphan=is_orphan
                    )
                )
        for error in errors:
            records.append(_error_record(name, len(records), error))
        tail = max((record.tail_version for record in records), default=-1)
        return [_as_json(record) for record in records], tail if tail >= 0 else version


def read_dump(path: str | Path) -> list[TrajectoryRecord]:
    """The records of one file, or of all files below a folder in order of their names.

    Raises:
        DatasetError: there is no such path, or a line is JSON but no trajectory record.
    """
    path = Path(path)
    if not path.exists():
        raise DatasetError(f"there is no dump at {path}")
    files = sorted(path.rglob("*.jsonl")) if path.is_dir() else [path]
    return [
        _from_json(record, f"{file}:{number}")
        for file in files
        for number, record in read_lines(file)
    ]


def safe_name(task_id: object) -> str:
    """A file name for any id: as it is where that is safe, else with a hash. Never the same twice.

    "42" -> "42";  "../x" -> "___x-<16 hex digits of its hash>"
    """
    text = str(task_id)
    is_safe = re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}", text) and text[-1] != "."
    looks_hashed = re.search(r"-[0-9a-f]{16}$", text)
    if is_safe and not looks_hashed and not _DEVICES.fullmatch(text):
        return text
    digest = hashlib.sha256(text.encode("utf-8", errors="surrogatepass")).hexdigest()[:16]
    return f"{re.sub(r'[^A-Za-z0-9_-]', '_', text)[:60]}-{digest}"


_DEVICES = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\..*)?", re.IGNORECASE)


def _rows_of(table: TensorDict, version: int) -> Iterator[dict[str, Any]]:
    """Keyword arguments of ``trajectory_record`` for each row, its padding left out."""
    for key in ("input_ids", "attention_mask", "rewards"):
        if key not in table:
            raise ValueError(f"the rows have no {key}")
    ids, attended = _column(table, "input_ids"), _column(table, "attention_mask")
    masks = _column(table, "loss_mask") or [[0] * len(row) for row in ids]
    versions = _column(table, "versions") or [[version] * len(row) for row in ids]
    rewards, originals = _column(table, "rewards"), _column(table, "original_rewards")
    group = table.get("rollout_group")
    truncated = group.truncated_rows if isinstance(group, RolloutGroup) else [False] * len(ids)
    for index, row in enumerate(ids):
        if not len(row) == len(attended[index]) == len(masks[index]) == len(versions[index]):
            raise ValueError(f"row {index}: ids, masks and versions have different lengths")
        kept = (compress(column[index], attended[index]) for column in (ids, masks, versions))
        token_ids, loss_mask, row_versions = map(list, kept)
        yield {
            "token_ids": token_ids,
            "loss_mask": loss_mask,
            "versions": row_versions,
            "reward": rewards[index],
            "original_reward": originals[index] if originals else None,
            "truncated": truncated[index],
        }


def _column(table: TensorDict, key: str) -> list[Any]:
    """The values as lists; empty where there is no such key."""
    values: Any = table.get(key)
    return [] if values is None else list(values.tolist())


def _error_record(task_id: TaskId, sample_idx: int, error: str) -> TrajectoryRecord:
    return TrajectoryRecord(
        task_id=task_id,
        sample_idx=sample_idx,
        seqlen=0,
        prompt_len=0,
        head_version=-1,
        tail_version=-1,
        version_rle=(),
        reward=None,
        prompt="",
        completion="",
        error=error,
    )


def _as_json(record: TrajectoryRecord) -> JsonObject:
    """The keys of the record; those that few rows have only where they say something."""
    fields = asdict(record)
    for key in ("original_reward", "segments", "error"):
        if fields[key] is None:
            del fields[key]
    for key in ("orphan", "truncated"):
        if not fields[key]:
            del fields[key]
    return fields


def _from_json(record: JsonObject, where: str) -> TrajectoryRecord:
    try:
        fields = dict(record)
        fields["version_rle"] = tuple((int(v), int(n)) for v, n in record["version_rle"])
        if "segments" in record:
            fields["segments"] = tuple(Segment(**segment) for segment in record["segments"])
        return TrajectoryRecord(**fields)
    except (KeyError, TypeError, ValueError) as error:
        raise DatasetError(f"{where} is not a trajectory record: {error}") from error
