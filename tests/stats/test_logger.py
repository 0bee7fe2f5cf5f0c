"""StatsLogger: steps, headers, ranks, folders, and the end of a run."""

from __future__ import annotations

import getpass
import json
import logging
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from agent_rl.config import PPOConfig, load_config
from agent_rl.errors import ConfigError, MissingDependencyError
from agent_rl.stats.jsonl import read_metrics
from agent_rl.stats.logger import FinetuneSpec, StatsLogger, default_log_dir

SPEC = FinetuneSpec(total_train_epochs=2, steps_per_epoch=3, total_train_steps=6)


def config(*overrides: str) -> PPOConfig:
    return load_config(None, ["stats_logger.console=false", *overrides])


def rows(folder: Path) -> list[tuple[int, float]]:
    return [(record["step"], record["x"]) for record in read_metrics(folder / "metrics.jsonl")]


def test_three_steps_begin_at_zero(tmp_path: Path) -> None:
    """Case B157: the first step is logged, as step 0."""
    with StatsLogger(config(), SPEC, log_dir=tmp_path) as stats_logger:
        for step in range(3):
            stats_logger.commit(0, step, step, {"x": step / 2})
    assert rows(tmp_path) == [(0, 0.0), (1, 0.5), (2, 1.0)]


def test_committing_a_step_again_takes_the_next_number(tmp_path: Path) -> None:
    """Case B157: by the rule step = max(global_step, last + 1)."""
    with StatsLogger(config(), SPEC, log_dir=tmp_path) as stats_logger:
        for global_step in (0, 1, 1, 5, 2):
            stats_logger.commit(0, 0, global_step, {"x": global_step})
    assert rows(tmp_path) == [(0, 0), (1, 1), (2, 1), (5, 5), (6, 2)]


def test_a_list_takes_consecutive_steps(tmp_path: Path) -> None:
    with StatsLogger(config(), SPEC, log_dir=tmp_path) as stats_logger:
        stats_logger.commit(0, 0, 4, [{"x": 1}, {"x": 2}, {"x": 3}])
        stats_logger.commit(0, 1, 5, [])
        assert stats_logger.state_dict() == {"last_commit_step": 6}
        stats_logger.commit(0, 1, 5, {"x": 4})
    assert rows(tmp_path) == [(4, 1), (5, 2), (6, 3), (7, 4)]


def test_steps_strictly_increase_over_a_resume(tmp_path: Path) -> None:
    """Case B158: train and evaluation of a step share it; resume from 1, evaluation at 5."""
    with StatsLogger(config(), SPEC, log_dir=tmp_path) as first:
        assert first.state_dict() == {"last_commit_step": -1}
        first.commit(0, 0, 0, {"x": 0, "eval-rollout/reward": 0.25})
        first.commit(0, 1, 1, {"x": 1})
        state = json.loads(json.dumps(first.state_dict()))
        first.commit(0, 2, 2, {"x": 99})  # after the checkpoint; the crash undoes it
    with StatsLogger(config(), SPEC, log_dir=tmp_path) as second:
        second.load_state_dict(state)
        second.commit(0, 2, 2, {"x": 2})
        second.commit(1, 2, 5, {"x": 5, "eval-rollout/reward": 0.75})
    assert rows(tmp_path) == [(0, 0), (1, 1), (2, 2), (5, 5)]
    records = read_metrics(tmp_path / "metrics.jsonl")
    assert [record.get("eval-rollout/reward") for record in records] == [0.25, None, None, 0.75]


def test_a_resumed_logger_never_goes_back(tmp_path: Path) -> None:
    """Case B158: whatever the trainer counts."""
    with StatsLogger(config(), SPEC, log_dir=tmp_path) as stats_logger:
        stats_logger.load_state_dict({"last_commit_step": 7})
        stats_logger.commit(0, 0, 3, {"x": 1})
        assert stats_logger.state_dict() == {"last_commit_step": 8}


def test_values_are_cleaned(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Case B167: foreign numbers become numbers; counts and what is no number stay behind."""
    data = {
        "x": np.float32(0.5),
        "i": np.int64(3),
        "t": torch.tensor(2.0),
        "b": True,
        "r__count": 4,
        "nan": float("nan"),
        "text": "hello",
        "none": None,
    }
    with (
        StatsLogger(config(), SPEC, log_dir=tmp_path) as stats_logger,
        caplog.at_level(logging.WARNING),
    ):
        for step in range(2):
            stats_logger.commit(0, step, step, data)
    record = read_metrics(tmp_path / "metrics.jsonl")[1]
    assert {key: record[key] for key in record if key in data} == {
        "x": 0.5,
        "i": 3,
        "t": 2,
        "b": 1,
        "nan": None,
    }
    assert [text.getMessage() for text in caplog.records] == [
        "metric 'text' skipped: 'hello' is not a number",
        "metric 'none' skipped: None is not a number",
    ]


def test_header_and_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = load_config(None, ["stats_logger.console=table"])
    with StatsLogger(config, SPEC, log_dir=tmp_path) as stats_logger:
        stats_logger.commit(1, 0, 3, {"x": 0.5, "y__count": 2})
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Epoch 2/2 Step 1/3 Train step 4/6"
    assert lines[2].split() == ["|", "x", "|", "5.0000e-01", "|", "|", "|", "|", "|", "|", "|"]


def test_needs_the_whole_config(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="whole PPOConfig, not StatsLoggerConfig"):
        StatsLogger(config().stats_logger, SPEC)  # type: ignore[arg-type]


def test_log_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["experiment_name=exp", "trial_name=one", f"fileroot={tmp_path}"]
    assert default_log_dir(config(*names)) == tmp_path / f"logs/{getpass.getuser()}/exp/one"
    with StatsLogger(config(*names), SPEC) as stats_logger:
        assert not (tmp_path / "logs").exists()
        stats_logger.commit(0, 0, 0, {"x": 1})
    assert rows(stats_logger.log_dir) == [(0, 1)]
    for name in ("..", ".", "a/b", "/etc"):
        with pytest.raises(ConfigError, match=r"trial_name.* must name one folder"):
            config("experiment_name=exp", f"trial_name={name}")


def test_a_user_without_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> str:
        raise KeyError("getpwuid(): uid not found: 4242")

    monkeypatch.setattr("getpass.getuser", fail)
    monkeypatch.setattr("os.getuid", lambda: 4242)
    assert default_log_dir(config()) == Path("runs/logs/uid4242/agent_rl/trial")


def test_only_rank_zero_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    with StatsLogger(config("stats_logger.wandb.mode=online"), SPEC, log_dir=tmp_path) as other:
        other.commit(0, 0, 0, {"x": 1})
    assert list(tmp_path.iterdir()) == []


def test_a_missing_package_is_one_clear_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {
        "wandb": "stats_logger.wandb.mode=offline",
        "swanlab": "stats_logger.swanlab.mode=offline",
        "trackio": "stats_logger.trackio.mode=local",
        "tensorboard": f"stats_logger.tensorboard.path={tmp_path}",
    }
    for package, option in options.items():
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(MissingDependencyError) as caught:
            StatsLogger(config(option), SPEC, log_dir=tmp_path)
        assert str(caught.value) == (
            f"stats_logger.{package} needs the package {package}; run: pip install '{package}'"
        )


def test_unknown_modes_are_refused() -> None:
    for option in ("wandb.mode=onlin", "swanlab.mode=online", "trackio.mode=offline"):
        with pytest.raises(ValueError, match=option.partition("=")[0]):
            config(f"stats_logger.{option}")
    with pytest.raises(ValueError, match="needs space_id"):
        config("stats_logger.trackio.mode=online")


def test_one_failing_sink_stops_no_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """Case B159: the folder of metrics.jsonl cannot be made; the console gets everything."""
    blocker = tmp_path / "file"
    blocker.write_text("")
    with (
        caplog.at_level(logging.WARNING),
        StatsLogger(load_config(), SPEC, log_dir=blocker / "logs") as stats_logger,
    ):
        for step in range(3):
            stats_logger.commit(0, step, step, {"x": step})
    assert [record.getMessage()[:26] for record in caplog.records] == ["metrics sink jsonl failed "]
    assert capsys.readouterr().out.count("Train step") == 3


PROGRAM = """
import os, signal, sys, types
from agent_rl.config import load_config
from agent_rl.stats.logger import FinetuneSpec, StatsLogger

class Run:
    step = 0
    def log(self, data, step): print("log", step, data["x"], flush=True)
    def finish(self): print("finish", flush=True)

sys.modules["wandb"] = types.SimpleNamespace(init=lambda **options: Run())
ending, folder = sys.argv[1:]
options = ["stats_logger.console=false", "stats_logger.wandb.mode=offline"]
spec = FinetuneSpec(total_train_epochs=1, steps_per_epoch=4, total_train_steps=4)
stats_logger = StatsLogger(load_config(None, options), spec, log_dir=folder)
for step in range(3):
    stats_logger.commit(0, step, step, {"x": step})
if ending == "close":
    stats_logger.close()
    stats_logger.close()
elif ending == "raise":
    with stats_logger:
        raise ValueError("step 4")
elif ending == "sigterm":  # what the trainer's handler makes of it
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))
    os.kill(os.getpid(), signal.SIGTERM)
elif ending == "sigkill":
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("ending", ["return", "close", "raise", "sigterm", "sigkill"])
def test_nothing_is_lost_at_the_end(ending: str, tmp_path: Path) -> None:
    """Case B161: three steps, then every way to end; finish is called once."""
    program = [sys.executable, "-c", PROGRAM, ending, str(tmp_path)]
    result = subprocess.run(program, capture_output=True, text=True)
    codes = {"raise": 1, "sigterm": 143, "sigkill": -signal.SIGKILL}
    assert result.returncode == codes.get(ending, 0), result.stderr
    assert rows(tmp_path) == [(0, 0), (1, 1), (2, 2)]
    if ending != "sigkill":  # no program can answer that; the file has all steps
        assert result.stdout.splitlines() == ["log 0 0.0", "log 1 1.0", "log 2 2.0", "finish"]


def test_commit_after_close_is_an_error(tmp_path: Path) -> None:
    stats_logger = StatsLogger(config(), SPEC, log_dir=tmp_path)
    stats_logger.close()
    with pytest.raises(RuntimeError, match="after close"):
        stats_logger.commit(0, 0, 0, {"x": 1})
