"""Reward and advantage normalisation: levels batch or group, one reference per logical rollout.

Rewards rows 1, 2 | 3 of two rollouts with references 1 and 3: mean 2 and std 1 come from the two
references, and each row keeps its own reward: -1, 0, 1. A group is the rows of one trajectory as
they are, never a fixed stride. Statistics are float64; everything here is a pure function.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from agent_rl.config import NormConfig
from agent_rl.errors import WorkflowContractError
from agent_rl.types import TrajBatchMeta


def overlong_penalty(
    lengths: Tensor, *, max_new_tokens: int, overlong_tokens: int, factor: float
) -> Tensor:
    """Soft penalty on the last ``overlong_tokens`` of the budget (DAPO, arxiv.org/abs/2503.14476).

    min(0, -(length - (max_new_tokens - overlong_tokens)) / overlong_tokens * factor).
    Lengths 3, 1, 2 with max 3, overlong 2, factor 1 -> -1, 0, -0.5.
    """
    expected = max_new_tokens - overlong_tokens
    return (-(lengths.double() - expected) / overlong_tokens * factor).clamp(max=0.0)


def resolve_references(rewards: Tensor, meta: TrajBatchMeta) -> Tensor:
    """[R] rewards -> one reference per logical rollout; nan where none of its rewards is known.

    Raises:
        WorkflowContractError: rows of one rollout differ and it gives no ``rollout_reward``.
    """
    references = []
    first = 0
    for group in meta.rollout_groups:
        for count, explicit in zip(group.row_counts, group.references, strict=True):
            rows = rewards[first : first + count]
            first += count
            known = [value for value in rows.tolist() if math.isfinite(value)]
            if explicit is None and len(set(known)) > 1:
                raise WorkflowContractError(
                    f"the rows of one logical rollout have the rewards {known}: normalisation "
                    "needs one value for the rollout; return an explicit rollout_reward"
                )
            if not known:
                references.append(math.nan)
            else:
                references.append(known[0] if explicit is None else float(explicit))
    return torch.tensor(references, dtype=torch.float64)


def normalize_rewards(
    rewards: Tensor, references: Tensor, meta: TrajBatchMeta, config: NormConfig
) -> Tensor:
    """(row reward - baseline of its rollout) / divisor, [R] float64; unknown rewards become 0.

    Rows and references that are not finite count in no statistic. Leave-one-out takes a whole
    rollout out of its own baseline; a rollout without peers is its own baseline.
    """
    counts = [count for group in meta.rollout_groups for count in group.row_counts]
    groups = torch.repeat_interleave(
        torch.arange(meta.n_trajs),
        torch.tensor([group.num_rollouts for group in meta.rollout_groups]),
    )
    baseline, divisor = _statistics(
        references.double(), torch.isfinite(references), groups, config, singletons=None
    )
    rollouts = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    normalized = (rewards.double() - baseline[rollouts]) / divisor[rollouts]
    return torch.where(torch.isfinite(rewards), normalized, 0.0)


def normalize_advantages(
    advantages: Tensor, mask: Tensor, groups: Tensor, num_rollouts: Tensor, config: NormConfig
) -> Tensor:
    """(advantage - mean) / divisor over trained tokens; 0 elsewhere.

    ``groups`` [T] is the group of each token and ``num_rollouts`` [G] the logical rollouts of each
    group: they matter for groups of one only (leave-one-out gives 0, an unbiased std is 1).
    """
    values = torch.where(mask, advantages.double(), 0.0)
    singletons = num_rollouts == 1
    baseline, divisor = _statistics(values, mask, groups, config, singletons=singletons)
    return torch.where(mask, (values - baseline) / divisor, 0.0)


def _statistics(
    values: Tensor, counted: Tensor, groups: Tensor, config: NormConfig, singletons: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Baseline and divisor for each value. ``singletons`` [G]: groups that hold one rollout."""
    values = torch.where(counted, values, 0.0)
    num_groups = int(groups.max()) + 1 if len(groups) else 0
    batch = torch.zeros_like(groups)
    baseline = torch.zeros_like(values)
    if config.mean_level is not None:
        pool = groups if config.mean_level == "group" else batch
        size = _sum(counted.double(), pool, num_groups)[pool]
        total = _sum(values, pool, num_groups)[pool]
        baseline = total / size.clamp(min=1.0)
        if config.mean_leave1out:
            others = torch.where(counted, (total - values) / (size - 1.0).clamp(min=1.0), baseline)
            alone = (size <= 1.0) | _alone(pool, singletons, config.mean_level)
            baseline = torch.where(alone, values, others)
    divisor = torch.ones_like(values)
    if config.std_level is not None:
        pool = groups if config.std_level == "group" else batch
        size = _sum(counted.double(), pool, num_groups)[pool]
        # Around the chosen baseline, leave-one-out included.
        squares = _sum(torch.where(counted, (values - baseline) ** 2, 0.0), pool, num_groups)[pool]
        std = (squares / (size - float(config.std_unbiased)).clamp(min=1.0)).sqrt()
        divisor = torch.where(std <= config.eps, 1.0, std + config.eps)
        if config.std_unbiased:
            alone = (size <= 1.0) | _alone(pool, singletons, config.std_level)
            divisor = torch.where(alone, 1.0, divisor)
    return baseline, divisor


def _alone(pool: Tensor, singletons: Tensor | None, level: str) -> Tensor:
    """Which values belong to a pool that holds a single logical rollout, by its rollout counts."""
    if singletons is None:
        return torch.zeros_like(pool, dtype=torch.bool)
    if level == "group":
        return singletons[pool]
    return torch.full_like(pool, len(singletons) == 1 and bool(singletons[0]), dtype=torch.bool)


def _sum(values: Tensor, pool: Tensor, size: int) -> Tensor:
    return torch.zeros(size, dtype=values.dtype).index_add_(0, pool, values)
