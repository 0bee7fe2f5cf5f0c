"""Batch: packing without padding, checks at the door, and the one next-token shift."""

from __future__ import annotations

import math

import pytest
import torch

from agent_rl.train.batch import Batch, micro_batches, minibatches
from agent_rl.types import RolloutGroup, TensorDict


def rows(
    ids: list[list[int]],
    mask: list[list[int]],
    attention: list[list[int]] | None = None,
    **others: object,
) -> TensorDict:
    """Rows of equal width; no padding unless ``attention`` says so."""
    tensors: TensorDict = {
        "input_ids": torch.tensor(ids, dtype=torch.int32),
        "loss_mask": torch.tensor(mask, dtype=torch.int32),
        "attention_mask": torch.tensor(attention or [[1] * len(row) for row in ids]).bool(),
        "rewards": torch.arange(len(ids)).float(),
    }
    tensors.update(others)  # type: ignore[arg-type]
    return tensors


def test_merge_leaves_padding_out() -> None:
    """Case B123: left- and right-padded rows are packed alike, in order."""
    left = rows([[0, 0, 1, 2, 3]], [[0, 0, 0, 1, 1]], [[0, 0, 1, 1, 1]])
    right = rows([[4, 5, 0], [6, 7, 8]], [[0, 1, 0], [0, 0, 1]], [[1, 1, 0], [1, 1, 1]])
    batch = Batch.from_trajectories([left, right])
    assert batch.token_ids.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert batch.loss_mask.tolist() == [False, True, True, False, True, False, False, True]
    assert batch.lengths == (3, 2, 3)
    assert batch.starts == (0, 3, 5)
    assert batch.rows.tolist() == [0, 0, 0, 1, 1, 2, 2, 2]
    assert batch.rewards.tolist() == [0.0, 0.0, 1.0]


def test_meta_says_which_rows_belong_together() -> None:
    one = rows([[1, 2]] * 3, [[0, 1]] * 3, rollout_group=RolloutGroup(row_counts=(2, 1)))
    other = rows([[1, 2, 3]] * 2, [[0, 0, 1]] * 2)
    batch = Batch.from_trajectories([one, other])
    assert batch.meta.traj_group_sizes == (3, 2)
    assert batch.meta.traj_seqlens == (2, 3)
    assert batch.meta.rollout_groups[1] == RolloutGroup(row_counts=(1, 1))
    assert batch.rollouts.tolist() == [0, 0, 1, 2, 3]
    assert batch.groups.tolist() == [0, 0, 0, 1, 1]
    assert "rollout_group" in one, "the source is left as it was"


def test_unknown_reward_empties_the_mask() -> None:
    """Case B96: the row is not trained; case B112 alike for rows nobody rewarded."""
    bad = rows([[1, 2], [3, 4]], [[0, 1], [0, 1]], rewards=torch.tensor([math.inf, 1.0]))
    batch = Batch.from_trajectories([bad])
    assert batch.loss_mask.tolist() == [False, False, False, True]
    assert math.isnan(batch.rewards[0])


@pytest.mark.parametrize("filler", [0.0, 1.0, math.nan, -math.inf])
def test_logprobs_off_the_mask_are_dropped(filler: float) -> None:
    """Case B60."""
    batch = Batch.from_trajectories(
        [rows([[1, 2, 3]], [[0, 1, 0]], logprobs=torch.tensor([[filler, -1.0, filler]]))]
    )
    assert batch.logprobs is not None
    assert batch.logprobs.tolist() == [0.0, -1.0, 0.0]


def test_versions_off_the_mask_are_minus_one() -> None:
    batch = Batch.from_trajectories(
        [rows([[1, 2, 3]], [[0, 1, 1]], versions=torch.tensor([[0, 3, 4]]))]
    )
    assert batch.versions is not None
    assert batch.versions.tolist() == [-1, 3, 4]


@pytest.mark.parametrize("share_prefixes", [True, False])
def test_token_i_is_predicted_by_its_predecessor(share_prefixes: bool) -> None:
    """Case B59: 5 20 21 with mask 0 1 1: 20 is predicted after 5 and 21 after 20."""
    batch = Batch.from_trajectories([rows([[5, 20, 21]], [[0, 1, 1]])])
    (micro,) = micro_batches(batch, [0], max_tokens=10, share_prefixes=share_prefixes)
    assert micro.input_ids[micro.predictors].tolist() == [5, 20]
    assert micro.targets.tolist() == [20, 21]
    assert micro.tokens[micro.slots.argsort()].tolist() == [1, 2]


def test_turns_train_exactly_the_sampled_tokens() -> None:
    """Case B122: header, separator and tool output are context in the middle of the row."""
    mask = [[0, 0, 1, 1, 0, 0, 1]]
    batch = Batch.from_trajectories([rows([[1, 6, 10, 2, 3, 7, 11]], mask)])
    (micro,) = micro_batches(batch, [0], max_tokens=10, share_prefixes=True)
    assert micro.targets.tolist() == [10, 2, 11]
    assert micro.input_ids[micro.predictors].tolist() == [6, 10, 7]


def test_rows_that_share_a_trained_token_share_its_prediction() -> None:
    """1 2 3 and 1 2 4, both trained on 2: three predictions for four trained tokens."""
    batch = Batch.from_trajectories([rows([[1, 2, 3], [1, 2, 4]], [[0, 1, 1], [0, 1, 1]])])
    (micro,) = micro_batches(batch, [0, 1], max_tokens=10, share_prefixes=True)
    assert micro.targets.tolist() == [2, 3, 4]
    assert dict(zip(micro.tokens.tolist(), micro.slots.tolist(), strict=True)) == {
        1: 0,
        2: 1,
        4: 0,
        5: 2,
    }
    assert micro.rows.tolist() == [0, 0, 1, 1]


def test_what_follows_the_last_trained_token_is_not_computed() -> None:
    batch = Batch.from_trajectories([rows([[1, 2, 3, 4]], [[0, 1, 0, 0]])])
    (micro,) = micro_batches(batch, [0], max_tokens=10, share_prefixes=False)
    assert micro.input_ids.tolist() == [1, 2]


def test_rows_without_a_trained_token_are_left_out() -> None:
    batch = Batch.from_trajectories([rows([[1, 2], [3, 4]], [[0, 0], [0, 1]])])
    (micro,) = micro_batches(batch, [0, 1], max_tokens=10, share_prefixes=False)
    assert micro.input_ids.tolist() == [3, 4]
    assert micro_batches(batch, [0], max_tokens=10, share_prefixes=True) == []


def test_minibatches_are_balanced_and_keep_groups_whole() -> None:
    """Groups with 1, 3 and 2 trained tokens in two steps: {3} and {1, 2}."""
    groups = [
        rows([[1, 2, 3, 4]], [[0, 0, 0, 1]]),
        rows([[1, 2, 3, 4]], [[0, 1, 1, 1]]),
        rows([[1, 2, 3, 4]] * 2, [[0, 0, 0, 1]] * 2),
    ]
    batch = Batch.from_trajectories(groups)
    assert minibatches(batch, 2) == [[0, 2, 3], [1]]
    assert minibatches(batch, 1) == [[0, 1, 2, 3]]


def test_minibatches_of_one_group_keep_rollouts_whole() -> None:
    group = rows([[1, 2]] * 3, [[0, 1]] * 3, rollout_group=RolloutGroup(row_counts=(2, 1)))
    batch = Batch.from_trajectories([group])
    assert minibatches(batch, 2) == [[0, 1], [2]]
    assert minibatches(batch, 8) == [[0, 1], [2]], "never an empty step"


def test_each_token_may_have_its_own_temperature() -> None:
    """Equal rows sampled at 0.5 and 2: the shared token is predicted once under each."""
    temperatures = torch.tensor([[0.0, 0.5], [0.0, 2.0]])
    batch = Batch.from_trajectories([rows([[1, 2]] * 2, [[0, 1]] * 2, temperatures=temperatures)])
    (micro,) = micro_batches(batch, [0, 1], max_tokens=10, share_prefixes=True)
    assert micro.input_ids.tolist() == [1, 2]
    assert micro.predictors.tolist() == [0, 0]
    assert micro.targets.tolist() == [2, 2]
    assert micro.temperatures is not None
    assert micro.temperatures[micro.slots].tolist() == [0.5, 2.0]
