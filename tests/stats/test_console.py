"""A line, or a table: four pairs a row, by columns, four decimals."""

from __future__ import annotations

import pytest

from agent_rl.stats.console import LineSink, TableSink, table_rows
from agent_rl.stats.sink import Commit


def test_pairs_are_filled_column_by_column() -> None:
    metrics = {key: float(number) for number, key in enumerate("abcde", start=1)}
    assert table_rows(metrics) == [
        ["a", "1.0000e+00", "c", "3.0000e+00", "e", "5.0000e+00"],
        ["b", "2.0000e+00", "d", "4.0000e+00"],
    ]
    many = table_rows({str(number): -0.00012345 for number in range(9)})
    assert [row[0::2] for row in many] == [["0", "3", "6"], ["1", "4", "7"], ["2", "5", "8"]]
    assert many[0][1] == "-1.2345e-04"
    assert table_rows({}) == []


def test_plain_output_keeps_long_keys_and_brackets(capsys: pytest.CaptureFixture[str]) -> None:
    key = "ppo_actor/update/[bold]/" + "x" * 120
    sink = TableSink()
    sink.open(0)
    header = "Epoch 1/2 Step 1/3 Train step 1/6"
    sink.log(
        Commit(
            step=0,
            epoch=0,
            epoch_step=0,
            global_step=0,
            header=header,
            metrics={key: 1.0, "b": float("nan")},
        )
    )
    sink.close()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == header
    cells = [cell.strip() for cell in lines[2].strip("|").split("|")]
    assert cells[:4] == [key, "1.0000e+00", "b", "nan"]
    assert set(lines[1]) == set(lines[3]) == set("+-")


def test_words_stand_between_header_and_table(capsys: pytest.CaptureFixture[str]) -> None:
    sink = TableSink()
    sink.open(0)
    sink.log(
        Commit(
            step=0,
            epoch=0,
            epoch_step=0,
            global_step=0,
            header="Step 1",
            metrics={"a": 1.0},
            summary="reward 0.5; entropy 1.2",
        )
    )
    sink.close()
    assert capsys.readouterr().out.splitlines()[:2] == ["Step 1", "reward 0.5; entropy 1.2"]


def test_a_step_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    counters = {"step": 0, "epoch": 0, "epoch_step": 0, "global_step": 0}
    sink = LineSink()
    sink.open(0)
    for line in ("step 1/2: reward 0.5 [x]" + "-" * 200, ""):
        sink.log(Commit(**counters, header="Step 1", metrics={"a": 1.0}, line=line, summary="s"))
    sink.close()
    assert capsys.readouterr().out == "step 1/2: reward 0.5 [x]" + "-" * 200 + "\nStep 1\n"
