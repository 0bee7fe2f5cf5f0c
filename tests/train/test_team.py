"""Dividing the work of an update among processes changes nothing but the time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_actor import SGD_LIKE, weights_after
from test_recover import ROWS, Crash, LetterAgent, config_of, crash_in
from tiny_batches import groups, tiny_model, trajectory

from agent_rl import PPOTrainer
from agent_rl.config import ActorConfig
from agent_rl.stats.jsonl import read_metrics
from agent_rl.train.batch import Batch, balanced
from agent_rl.train.loss import aggregation_weights
from agent_rl.train.team import Team

HERE = Path(__file__).parent


def torchrun(*command: str, num_processes: int = 2) -> subprocess.CompletedProcess[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    path = os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH"))))
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
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


def test_the_mean_is_over_the_tokens_of_all_processes() -> None:
    """Case B109: 10 tokens of loss 1 and 2 tokens of loss 4 -> 18 / 12 = 1.5, not 2.5."""
    batch = batch_of((11,), (3,))
    weights = aggregation_weights("token-mean", batch.loss_mask, batch.rows, batch.rollouts)
    losses = torch.where(batch.rows == 0, 1.0, 4.0)
    parts = balanced(batch, range(2), batch.lengths, 2)
    assert parts == [[0], [1]]
    own = [(losses * weights)[batch.rows == rows[0]].sum().item() for rows in parts]
    assert own == pytest.approx([10 / 12, 8 / 12])


def test_the_order_of_groups_and_rows_changes_nothing() -> None:
    """Neither of prompts in the batch nor of samples in a group."""
    config = ActorConfig(optimizer=SGD_LIKE, max_tokens_per_mb=30)
    expected = weights_after(groups(), config)
    turned = [
        {k: v.flip(0) if isinstance(v, torch.Tensor) else v for k, v in rows.items()}
        for rows in reversed(groups())
    ]
    start = torch.cat([p.detach().flatten() for p in tiny_model().parameters()])
    moved = (expected - start).abs().max()
    assert moved > 1e-5
    assert (weights_after(turned, config) - expected).abs().max() / moved < 1e-5


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


@pytest.mark.slow
def test_a_run_goes_on_with_another_number_of_processes(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    """Two processes, then one, then two: the weights of one run in one process.

    Cases B129, B147, B151: processes change neither how much is collected nor how often a datum is
    evaluated. A large eps makes Adam's steps proportional to gradients: rounding stays rounding.
    """
    options = ["actor.optimizer.eps=1.0", "actor.optimizer.lr=1.0", "total_train_steps=4"]
    whole = config_of(tiny_model_dir, tmp_path / "whole", *options)
    with PPOTrainer(whole, ROWS) as trainer:
        trainer.train(LetterAgent())
        expected = trainer.actor.model.state_dict()
    run = [str(HERE / "team_run.py"), str(tiny_model_dir), str(tmp_path / "parts"), *options]
    assert "Crash" in torchrun(*run, "--fail-in", "2").stderr
    with (
        PPOTrainer(config_of(tiny_model_dir, tmp_path / "parts", *options), ROWS) as trainer,
        pytest.raises(Crash),
    ):
        assert trainer.engine.get_version() == 2
        trainer.train(LetterAgent(), on_step=crash_in(3))
    done = torchrun(*run)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("only the first process comes here, 2 evaluations") == 1
    exported = load_file(trainer.run_dir / "checkpoints" / "step4" / "model.safetensors")
    start = load_file(tiny_model_dir / "model.safetensors")
    for name, value in exported.items():
        assert (value - expected[name]).abs().max() < 1e-6
    assert max((exported[name] - start[name]).abs().max() for name in start) > 1e-2
    steps = [row["step"] for row in read_metrics(trainer.run_dir / "metrics.jsonl")]
    assert steps == [0, 1, 2, 3]
