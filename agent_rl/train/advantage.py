"""From one reward per row to one advantage per trained token. Pure functions, formulas cited.

Tensors are packed: ``[T]`` over the tokens of all rows, ``[R]`` over rows. Only trained tokens are
steps: what stands off the mask (tool output, padding, a critic's value there) influences nothing.

Most methods are settings of the baseline, not code: docs/guides/training.md has the table.
"""

from __future__ import annotations

import torch
from torch import Tensor

from agent_rl.config import KLEstimator
from agent_rl.train.loss import kl_estimate, log_ratio


def rewards_at_end(rewards: Tensor, mask: Tensor, rows: Tensor) -> Tensor:
    """[R] -> [T]: each row's reward on its last trained token, 0 elsewhere.

    Mask 1 1 0 0 and reward 1 -> 0 1 0 0: a reward on tool output would be lost or discounted.
    """
    places = torch.arange(len(mask), device=mask.device)
    is_last = places == last_places(mask, rows, len(rewards))[rows]
    return torch.where(mask & is_last, rewards[rows], 0.0)


def last_trained(values: Tensor, mask: Tensor, rows: Tensor, num_rows: int) -> Tensor:
    """[T] -> [R]: the value at each row's last trained token; 0 for a row without one."""
    last = last_places(mask, rows, num_rows)
    return torch.where(last < 0, 0.0, values[last.clamp(min=0)])


def last_places(mask: Tensor, rows: Tensor, num_rows: int) -> Tensor:
    """[R] index of the last trained token of each row; -1: there is none."""
    places = torch.arange(len(mask), device=mask.device)
    last = torch.full((num_rows,), -1, dtype=torch.int64, device=mask.device)
    return last.scatter_reduce(0, rows[mask], places[mask], "amax")


def generalized_advantage(
    token_rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    rows: Tensor,
    *,
    gamma: float,
    lam: float,
    bootstrap: Tensor | None = None,
) -> Tensor:
    """GAE over the trained tokens of each row (arxiv.org/abs/1506.02438), 0 off the mask.

    delta_t = r_t + gamma V_t+1 - V_t;  A_t = delta_t + gamma lam A_t+1, where t+1 is the next
    *trained* token. ``bootstrap`` [R] is the value after the last one (None: 0, the row ended).
    Rewards 0 1, values 0 0, gamma 0.5 -> 0.5 1.
    """
    places = torch.nonzero(mask)[:, 0]
    result = torch.zeros(len(mask), dtype=torch.float64, device=mask.device)
    if not len(places):
        return result
    owners = rows[places]
    # The last rows may have no token at all.
    num_rows = int(rows[-1]) + 1 if bootstrap is None else len(bootstrap)
    counts = torch.bincount(owners, minlength=num_rows)
    starts = counts.cumsum(0) - counts
    steps = torch.arange(len(places), device=mask.device) - starts[owners]
    width = int(counts.max())

    def unpack(per_token: Tensor) -> Tensor:
        table = torch.zeros(num_rows, width, dtype=torch.float64, device=mask.device)
        table[owners, steps] = per_token[places].double()
        return table

    reward, value = unpack(token_rewards), unpack(values)
    is_step = unpack(mask).bool()
    zeros = torch.zeros(num_rows, dtype=torch.float64, device=mask.device)
    next_value = zeros if bootstrap is None else bootstrap.double()
    next_advantage = zeros
    advantages = torch.zeros_like(reward)
    for t in reversed(range(width)):
        delta = reward[:, t] + gamma * next_value - value[:, t]
        advantage = delta + gamma * lam * next_advantage
        advantages[:, t] = advantage
        next_advantage = torch.where(is_step[:, t], advantage, next_advantage)
        next_value = torch.where(is_step[:, t], value[:, t], next_value)
    result[places] = advantages[owners, steps]
    return result


def length_weighted_mean(rewards: Tensor, lengths: Tensor, groups: Tensor) -> Tensor:
    """OPO: the baseline sum(length r) / sum(length) of each value's group, nan left out.

    arxiv.org/abs/2505.23585. Rewards 1 0 with 3 and 1 trained tokens -> 0.75, 0.75.
    """
    known = torch.isfinite(rewards)
    weights = torch.where(known, lengths.double(), 0.0)
    sums = torch.zeros(2, int(groups.max()) + 1, dtype=torch.float64, device=rewards.device)
    sums[0].index_add_(0, groups, torch.where(known, rewards.double(), 0.0) * weights)
    sums[1].index_add_(0, groups, weights)
    return (sums[0] / sums[1].clamp(min=1.0))[groups]


def distillation_advantage(teacher: Tensor, student: Tensor, mask: Tensor) -> Tensor:
    """On-policy distillation: teacher - student log-prob of each sampled token, 0 off the mask.

    Teacher -1, student -1.5 -> 0.5. Weighted sums with a reward's advantage are plain sums:
    0.5 + 1 = 1.5 with a reward of 1 and both weights 1.
    """
    return log_ratio(teacher, student, mask)


def kl_rewards(
    kind: KLEstimator, old: Tensor, reference: Tensor, mask: Tensor, *, coefficient: float
) -> Tensor:
    """-coefficient KL(old || reference) as a reward of each token, the estimate within +-10."""
    return -coefficient * kl_estimate(kind, old, reference, mask).clamp(-10.0, 10.0)
