"""What cannot be trained on is refused at the door, and the message names the key."""

from __future__ import annotations

import math

import pytest
import torch
from tiny_batches import trajectory

from agent_rl.errors import WorkflowContractError
from agent_rl.train.batch import Batch
from agent_rl.types import RolloutGroup


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"loss_mask": None}, "loss_mask"),
        ({"rewards": None}, "rewards"),
        ({"attention_mask": torch.zeros(2, 2)}, "no row has a token"),
        ({"rewards": torch.zeros(1, 2)}, "rewards must have the shape"),
        ({"loss_mask": torch.zeros(2, 3)}, "loss_mask must have the shape"),
        ({"loss_mask": torch.ones(2, 2)}, "first token"),
        ({"logprobs": torch.tensor([[0.0, math.nan]] * 2)}, "nan or infinite"),
        ({"temperatures": torch.tensor([[1.0, 0.0]] * 2)}, "above 0"),
        ({"rollout_group": RolloutGroup(row_counts=(3,))}, "rollout_group must count 2 rows"),
    ],
)
def test_bad_trajectories_are_refused(change: dict[str, object], message: str) -> None:
    rows = trajectory([[1, 2], [3, 4]], [[0, 1], [0, 1]], [0.0, 1.0]) | change
    with pytest.raises(WorkflowContractError, match=message):
        Batch.from_trajectories([rows])


def test_different_keys_are_refused() -> None:
    first = trajectory([[1, 2]], [[0, 1]], [1.0])
    second = {key: value for key, value in first.items() if key != "versions"}
    with pytest.raises(WorkflowContractError, match="same keys"):
        Batch.from_trajectories([first, second])
    with pytest.raises(WorkflowContractError, match="at least one"):
        Batch.from_trajectories([])
