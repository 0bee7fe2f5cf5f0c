"""Nothing of an earlier run is overwritten."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

from agent_rl import PPOConfig, load_config
from agent_rl.errors import ConfigError
from agent_rl.train.run_folder import RunFolder


def config_in(root: Path, *overrides: str) -> PPOConfig:
    return load_config(None, [f"fileroot={root}", "experiment_name=exp", *overrides])


def claimed(config: PPOConfig) -> RunFolder:
    folder = RunFolder(config)
    folder.claim()
    return folder


def test_a_run_that_did_something_is_moved_aside(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    for run in ("one", "two", "three"):
        folder = claimed(config)
        (folder.path / "checkpoints").mkdir()
        (folder.path / "checkpoints" / "of").write_text(run)
        folder.release()
    names = ("trial.1", "trial.2", "trial")
    assert [(tmp_path / "exp" / name / "checkpoints/of").read_text() for name in names] == [
        "one",
        "two",
        "three",
    ]
    assert all((tmp_path / "exp" / name / "config.yaml").is_file() for name in names)


def test_a_run_that_did_nothing_leaves_no_folder_of_its_own(tmp_path: Path) -> None:
    for _ in range(2):
        claimed(config_in(tmp_path)).release()
    assert [path.name for path in (tmp_path / "exp").iterdir()] == ["trial"]


@pytest.mark.parametrize("left", ["recover/step3", "rollout.journal", "samples.journal"])
def test_a_run_that_goes_on_stays_in_its_folder(tmp_path: Path, left: str) -> None:
    is_online = left == "samples.journal"
    mode = "rollout.agent.mode=online" if is_online else "rollout.journal=true"
    config = config_in(tmp_path, "recover.mode=auto", mode)
    folder = claimed(config)
    (folder.path / left).mkdir(parents=True)
    folder.release()
    claimed(config).release()
    assert [path.name for path in (tmp_path / "exp").iterdir()] == ["trial"]


def test_a_folder_that_other_trials_are_in_is_not_moved(tmp_path: Path) -> None:
    config = config_in(tmp_path, "trial_name=''")
    folder = claimed(config)
    (folder.path / "metrics.jsonl").write_text("{}\n")
    folder.release()
    with pytest.raises(ConfigError, match="remove it, or set trial_name"):
        RunFolder(config).claim()


def test_two_runs_never_share_a_folder(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    first = claimed(config)
    with pytest.raises(ConfigError, match="another run is writing to"):
        RunFolder(config).claim()
    first.release()
    second = claimed(config)
    del second  # a constructor that failed after it calls no release
    gc.collect()
    claimed(config).release()


def test_the_end_says_where_everything_is(tmp_path: Path) -> None:
    folder = RunFolder(config_in(tmp_path))
    run = tmp_path / "exp" / "trial"
    assert folder.farewell(2) == f"finished: 2 steps; metrics in {run}/metrics.jsonl"
    (run / "checkpoints" / "step2").mkdir(parents=True)
    assert f"; checkpoint in {run}/checkpoints/step2/; " in folder.farewell(2)
