"""Dividing the work of an update among processes changes nothing but the time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_batches import trajectory

from agent_rl.train.batch import Batch, balanced
from agent_rl.train.team import Team

HERE = Path(__file__).parent


def torchrun(*command: str, num_processes: int = 2) -> subprocess.CompletedProcess[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    environment = os.environ | {"PYTHONPATH": str(HERE), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *launcher, str(num_processes), *command],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


def batch_of(*lengths: tuple[int, ...]) -> Batch:
    """A group for each tuple; every row is a logical rollout."""
    groups = []
    for sizes in lengths:
        rows = [list(range(1, size + 1)) for size in sizes]
        masks = [[0] + [1] * (size - 1) for size in sizes]
        groups.append(trajectory(rows, masks, [0.0] * len(sizes)))
    return Batch.from_trajectories(groups)


def test_processes_get_whole_groups_of_about_equally_many_tokens() -> None:
    batch = batch_of((4, 4), (2, 2), (3, 3))
    assert balanced(batch, range(6), batch.lengths, 2) == [[0, 1], [2, 3, 4, 5]]


def test_with_few_groups_logical_rollouts_are_divided() -> None:
    batch = batch_of((4, 2, 2))
    assert balanced(batch, range(3), batch.lengths, 2) == [[0], [1, 2]]
    assert balanced(batch, [1], batch.lengths, 2) == [[1]]


def test_a_team_of_one_does_everything_itself() -> None:
    batch, team = batch_of((4, 2)), Team()
    assert (team.rank, team.size, team.is_first) == (0, 1, True)
    assert team.own_rows(batch, range(2)) == [0, 1]
    values = torch.ones(3)
    assert team.add_up(values) is values


@pytest.mark.slow
def test_two_processes_move_weights_and_metrics_as_one_does() -> None:
    """Cases B102, B109, B110, B112, B126: every option, batch-level norms, processes without rows.

    The rows are float64; the norm layers of the model compute in float32 all the same.
    """
    done = torchrun(str(HERE / "two_processes.py"))
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    assert len(results) > 20
    for name, result in results.items():
        assert result["weights"] < 1e-6, (name, result)
        assert result["metrics"] < 1e-6, (name, result)
        assert result["moved"] > 1e-6 or name == "nothing to train", (name, result)
