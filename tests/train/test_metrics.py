"""Metrics of an update by hand-worked numbers."""

from __future__ import annotations

import pytest
import torch

from agent_rl import stats_tracker
from agent_rl.config import ActorConfig
from agent_rl.train import metrics
from agent_rl.train.batch import Batch
from agent_rl.types import RolloutGroup, TensorDict


def rows(
    masks: list[list[int]], rewards: list[float], counts: tuple[int, ...], **others: object
) -> TensorDict:
    mask = torch.tensor(masks, dtype=torch.int32)
    tensors: TensorDict = {
        "input_ids": torch.ones_like(mask),
        "attention_mask": torch.ones_like(mask, dtype=torch.bool),
        "loss_mask": mask,
        "rewards": torch.tensor(rewards),
        "rollout_group": RolloutGroup(row_counts=counts),
    }
    tensors.update(others)  # type: ignore[arg-type]
    return tensors


def exported() -> dict[str, float]:
    return stats_tracker.export_all()


def test_rows_and_groups() -> None:
    """Groups of 2 and 1 rollouts with 3 and 2 trained tokens; the prompt ends before the first."""
    batch = Batch.from_trajectories(
        [
            rows([[0, 1, 1, 0], [0, 0, 0, 1]], [1.0, 0.0], (1, 1)),
            rows([[0, 1, 0, 0], [0, 0, 0, 1]], [0.5, 0.5], (2,)),
        ]
    )
    exported()
    advantages = torch.where(batch.loss_mask & (batch.rows < 2), 2.0, 0.0)
    metrics.record_batch(
        batch,
        advantages,
        ActorConfig(),
        is_truncated=torch.tensor([True, False, False, False]),
        version=0,
    )
    stats = exported()
    expected = {
        "n_seqs": 4,
        "n_tokens": 16,
        "n_valid_tokens": 5,
        "correct_n_seqs": 3,
        "incorrect_n_seqs": 1,
        "task_reward/avg": 0.5,
        "prompt_len/avg": (1 + 3 + 1 + 3) / 4,
        "seq_len/avg": 4.0,
        "advantages/avg": 6 / 5,
        "n_groups": 2,
        "usable_group_size/avg": 1.5,
        "group_loss_weight/avg": 2.5,
        "group_loss_weight_size_2/avg": 3.0,
        "group_loss_weight_size_1/avg": 2.0,
        "zero_advantage_groups/avg": 0.5,
        "no_eos_ratios/avg": 0.25,
        "group_reward_std/avg": 0.25,
    }
    for key, value in expected.items():
        assert stats[f"ppo_actor/{key}"] == pytest.approx(value), key


def test_staleness_looks_at_trained_tokens_only() -> None:
    """Case B64: versions -1 3 4 with mask 0 1 1: ages 1 and 0."""
    batch = Batch.from_trajectories(
        [rows([[0, 1, 1]], [1.0], (1,), versions=torch.tensor([[-1, 3, 4]]))]
    )
    exported()
    metrics.record_batch(
        batch, torch.zeros(3), ActorConfig(), is_truncated=torch.zeros(1), version=0
    )
    stats = exported()
    assert stats["ppo_actor/version_stats/staleness/max"] == 1.0
    assert stats["ppo_actor/version_stats/staleness/avg"] == 0.5
    shares = [stats[f"ppo_actor/version_stats/staleness_share_{age}/avg"] for age in range(4)]
    assert shares == [0.5, 0.5, 0.0, 0.0]
    assert stats["ppo_actor/version_stats/staleness_share_4_or_more/avg"] == 0.0


def test_mismatch_looks_at_trained_tokens_only() -> None:
    """Case B67: trainer -1 -1 -5, engine -1 -1 0, mask 1 1 0: no difference at all."""
    batch = Batch.from_trajectories(
        [rows([[0, 1, 1, 0]], [1.0], (1,), logprobs=torch.tensor([[0.0, -1.0, -1.0, 0.0]]))]
    )
    tokens = metrics.TokenRecord.empty(batch.loss_mask, torch.zeros(4))
    tokens.proximal = torch.tensor([0.0, -1.0, -1.0, -5.0])
    tokens.new_logprobs = tokens.proximal
    exported()
    metrics.record_update(batch, tokens, [metrics.StepRecord(grad_norm=2.0)], lr=0.1, seconds=2.0)
    stats = exported()
    assert stats["ppo_actor/update/behave_logp_error/max"] == 0.0
    assert stats["ppo_actor/update/behave_approx_kl/avg"] == 0.0
    assert stats["ppo_actor/update/behave_kl/avg"] == 0.0
    assert stats["ppo_actor/update/new_logp/avg"] == -1.0
    assert stats["ppo_actor/update/grad_norm"] == 2.0
    assert stats["ppo_actor/update/update_successful"] == 0.0
    assert stats["ppo_actor/update/lr"] == 0.1


def test_staleness_counts_from_the_weights_that_are_trained() -> None:
    """All tokens are of version 3 and the weights of version 5: every age is 2."""
    batch = Batch.from_trajectories(
        [rows([[0, 1, 1]], [1.0], (1,), versions=torch.tensor([[-1, 3, 3]]))]
    )
    exported()
    no = torch.zeros(1)
    metrics.record_batch(batch, torch.zeros(3), ActorConfig(), is_truncated=no, version=5)
    assert exported()["ppo_actor/version_stats/staleness_share_2/avg"] == 1.0


def test_distance_of_engine_and_trainer() -> None:
    """Engine -1, trainer -1.5: 0.5 nats, and the k3 estimate of KL(engine || trainer) .106531."""
    batch = Batch.from_trajectories(
        [rows([[0, 1]], [1.0], (1,), logprobs=torch.tensor([[0.0, -1.0]]))]
    )
    tokens = metrics.TokenRecord.empty(batch.loss_mask, torch.ones(2))
    tokens.new_logprobs = torch.tensor([0.0, -1.5])
    exported()
    metrics.record_update(batch, tokens, [], lr=0.1, seconds=1.0)
    stats = exported()
    assert stats["ppo_actor/update/behave_logp_error/avg"] == pytest.approx(0.5)
    assert stats["ppo_actor/update/behave_kl/avg"] == pytest.approx(0.106531, abs=1e-6)


def test_tokens_of_an_update() -> None:
    """Two steps with 3 and 5 nodes for a batch of 16 tokens, 4 of them trained in 2 s."""
    batch = Batch.from_trajectories([rows([[0, 1, 1, 0, 0, 0, 0, 0]] * 2, [1.0, 0.0], (1, 1))])
    tokens = metrics.TokenRecord.empty(batch.loss_mask, torch.ones(16))
    steps = [
        metrics.StepRecord(num_computed_tokens=3, num_micro_batches=1),
        metrics.StepRecord(num_computed_tokens=5, num_micro_batches=1),
    ]
    exported()
    metrics.record_update(batch, tokens, steps, lr=0.1, seconds=2.0)
    stats = exported()
    assert stats["ppo_actor/update/n_computed_tokens"] == 8
    assert stats["ppo_actor/update/tree_saving"] == 0.5
    assert stats["ppo_actor/update/trained_tokens_per_s"] == 2.0


def test_nothing_trained_exports_no_means() -> None:
    """Case B113: counts are 0 and means are absent, not nan."""
    batch = Batch.from_trajectories([rows([[0, 0]], [1.0], (1,))])
    exported()
    metrics.record_batch(
        batch, torch.zeros(2), ActorConfig(), is_truncated=torch.zeros(1), version=0
    )
    tokens = metrics.TokenRecord.empty(batch.loss_mask, torch.zeros(2))
    metrics.record_update(batch, tokens, [metrics.StepRecord()], lr=0.1, seconds=1.0)
    stats = exported()
    assert stats["ppo_actor/n_valid_tokens"] == 0
    assert "ppo_actor/advantages/avg" not in stats
    assert all(value == value for value in stats.values())
