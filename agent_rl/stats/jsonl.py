"""metrics.jsonl: one strict JSON object for each step, written at once.

Invariant: ``step`` strictly increases in the file. A new run in the same folder moves the old file
aside; a resume drops the lines of steps that it will repeat. NaN and infinity are null.

    {"reward": 0.5, "step": 0, "epoch": 0, "epoch_step": 0, "global_step": 0, "time_s": 1.7e9}
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from pathlib import Path

from agent_rl.stats.sink import Commit
from agent_rl.types import JsonObject

logger = logging.getLogger(__name__)


class JsonlSink:
    name = "jsonl"

    def __init__(self, path: Path) -> None:
        self._path = path
        self._is_torn = False

    def open(self, next_step: int) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if self._path.exists():
            _keep_steps_below(self._path, next_step)
        # Unbuffered: a step that was committed survives whatever ends the process.
        self._file = self._path.open("ab", buffering=0)

    def log(self, commit: Commit) -> None:
        metrics = {k: v if math.isfinite(v) else None for k, v in commit.metrics.items()}
        record = metrics | {
            "step": commit.step,
            "epoch": commit.epoch,
            "epoch_step": commit.epoch_step,
            "global_step": commit.global_step,
            "time_s": time.time(),
        }
        line = (json.dumps(record, allow_nan=False) + "\n").encode()
        if self._is_torn:  # what a full disk cut off must not swallow the next line
            line = b"\n" + line
        self._is_torn = True
        if self._file.write(line) != len(line):
            raise OSError(f"{self._path}: only a part of the line was written")
        self._is_torn = False

    def close(self) -> None:
        self._file.close()


def read_metrics(path: str | Path) -> list[JsonObject]:
    """The records of a metrics.jsonl; a line that a crash cut off is skipped with a warning."""
    records = []
    # not splitlines(): that also breaks at characters which JSON leaves inside strings
    for number, line in enumerate(Path(path).read_bytes().split(b"\n"), start=1):
        if not line:
            continue
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if isinstance(record, dict) and isinstance(record.get("step"), int):
            records.append(record)
        else:
            logger.warning("%s: line %d is no record of a step; skipped", path, number)
    return records


def _keep_steps_below(path: Path, next_step: int) -> None:
    if next_step == 0:
        number = 1
        while (old := path.with_suffix(f".{number}{path.suffix}")).exists():
            number += 1
        path.rename(old)
        return
    kept = [record for record in read_metrics(path) if record["step"] < next_step]
    new = path.with_suffix(".new")
    new.write_text("".join(json.dumps(record) + "\n" for record in kept), encoding="utf-8")
    os.replace(new, path)
