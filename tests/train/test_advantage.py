"""Advantages by hand-worked numbers."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from agent_rl.train import advantage


def gae(
    rewards: list[float],
    mask: list[int],
    gamma: float,
    lam: float,
    values: list[float] | None = None,
    bootstrap: float | None = None,
) -> list[float]:
    """One row."""
    got = advantage.generalized_advantage(
        torch.tensor(rewards),
        torch.tensor(values or [0.0] * len(mask)),
        torch.tensor(mask, dtype=torch.bool),
        torch.zeros(len(mask), dtype=torch.long),
        gamma=gamma,
        lam=lam,
        bootstrap=None if bootstrap is None else torch.tensor([bootstrap]),
    )
    result: list[float] = got.tolist()
    return result


@pytest.mark.parametrize("filler", [100.0, 0.0, math.nan])
def test_value_off_the_mask_bootstraps_nothing(filler: float) -> None:
    """Case B105."""
    got = gae([0, 1, 0], [1, 1, 0], 1.0, 0.95, values=[0.0, 0.0, filler])
    assert got == pytest.approx([0.95, 1.0, 0.0])


def test_outcome_is_discounted_over_trained_tokens_only() -> None:
    assert gae([0, 0, 0, 1], [0, 1, 1, 1], 1.0, 1.0) == [0.0, 1.0, 1.0, 1.0]
    assert gae([0, 0, 0, 1], [0, 1, 1, 1], 0.9, 1.0) == pytest.approx([0, 0.81, 0.9, 1.0])


def test_critic_values() -> None:
    got = gae([0, 0, 0, 1], [0, 1, 1, 1], 0.9, 0.95, values=[0.1, 0.2, 0.3, 0.4])
    assert got == pytest.approx([0.0, 0.559915, 0.573, 0.6])


def test_several_turns_with_a_reward_each() -> None:
    """Mask 0 1 0 0 1 1, rewards .5 and 1, gamma .9: 1 <- .9 <- .5 + .9 * .9 = 1.31."""
    got = gae([0, 0.5, 0, 0, 0, 1], [0, 1, 0, 0, 1, 1], 0.9, 1.0)
    assert got == pytest.approx([0, 1.31, 0, 0, 0.9, 1.0])


def test_truncated_row_bootstraps() -> None:
    """r + gamma V - V = 0 + .9 * .5 - .2."""
    assert gae([0], [1], 0.9, 1.0, values=[0.2], bootstrap=0.5) == pytest.approx([0.25])


def test_a_last_row_without_tokens_has_a_bootstrap_all_the_same() -> None:
    got = advantage.generalized_advantage(
        torch.tensor([0.0]),
        torch.tensor([0.2]),
        torch.tensor([True]),
        torch.tensor([0]),
        gamma=0.9,
        lam=1.0,
        bootstrap=torch.tensor([0.5, 0.0]),
    )
    assert got.tolist() == pytest.approx([0.25])


def test_rows_do_not_run_into_each_other() -> None:
    mask = torch.ones(5, dtype=torch.bool)
    rows = torch.tensor([0, 0, 1, 1, 1])
    rewards = torch.tensor([0.0, 1.0, 0.0, 0.0, 2.0])
    got = advantage.generalized_advantage(rewards, torch.zeros(5), mask, rows, gamma=0.5, lam=1.0)
    assert got.tolist() == [0.5, 1.0, 0.5, 1.0, 2.0]


def terminal(reward: float, mask: list[int]) -> Tensor:
    return advantage.rewards_at_end(
        torch.tensor([reward]),
        torch.tensor(mask, dtype=torch.bool),
        torch.zeros(len(mask), dtype=torch.long),
    )


def test_outcome_lands_on_the_last_trained_token() -> None:
    """Case B88: a row that ends with tool output keeps its reward, undiscounted by it."""
    rewards = terminal(1.0, [1, 1, 0, 0])
    assert rewards.tolist() == [0.0, 1.0, 0.0, 0.0]
    assert gae(rewards.tolist(), [1, 1, 0, 0], 0.5, 1.0) == [0.5, 1.0, 0.0, 0.0]
    rewards = terminal(1.0, [1, 1, 0, 0, 1])
    got = gae(rewards.tolist(), [1, 1, 0, 0, 1], 1.0, 0.9)
    assert got == pytest.approx([0.81, 0.9, 0.0, 0.0, 1.0])


def test_row_without_trained_tokens() -> None:
    assert terminal(1.0, [0, 0]).tolist() == [0.0, 0.0]
    assert gae([0, 0], [0, 0], 1.0, 1.0) == [0.0, 0.0]


def test_length_weighted_mean() -> None:
    """Rewards 1 0 of 3 and 1 tokens: 3 / 4; a group of its own: itself; nan counts nowhere."""
    got = advantage.length_weighted_mean(
        torch.tensor([1.0, 0.0, 2.0, math.nan]),
        torch.tensor([3, 1, 5, 7]),
        torch.tensor([0, 0, 1, 0]),
    )
    assert got.tolist() == [0.75, 0.75, 2.0, 0.75]


def test_last_trained() -> None:
    """Mask 1 1 0 | 0 | 0 1: the values at the second token, none, the last."""
    got = advantage.last_trained(
        torch.tensor([1.0, 2.0, 9.0, 9.0, 9.0, 3.0]),
        torch.tensor([True, True, False, False, False, True]),
        torch.tensor([0, 0, 0, 1, 2, 2]),
        3,
    )
    assert got.tolist() == [2.0, 0.0, 3.0]


def test_distillation_advantage_and_its_sum_with_a_reward() -> None:
    mask = torch.tensor([True, False])
    teacher, student = torch.tensor([-1.0, math.nan]), torch.tensor([-1.5, 0.0])
    got = advantage.distillation_advantage(teacher, student, mask)
    assert got.tolist() == [0.5, 0.0]
    assert (got + torch.tensor([1.0, 0.0])).tolist() == [1.5, 0.0]


def test_kl_rewards() -> None:
    """Case B118: -.1 * .5 where the reference is half a nat below; 15 nats count as 10."""
    got = advantage.kl_rewards(
        "k1",
        torch.tensor([-1.0, 0.0, 0.0]),
        torch.tensor([-1.5, -15.0, math.nan]),
        torch.tensor([True, True, False]),
        coefficient=0.1,
    )
    assert got.tolist() == pytest.approx([-0.05, -1.0, 0.0])
