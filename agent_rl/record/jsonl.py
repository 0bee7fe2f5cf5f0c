"""JSON lines that any strict reader takes, written so that writers do not tear one another's lines.

NaN and infinities are null, numpy and torch scalars numbers, what JSON does not know a string.
Only "\\n" ends a line: U+2028, U+0085, "\\r" and the like may stand inside a record.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from agent_rl.types import JsonObject

logger = logging.getLogger(__name__)


def json_line(record: Mapping[str, Any]) -> str:
    """The record on one line, with its "\\n"."""
    return json.dumps(_plain(record), ensure_ascii=False, allow_nan=False) + "\n"


def append_lines(path: Path, lines: Sequence[str]) -> None:
    """Append in one write to a file opened for appending: lines of other processes stay whole.

    A half line that a crash left at the end is closed first, so that it costs only itself.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    data = "".join(lines).encode("utf-8", errors="replace")
    file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        size = os.fstat(file).st_size
        if size and os.pread(file, 1, size - 1) != b"\n":
            data = b"\n" + data
        written = os.write(file, data)
        if written < len(data):
            raise OSError(f"only {written} of {len(data)} bytes were written to {path}")
    finally:
        os.close(file)


def read_lines(path: Path) -> Iterator[tuple[int, JsonObject]]:
    """Line number and object of each line; what is no JSON object is skipped with a warning."""
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError:
            value = None
        if isinstance(value, dict):
            yield number, value
        else:
            logger.warning("%s:%d is not a whole JSON object and is skipped", path, number)


def _plain(value: Any) -> Any:
    """The same in types that JSON has."""
    if value is None or type(value) in (str, bool, int):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    if hasattr(value, "tolist"):  # numpy and torch, scalars and arrays
        return _plain(value.tolist())
    return int(value) if isinstance(value, int) else str(value)
