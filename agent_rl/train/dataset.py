"""Where rows come from: a file, a `datasets` dataset, a map-style dataset, an iterable of dicts.

All rows are read at once, so a source has to end: one with a length is asked for that many rows,
one without may have ``_MAX_UNCOUNTED``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sized
from dataclasses import is_dataclass
from itertools import islice
from pathlib import Path
from typing import Protocol, TypeAlias

from agent_rl.errors import DatasetError, MissingDependencyError
from agent_rl.types import JsonObject

Row: TypeAlias = Mapping[str, object]
_MAX_UNCOUNTED = 1_000_000
_KINDS = (
    "give a list or another sequence of dicts, the path of a .jsonl, .ndjson or .parquet file, a "
    "`datasets` dataset (one split of it), or a map-style dataset (__len__ and __getitem__)"
)


class MapStyle(Protocol):
    """What torch calls a map-style dataset: a length, and rows by number."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Row: ...


Dataset: TypeAlias = str | Path | MapStyle | Iterable[Row]


def load_rows(source: Dataset) -> list[JsonObject]:
    """Read all rows; each is what an agent's ``run(data)`` gets.

    Raises:
        DatasetError: the file is missing, of an unknown kind, empty, or a row is not a dict.
        MissingDependencyError: a Parquet file without ``pyarrow``.
    """
    name = str(source) if isinstance(source, str | Path) else type(source).__name__
    rows = _read_file(Path(source)) if isinstance(source, str | Path) else _read(source, name)
    for index, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise DatasetError(
                f"row {index} of the dataset {name} is a {type(row).__name__}, not a dict; "
                f"{_how_to_write(row)}{_KINDS}"
            )
    if not rows:
        raise DatasetError(f"the dataset {name} has no rows")
    return [dict(row) for row in rows]


def _how_to_write(row: object) -> str:
    """A row that is nearly a dict as one."""
    if hasattr(row, "model_dump"):
        return "write [row.model_dump() for row in rows]; "
    if is_dataclass(row):
        return "write [dataclasses.asdict(row) for row in rows]; "
    return "write [row._asdict() for row in rows]; " if hasattr(row, "_asdict") else ""


def _read(source: MapStyle | Iterable[Row], name: str) -> list[Row]:
    if isinstance(source, Mapping):
        keys = ", ".join(repr(key) for key in islice(source, 5))
        raise DatasetError(f"the dataset {name} is a mapping with the keys {keys}; {_KINDS}")
    if hasattr(source, "dataset") and hasattr(source, "batch_size"):
        raise DatasetError(
            f"the dataset {name} gives out batches, as torch's DataLoader does; give its rows, "
            "loader.dataset: rollout.consumer_batch_size makes the batches"
        )
    if isinstance(source, Iterable):
        if isinstance(source, Sized):
            return list(islice(source, len(source)))
        rows = list(islice(source, _MAX_UNCOUNTED + 1))
        if len(rows) > _MAX_UNCOUNTED:
            raise DatasetError(
                f"the dataset {name} has no length and did not end after {_MAX_UNCOUNTED:,} rows; "
                "give a list of the rows to train on"
            )
        return rows
    if not isinstance(source, Sized) or not hasattr(source, "__getitem__"):
        raise DatasetError(f"an object of type {name} is no dataset; {_KINDS}")
    return [_row(source, index, name) for index in range(len(source))]


def _row(source: MapStyle, index: int, name: str) -> Row:
    try:
        return source[index]
    except (IndexError, KeyError) as error:
        raise DatasetError(
            f"the dataset {name} says that it has {len(source)} rows, and row {index} is not there "
            f"({type(error).__name__}: {error})"
        ) from error


def _read_file(path: Path) -> list[JsonObject]:
    if not path.is_file():
        raise DatasetError(f"the dataset file {path} does not exist")
    if path.suffix in (".jsonl", ".ndjson"):
        return _read_jsonl(path)
    if path.suffix == ".parquet":
        try:
            import pyarrow.parquet as parquet
        except ImportError:
            raise MissingDependencyError(
                f"reading {path} needs pyarrow; run: pip install pyarrow"
            ) from None
        return list(parquet.read_table(path).to_pylist())
    raise DatasetError(f"the dataset {path} must end in .jsonl, .ndjson or .parquet")


def _read_jsonl(path: Path) -> list[JsonObject]:
    """Split at newlines only: U+2028 and its kin are legal inside a JSON string.

    A mark of the byte order, which editors on Windows write, is no part of the first row.
    """
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8-sig").split("\n"), start=1):
        if not line.strip():
            continue
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise DatasetError(f"{path}, line {number}: not valid JSON ({error.msg})") from None
    return rows
