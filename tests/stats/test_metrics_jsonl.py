"""metrics.jsonl: strict JSON, one run, strictly increasing steps."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import NoReturn

import pytest

from agent_rl.stats.jsonl import JsonlSink, read_metrics
from agent_rl.stats.sink import Commit


def commit(step: int, **metrics: float) -> Commit:
    return Commit(
        step=step, epoch=1, epoch_step=2, global_step=step, header="", metrics=metrics or {"a": 1.0}
    )


def write(path: Path, *steps: int) -> None:
    sink = JsonlSink(path)
    sink.open(steps[0])
    for step in steps:
        sink.log(commit(step, a=step / 2))
    sink.close()


def steps(path: Path) -> list[int]:
    return [record["step"] for record in read_metrics(path)]


def refuse(constant: str) -> NoReturn:
    raise AssertionError(constant)


def test_values_read_back_and_nan_is_null(tmp_path: Path) -> None:
    """Case B167: every line passes a strict parser."""
    path = tmp_path / "new" / "metrics.jsonl"
    sink = JsonlSink(path)
    sink.open(0)
    sink.log(commit(7, a=0.1, b=math.nan, c=math.inf, d=-math.inf))
    (line,) = path.read_text().splitlines()
    record = json.loads(line, parse_constant=refuse)
    assert record.pop("time_s") > 1.6e9
    assert record == {
        "a": 0.1,
        "b": None,
        "c": None,
        "d": None,
        "step": 7,
        "epoch": 1,
        "epoch_step": 2,
        "global_step": 7,
    }
    sink.close()


def test_line_separators_inside_keys_tear_nothing(tmp_path: Path) -> None:
    """Case B168: characters at which splitlines() breaks."""
    path = tmp_path / "metrics.jsonl"
    keys = ["a\u2028b", "a\x85b", "a\r\nb\x0c"]
    sink = JsonlSink(path)
    sink.open(0)
    for step, key in enumerate(keys):
        sink.log(commit(step, **{key: 1.0}))
    sink.close()
    unescaped = json.dumps({"\u2028\x85": 1, "step": 3}, ensure_ascii=False).encode()
    path.write_bytes(path.read_bytes() + unescaped + b"\n")
    records = read_metrics(path)
    assert [next(iter(record)) for record in records] == [*keys, "\u2028\x85"]


def test_half_a_line_is_skipped_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Case B168: the process died while it wrote."""
    path = tmp_path / "metrics.jsonl"
    write(path, 0, 1)
    path.write_bytes(path.read_bytes()[:-9])
    with caplog.at_level(logging.WARNING):
        assert steps(path) == [0]
    assert "line 2 is no record of a step" in caplog.text
    write(path, 1, 2)
    assert [record["a"] for record in read_metrics(path)] == [0, 0.5, 1]


def test_resume_repeats_no_step(tmp_path: Path) -> None:
    """The checkpoint was at step 2, the crash after step 4."""
    path = tmp_path / "metrics.jsonl"
    write(path, 0, 1, 2, 3, 4)
    write(path, 3, 4, 5)
    assert steps(path) == [0, 1, 2, 3, 4, 5]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["metrics.jsonl"]


def test_a_new_run_moves_the_old_file_aside(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for last in (2, 1, 0):
        write(path, *range(last + 1))
    assert steps(path) == [0]
    assert steps(tmp_path / "metrics.1.jsonl") == [0, 1, 2]
    assert steps(tmp_path / "metrics.2.jsonl") == [0, 1]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_raises_and_spoils_no_later_line(tmp_path: Path) -> None:
    """Case B159: the guard around the sink reports it; here the next line starts afresh."""
    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(path)
    sink.open(0)
    sink.log(commit(0))
    disk = sink._file
    with Path("/dev/full").open("ab", buffering=0) as sink._file, pytest.raises(OSError):
        sink.log(commit(1))
    disk.write(b'{"step": 1, "cut')
    sink._file = disk
    sink.log(commit(2))
    sink.close()
    assert steps(path) == [0, 2]
