"""Reward and advantage normalisation by the worked numbers of the guide."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from agent_rl.config import NormConfig
from agent_rl.errors import WorkflowContractError
from agent_rl.train.normalization import (
    normalize_advantages,
    normalize_rewards,
    overlong_penalty,
    resolve_references,
)
from agent_rl.types import RolloutGroup, TrajBatchMeta

NAN = math.nan


def meta(*groups: RolloutGroup) -> TrajBatchMeta:
    return TrajBatchMeta(
        traj_group_sizes=tuple(group.num_rows for group in groups),
        traj_seqlens=(1,) * len(groups),
        rollout_groups=groups,
    )


def group_norm(**options: object) -> NormConfig:
    defaults = {"mean_level": "group", "std_level": "group", "std_unbiased": False}
    return NormConfig.model_validate(defaults | options)


def normalize(rewards: list[float], groups: list[RolloutGroup], config: NormConfig) -> list[float]:
    values, where = torch.tensor(rewards, dtype=torch.float64), meta(*groups)
    references = resolve_references(values, where)
    result: list[float] = normalize_rewards(values, references, where, config).tolist()
    return result


def singles(count: int) -> RolloutGroup:
    return RolloutGroup(row_counts=(1,) * count)


@pytest.mark.parametrize(
    ("options", "references", "rewards", "expected"),
    [
        ({}, (1.0, 3.0), [1, 2, 3], [-1, 0, 1]),
        ({"std_unbiased": True}, (1.0, 3.0), [1, 2, 3], [-0.7071, 0, 0.7071]),
        ({"mean_leave1out": True}, (1.0, 3.0), [1, 2, 3], [-1, -0.5, 1]),
        ({}, (2.0, 2.0), [1, 3, 2], [-1, 1, 0]),  # std 0: the centring stays, divisor 1
    ],
)
def test_two_rollouts_of_three_rows(
    options: dict[str, object],
    references: tuple[float, float],
    rewards: list[float],
    expected: list[float],
) -> None:
    group = RolloutGroup(row_counts=(2, 1), rewards=references)
    assert normalize(rewards, [group], group_norm(**options)) == pytest.approx(expected, abs=1e-4)


def test_mixed_levels() -> None:
    """References 1, 3 | 6, 10: the batch mean is 5, and stds of the groups are taken around it."""
    groups = [
        RolloutGroup(row_counts=(2, 1), rewards=(1.0, 3.0)),
        RolloutGroup(row_counts=(1, 2), rewards=(6.0, 10.0)),
    ]
    rewards = [1, 2, 3, 6, 10, 11]
    first, second = math.sqrt(10.0), math.sqrt(13.0)
    got = normalize(rewards, groups, group_norm(mean_level="batch"))
    expected = [-4 / first, -3 / first, -2 / first, 1 / second, 5 / second, 6 / second]
    assert got == pytest.approx(expected, abs=1e-4)
    std = math.sqrt(11.5)
    got = normalize(rewards, groups, group_norm(mean_level="batch", std_level="batch"))
    assert got == pytest.approx([(r - 5) / std for r in rewards], abs=1e-4)
    got = normalize(rewards, groups, group_norm(std_level="batch"))
    means = [2, 2, 2, 8, 8, 8]
    deviation = math.sqrt((1 + 1 + 4 + 4) / 4)
    expected = [(r - m) / deviation for r, m in zip(rewards, means, strict=True)]
    assert got == pytest.approx(expected, abs=1e-4)


def test_batch_leave_one_out() -> None:
    """Baselines (20 - reference) / 3, std 4/3 sqrt(11.5) around them."""
    groups = [
        RolloutGroup(row_counts=(1, 1), rewards=(1.0, 3.0)),
        RolloutGroup(row_counts=(1, 1), rewards=(6.0, 10.0)),
    ]
    config = group_norm(mean_level="batch", std_level="batch", mean_leave1out=True)
    std = 4 / 3 * math.sqrt(11.5)
    expected = [(r - (20 - r) / 3) / std for r in (1, 3, 6, 10)]
    assert normalize([1, 3, 6, 10], groups, config) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [0, -1.2247, 1.2247]),
        ({"std_unbiased": True}, [0, -1, 1]),
        ({"mean_leave1out": True}, [0, -1.2247, 1.2247]),
        ({"mean_leave1out": True, "std_level": None}, [0, -1.5, 1.5]),
    ],
)
def test_one_group_of_three(options: dict[str, object], expected: list[float]) -> None:
    got = normalize([1, 0, 2], [singles(3)], group_norm(**options))
    assert got == pytest.approx(expected, abs=1e-4)


def test_degenerate_std_is_not_divided_by() -> None:
    """With eps 2^-10 and references -d, d: d <= eps -> divisor 1; d = 2 eps -> d + eps."""
    eps = 2.0**-10
    config = group_norm(eps=eps)
    assert normalize([-eps, eps], [singles(2)], config) == [-eps, eps]
    assert normalize([-2 * eps, 2 * eps], [singles(2)], config) == pytest.approx([-2 / 3, 2 / 3])


def test_partial_groups_keep_their_boundaries() -> None:
    """Case B92: groups of 3, 2 and 3 are normalised among themselves."""
    rewards, groups = [1, 0, 0, 1, 0, 0, 1, 1], [singles(3), singles(2), singles(3)]
    expected = [1.41418, -0.70709, -0.70709, 0.99998, -0.99998, -1.41418, 0.70709, 0.70709]
    assert normalize(rewards, groups, group_norm()) == pytest.approx(expected, abs=1e-4)
    expected = [1.15468, -0.57734, -0.57734, 0.70710, -0.70710]
    got = normalize(rewards, groups, group_norm(std_unbiased=True))
    assert got[:5] == pytest.approx(expected, abs=1e-4)


def test_remainder_is_a_group_of_its_own() -> None:
    """Case B93: values 1, 2 | 3 -> -0.99998, 0.99998, 0, never 300000."""
    got = normalize([1, 2, 3], [singles(2), singles(1)], group_norm())
    assert got == pytest.approx([-0.99998, 0.99998, 0.0], abs=1e-5)


@pytest.mark.parametrize("mean_level", ["batch", "group", None])
@pytest.mark.parametrize("std_level", ["batch", "group"])
@pytest.mark.parametrize("rewards", [[1, 2, 3], [0.1, 0.1, 3]])
def test_no_level_lets_a_remainder_explode(
    mean_level: str | None, std_level: str, rewards: list[float]
) -> None:
    """Case B93: a mean of the batch and a std of the group of one, say; at most sqrt(n)."""
    config = group_norm(mean_level=mean_level, std_level=std_level)
    assert max(map(abs, normalize(rewards, [singles(2), singles(1)], config))) < math.sqrt(3)


@pytest.mark.parametrize("options", [{}, {"std_unbiased": True}, {"mean_leave1out": True}])
def test_singleton_gives_zero(options: dict[str, object]) -> None:
    """Case B95: one value, also with an unbiased std: 0 and finite."""
    assert normalize([0.7], [singles(1)], group_norm(**options)) == [0.0]


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([1, NAN, 0, 1], [0.70709, 0, -1.41418, 0.70709]),
        ([NAN, NAN], [0, 0]),
        ([math.inf, 0], [0, 0]),
        ([NAN, 1, 0], [0, 0.99998, -0.99998]),
    ],
)
def test_unknown_rewards_are_left_out(rewards: list[float], expected: list[float]) -> None:
    """Case B96: not even as zeros do they move the others."""
    got = normalize(rewards, [singles(len(rewards))], group_norm())
    assert got == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("wild", [1.0, 100.0])
def test_a_suppressed_row_moves_no_baseline(wild: float) -> None:
    """Case B99: a reward that will not count (no EOS) is handed over as unknown."""
    is_suppressed = torch.tensor([False, True])
    rewards = torch.where(is_suppressed, NAN, torch.tensor([1.0, wild]))
    config = NormConfig(mean_level="batch", std_level=None)
    assert normalize(rewards.tolist(), [singles(2)], config) == [0.0, 0.0]


def test_steps_keep_their_own_reward() -> None:
    """Case B79: rows -.2, 1 | 0, 0 with references 1, 0: only the shift and scale are shared."""
    group = RolloutGroup(row_counts=(2, 2), rewards=(1.0, 0.0))
    got = normalize([-0.2, 1.0, 0.0, 0.0], [group], group_norm())
    assert got == pytest.approx([-1.4, 1.0, -1.0, -1.0], abs=1e-3)


def test_ambiguous_rollout_is_refused() -> None:
    group = RolloutGroup(row_counts=(2, 1))
    with pytest.raises(WorkflowContractError, match="explicit rollout_reward"):
        resolve_references(torch.tensor([1.0, 2.0, 3.0]), meta(group))
    equal = resolve_references(torch.tensor([2.0, 2.0, 3.0]), meta(group))
    assert equal.tolist() == [2.0, 3.0]


def test_overlong_penalty() -> None:
    penalty = overlong_penalty(
        torch.tensor([3, 1, 2]), max_new_tokens=3, overlong_tokens=2, factor=1.0
    )
    assert penalty.tolist() == [-1.0, 0.0, -0.5]


def advantages(
    values: list[float], mask: list[int], groups: list[int], sizes: list[int], config: NormConfig
) -> Tensor:
    return normalize_advantages(
        torch.tensor(values, dtype=torch.float64),
        torch.tensor(mask, dtype=torch.bool),
        torch.tensor(groups),
        torch.tensor(sizes),
        config,
    )


def test_whitening_leaves_masked_places_out() -> None:
    """Case B102: 2 1 with two masked zeros -> 1, -1, whatever stands off the mask."""
    for filler in (0.0, 50.0, NAN):
        config = NormConfig(std_unbiased=False)
        got = advantages([2, 1, filler, filler], [1, 1, 0, 0], [0] * 4, [2], config)
        assert got.tolist() == pytest.approx([1, -1, 0, 0], abs=1e-4)


def test_normalising_twice_weighs_by_tokens() -> None:
    """Case B101: one token of +1, three of -1: mean -.5, std .866 -> 1.732, -.577."""
    config = NormConfig(std_unbiased=False)
    got = advantages([1, -1, -1, -1], [1] * 4, [0] * 4, [2], config)
    assert got.tolist() == pytest.approx([1.732, -0.577, -0.577, -0.577], abs=1e-3)


def test_token_leave_one_out() -> None:
    config = group_norm(mean_leave1out=True, std_level=None)
    got = advantages([1, 0, 2], [1, 1, 1], [0] * 3, [2], config)
    assert got.tolist() == pytest.approx([0, -1.5, 1.5])


def test_singleton_group_of_several_tokens() -> None:
    """Leave-one-out gives 0; an unbiased std is 1, a biased one is that of the tokens."""
    loo = group_norm(mean_leave1out=True)
    assert advantages([1, 3], [1, 1], [0, 0], [1], loo).tolist() == [0.0, 0.0]
    unbiased = group_norm(std_unbiased=True)
    assert advantages([1, 3], [1, 1], [0, 0], [1], unbiased).tolist() == [-1.0, 1.0]


def test_empty_mask_gives_zeros() -> None:
    got = advantages([1, NAN], [0, 0], [0, 0], [1], NormConfig())
    assert got.tolist() == [0.0, 0.0]
