from __future__ import annotations

import enum
import json
import logging
import os
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import torch

from agent_rl.record.jsonl import append_lines, json_line, read_lines


def refuse(token: str) -> NoReturn:
    raise AssertionError(f"{token} is no JSON")


class Color(enum.IntEnum):
    RED = 3


@pytest.mark.parametrize(
    ("value", "read"),
    [
        (float("nan"), None),
        (float("-inf"), None),
        (np.float32("nan"), None),
        (np.float32(0.5), 0.5),
        (np.int64(7), 7),
        (torch.tensor(2.0), 2.0),
        (torch.tensor([1, 2]), [1, 2]),
        (b"ab", "b'ab'"),
        (Path("/x"), "/x"),
        (datetime(2026, 1, 2), "2026-01-02 00:00:00"),
        (Color.RED, 3),
        (np.str_("s"), "s"),
        ({1: (True, None, {2.5})}, {"1": [True, None, [2.5]]}),
    ],
)
def test_lines_are_strict_json(value: Any, read: Any) -> None:
    """case B167: NaN is null, unknown types are strings."""
    line = json_line({"value": value})
    assert json.loads(line, parse_constant=refuse) == {"value": read}


ODD = ["a\u2028b", "a\x85b", "a\r\nb\x0c", "a\x0bb\x1c"]


def test_only_newlines_end_a_record(tmp_path: Path) -> None:
    """case B168: legal separators inside strings do not tear a record."""
    path = tmp_path / "x.jsonl"
    append_lines(path, [json_line({"text": text}) for text in ODD])
    assert [record["text"] for _, record in read_lines(path)] == ODD


def test_what_is_appended_together_is_one_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """case B170: so that the lines of two processes cannot mix."""
    write, sizes = os.write, []
    monkeypatch.setattr(
        os, "write", lambda file, data: sizes.append(len(data)) or write(file, data)
    )
    append_lines(tmp_path / "x.jsonl", [json_line({"text": "x" * 100_000})] * 4)
    assert len(sizes) == 1
    assert len(list(read_lines(tmp_path / "x.jsonl"))) == 4


def test_half_line_is_skipped_and_costs_only_itself(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """case B168: a crash in the middle of a line, then the run goes on."""
    path = tmp_path / "x.jsonl"
    append_lines(path, [json_line({"n": 1})])
    with path.open("a") as file:
        file.write('{"n": 2, "te')
    with caplog.at_level(logging.WARNING):
        assert [record["n"] for _, record in read_lines(path)] == [1]
    assert f"{path}:2 is not a whole JSON object" in caplog.text
    append_lines(path, [json_line({"n": 3})])
    assert [(number, record["n"]) for number, record in read_lines(path)] == [(1, 1), (3, 3)]


def test_text_that_utf8_cannot_hold(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "x.jsonl"
    append_lines(path, [json_line({"text": "a\ud800b"})])
    assert [record["text"] for _, record in read_lines(path)] == ["a?b"]
