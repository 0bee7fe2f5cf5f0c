"""wandb, SwanLab, Trackio and TensorBoard: what they are told, by fakes; what they keep, for real.

The real packages are optional: a test of one that is not installed is skipped.
"""

from __future__ import annotations

import json
import logging
import os
import struct
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agent_rl.config import PPOConfig, load_config
from agent_rl.errors import MissingDependencyError
from agent_rl.stats import sink as sink_module
from agent_rl.stats.jsonl import read_metrics
from agent_rl.stats.logger import FinetuneSpec, StatsLogger

SPEC = FinetuneSpec(total_train_epochs=1, steps_per_epoch=3, total_train_steps=3)
VALUES = [0.5, 1.25, -2.0]


class FakeRun:
    """Refuses steps that go back, as wandb does, and what ``bad_steps`` names."""

    def __init__(self, first_step: int = 0, bad_steps: tuple[int, ...] = ()) -> None:
        self.step = first_step
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.rejected: list[int] = []
        self.num_finished = 0
        self._bad_steps = bad_steps

    def log(self, data: dict[str, float], step: int) -> None:
        if step in self._bad_steps:
            raise ConnectionError("network down")
        if step < self.step:
            self.rejected.append(step)
            return
        self.step = step
        self.rows.append((step, data))

    def finish(self) -> None:
        self.num_finished += 1


def config(*overrides: str) -> PPOConfig:
    names = ["experiment_name=exp", "trial_name=one", "stats_logger.console=false"]
    return load_config(None, [*names, *(f"stats_logger.{override}" for override in overrides)])


def log_values(options: PPOConfig, folder: Path, *, start: int = 0) -> None:
    with StatsLogger(options, SPEC, log_dir=folder) as stats_logger:
        stats_logger.load_state_dict({"last_commit_step": start - 1})
        for step, value in enumerate(VALUES, start=start):
            stats_logger.commit(0, step, step, {"a/b": value, "a/b__count": 9.0})


def fake_wandb(monkeypatch: pytest.MonkeyPatch, run: FakeRun) -> list[tuple[str, dict[str, Any]]]:
    calls: list[tuple[str, dict[str, Any]]] = []

    def init(**options: Any) -> FakeRun:
        calls.append(("init", options))
        return run

    fake = SimpleNamespace(init=init, login=lambda **options: calls.append(("login", options)))
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return calls


def test_wandb_defaults(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run = FakeRun()
    calls = fake_wandb(monkeypatch, run)
    log_values(config("wandb.mode=offline"), tmp_path)
    ((name, options),) = calls  # no login: offline needs none
    run_config = options.pop("config")
    assert (name, options) == (
        "init",
        {
            "mode": "offline",
            "entity": None,
            "project": "exp",
            "name": "one",
            "group": "exp_one",
            "job_type": None,
            "notes": None,
            "tags": [],
            "id": "exp_one_train",
            "resume": "allow",
            "dir": str(tmp_path),
        },
    )
    assert run.rows == [(0, {"a/b": 0.5}), (1, {"a/b": 1.25}), (2, {"a/b": -2.0})]
    assert run.num_finished == 1
    assert run_config["rollout"]["group_size"] == 1
    assert set(run_config["version_info"]) == {"commit_id", "branch", "is_dirty", "version"}
    json.dumps(run_config, allow_nan=False)


def test_wandb_options(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "old")
    monkeypatch.setenv("WANDB_BASE_URL", "old")
    monkeypatch.setattr("time.strftime", lambda form: "2031_01_02_03_04_05")
    calls = fake_wandb(monkeypatch, FakeRun())
    log_values(
        config(
            "wandb.mode=online", "wandb.api_key=sk-1", "wandb.base_url=http://localhost:1",
            "wandb.entity=me", "wandb.project=p", "wandb.name=n", "wandb.group=g",
            "wandb.job_type=j", "wandb.notes=why", "wandb.tags=[a, b]",
            "wandb.id_suffix=timestamp",
        ),
        tmp_path,
    )  # fmt: skip
    assert [name for name, _ in calls] == ["login", "init"]
    assert (os.environ["WANDB_API_KEY"], os.environ["WANDB_BASE_URL"]) == (
        "sk-1",
        "http://localhost:1",
    )
    options = calls[1][1]
    assert options["config"]["stats_logger"]["wandb"]["api_key"] == "***"
    assert options["id"] == "exp_one_2031_01_02_03_04_05"
    assert [options[k] for k in ("mode", "entity", "project", "name", "group", "job_type")] == [
        "online", "me", "p", "n", "g", "j",
    ]  # fmt: skip
    assert (options["notes"], options["tags"]) == ("why", ["a", "b"])


def test_wandb_resume_sends_no_step_that_it_has(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Case B158: the crash came after step 3, the checkpoint before step 2."""
    run = FakeRun(first_step=4)
    fake_wandb(monkeypatch, run)
    log_values(config("wandb.mode=offline"), tmp_path, start=2)
    assert (run.rows, run.rejected) == ([(4, {"a/b": -2.0})], [])


def test_swanlab_calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run, calls = FakeRun(), []
    fake = SimpleNamespace(
        init=lambda **options: calls.append(options),
        login=lambda **options: calls.append(options),
        log=run.log,
        finish=run.finish,
    )
    monkeypatch.setitem(sys.modules, "swanlab", fake)
    log_values(config("swanlab.mode=cloud", "swanlab.api_key=sk-2"), tmp_path)
    assert calls[0] == {"api_key": "sk-2"}
    assert calls[1].pop("config")["stats_logger"]["swanlab"]["api_key"] == "***"
    assert calls[1] == {
        "mode": "cloud",
        "project": "exp",
        "experiment_name": "one_train",
        "logdir": str(tmp_path / "swanlab"),
    }
    assert [row["a/b"] for _, row in run.rows] == VALUES
    assert run.num_finished == 1
    monkeypatch.setitem(sys.modules, "swanboard", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'swanlab\[dashboard\]'"):
        StatsLogger(config("swanlab.mode=local"), SPEC, log_dir=tmp_path)


def test_trackio_calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run, calls = FakeRun(), []
    fake = SimpleNamespace(
        init=lambda **options: calls.append(options), log=run.log, finish=run.finish
    )
    monkeypatch.setitem(sys.modules, "trackio", fake)
    log_values(config("trackio.mode=online", "trackio.space_id=me/space"), tmp_path)
    calls[0].pop("config")
    assert calls == [{"project": "exp", "name": "one", "space_id": "me/space", "resume": "allow"}]
    assert [row["a/b"] for _, row in run.rows] == VALUES
    assert run.num_finished == 1


def test_a_service_that_fails_or_hangs_stops_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Case B159: one raises at init, one at a log, one hangs at finish; jsonl has everything."""
    monkeypatch.setattr(sink_module, "_OPEN_RETRY_DELAYS_S", ())
    release = threading.Event()
    run, other_run = FakeRun(bad_steps=(1,)), FakeRun(bad_steps=(1,))
    fake_wandb(monkeypatch, run)

    def fail(**options: Any) -> None:
        raise ConnectionError("no route")

    monkeypatch.setitem(sys.modules, "swanlab", SimpleNamespace(init=fail))
    hanging = SimpleNamespace(init=lambda **options: None, log=other_run.log, finish=release.wait)
    monkeypatch.setitem(sys.modules, "trackio", hanging)
    options = config(
        "wandb.mode=offline", "swanlab.mode=offline", "trackio.mode=local", "close_timeout_s=0.5"
    )
    with caplog.at_level(logging.WARNING):
        log_values(options, tmp_path)
    release.set()
    assert [record["a/b"] for record in read_metrics(tmp_path / "metrics.jsonl")] == VALUES
    assert run.rows == other_run.rows == [(0, {"a/b": 0.5}), (2, {"a/b": -2.0})]
    texts = sorted(record.getMessage() for record in caplog.records)
    assert texts[0].startswith("metrics sink swanlab failed (ConnectionError: no route)")
    assert texts[1].startswith("metrics sink trackio did not finish")
    assert texts[2].startswith("metrics sink trackio failed (ConnectionError: network down)")
    assert texts[3].startswith("metrics sink wandb failed (ConnectionError: network down)")
    assert len(texts) == 4


@pytest.mark.filterwarnings("default")
def test_real_tensorboard_files_read_back(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    options = config(f"tensorboard.path={tmp_path / 'tb'}")
    log_values(options, tmp_path)
    log_values(options, tmp_path, start=2)  # a resume that repeats step 2
    events = EventAccumulator(str(tmp_path / "tb")).Reload()
    found = [(event.step, event.value) for event in events.Scalars("a/b")]
    assert found == [(0, 0.5), (1, 1.25), (2, 0.5), (3, 1.25), (4, -2.0)]
    (text,) = events.Tensors("config/text_summary")[:1]
    assert b"version_info" in text.tensor_proto.string_val[0]


def leveldb_records(data: bytes) -> Iterator[bytes]:
    """The format of .wandb and .swanlab files.

    Blocks of 32 KiB hold chunks [crc 4 bytes, length 2, type 1, data]. Type 1 is a whole record;
    2, 3, 4 are first, middle and last part of one. The file begins with a header of 7 bytes, and
    fewer than 7 bytes at the end of a block are padding.
    """
    record, at = b"", 7
    while at + 7 <= len(data):
        room = 32768 - at % 32768
        if room < 7:
            at += room
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield record
            record = b""


@pytest.mark.filterwarnings("default")
def test_real_wandb_offline_run_reads_back(tmp_path: Path) -> None:
    wandb = pytest.importorskip("wandb")
    from wandb.proto.wandb_internal_pb2 import Record

    log_values(config("wandb.mode=offline"), tmp_path)
    wandb.teardown()  # its service process closes the file, as at the end of the program
    (path,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    rows = []
    for data in leveldb_records(path.read_bytes()):
        record = Record.FromString(data)
        if record.WhichOneof("record_type") == "history":
            items = {
                item.key or "/".join(item.nested_key): json.loads(item.value_json)
                for item in record.history.item
            }
            rows.append((items["_step"], items["a/b"]))
    assert rows == list(enumerate(VALUES))


@pytest.mark.filterwarnings("default")
def test_real_swanlab_offline_run_reads_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("swanlab", minversion="0.10")
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record

    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    log_values(config("swanlab.mode=offline"), tmp_path)
    (path,) = (tmp_path / "swanlab").glob("run-*/*.swanlab")
    records = [Record.FromString(data) for data in leveldb_records(path.read_bytes())]
    scalars = [record.scalar for record in records if record.HasField("scalar")]
    assert [(each.key, each.step, each.value.number) for each in scalars] == [
        ("a/b", step, value) for step, value in enumerate(VALUES)
    ]


@pytest.mark.filterwarnings("default")
def test_real_trackio_database_reads_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trackio")
    import sqlite3

    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    for name in [name for name in sys.modules if name.partition(".")[0] == "trackio"]:
        monkeypatch.delitem(sys.modules, name)  # it reads the variable when imported
    log_values(config("trackio.mode=local"), tmp_path)
    with sqlite3.connect(tmp_path / "trackio" / "exp.db") as database:
        rows = database.execute(
            "select step, metrics from metrics where run_name = 'one' order by step"
        ).fetchall()
    database.close()
    assert [(step, json.loads(text)["a/b"]) for step, text in rows] == list(enumerate(VALUES))
