"""Where rows come from: a sequence of dicts, a JSON Lines or Parquet file, a `datasets` dataset."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from agent_rl.errors import DatasetError, MissingDependencyError
from agent_rl.types import JsonObject


def load_rows(source: str | Path | Iterable[Mapping[str, object]]) -> list[JsonObject]:
    """Read all rows; each is what an agent's ``run(data)`` gets.

    Raises:
        DatasetError: the file is missing, of an unknown kind, empty, or a row is not a JSON object.
        MissingDependencyError: a Parquet file without ``pyarrow``.
    """
    name = str(source) if isinstance(source, str | Path) else type(source).__name__
    rows = _read_file(Path(source)) if isinstance(source, str | Path) else list(source)
    for index, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise DatasetError(
                f"row {index} of the dataset {name} is a {type(row).__name__}; rows must be dicts"
            )
    if not rows:
        raise DatasetError(f"the dataset {name} has no rows")
    return [dict(row) for row in rows]


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
                f"reading {path} needs pyarrow; run: pip install 'agent-rl[parquet]'"
            ) from None
        return list(parquet.read_table(path).to_pylist())
    raise DatasetError(f"the dataset {path} must end in .jsonl, .ndjson or .parquet")


def _read_jsonl(path: Path) -> list[JsonObject]:
    """Split at newlines only: U+2028 and its kin are legal inside a JSON string."""
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
        if not line.strip():
            continue
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise DatasetError(f"{path}, line {number}: not valid JSON ({error.msg})") from None
    return rows
