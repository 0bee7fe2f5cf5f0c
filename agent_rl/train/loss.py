"""Losses per token, and the weights that make one number of them. Pure functions, formulas cited.

Tensors are packed, one entry per token; ``mask`` says which tokens count and ``rows`` in which row
they stand. A loss is ``sum(token_loss * weight)`` with weights fixed for the whole minibatch before
the first forward pass: how it is divided into micro-batches or processes cannot change it. Masking
is by ``torch.where``: nan at a masked place stays there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

Aggregation: TypeAlias = Literal[
    "token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "rollout-mean"
]
_MAX_LOG_RATIO = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoss:
    """Per token: the loss with its gradient, the ratio, and which tokens a clip decided."""

    loss: Tensor
    ratio: Tensor
    is_clipped: Tensor
    is_dual_clipped: Tensor


def aggregation_weights(mode: Aggregation, mask: Tensor, rows: Tensor, rollouts: Tensor) -> Tensor:
    """[T] weights that sum the token losses of a minibatch up to its loss; 0 off the mask.

    With n_row trained tokens in a row and R rows that have any:
    token-mean 1 / N; seq-mean-token-mean 1 / (R n_row); seq-mean-token-sum 1 / R; rollout-mean
    1 / (number of logical rollouts * trained tokens of the rollout).
    Losses 1 1 | 4 -> 2, 2.5, 3. ``rollouts`` [R] is the logical rollout of each row.
    """
    if mode == "token-mean":
        return mask.double() / mask.sum().clamp(min=1)
    units = rollouts[rows] if mode == "rollout-mean" else rows
    counts = torch.zeros(len(rollouts), dtype=torch.float64, device=mask.device)
    counts.index_add_(0, units, mask.double())
    num_units = (counts > 0).sum().clamp(min=1)
    weights = mask.double() / num_units
    return weights if mode == "seq-mean-token-sum" else weights / counts[units].clamp(min=1.0)


def safe_ratio(new: Tensor, old: Tensor, mask: Tensor) -> Tensor:
    """exp(new - old), log-ratio held within +-20 so that no exp overflows; 1 off the mask."""
    difference = torch.where(mask, new, 0.0) - torch.where(mask, old, 0.0)
    return difference.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()


def ppo_clip(
    new: Tensor,
    proximal: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    eps_clip: float,
    eps_clip_higher: float | None = None,
    c_clip: float | None = None,
) -> PolicyLoss:
    """max(-A r, -A clip(r, 1 - eps, 1 + eps_higher)) with r = new / proximal.

    PPO (arxiv.org/abs/1707.06347), asymmetric as in DAPO (2503.14476); ``c_clip`` c > 1 limits the
    loss at c |A| where A < 0 (dual clip, 1912.09729). A -1, r 5, eps 0.2: 5, with c 3: 3.
    """
    ratio = safe_ratio(new, proximal, mask)
    advantages = torch.where(mask, advantages, 0.0)
    higher = eps_clip if eps_clip_higher is None else eps_clip_higher
    free = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - eps_clip, 1.0 + higher)
    loss = torch.maximum(free, clipped)
    is_clipped = (clipped > free) & mask
    is_dual_clipped = torch.zeros_like(mask)
    if c_clip is not None:
        limit = -advantages * c_clip
        is_dual_clipped = (advantages < 0.0) & (limit < loss) & mask
        loss = torch.where(is_dual_clipped, limit, loss)
    return PolicyLoss(
        loss=torch.where(mask, loss, 0.0),
        ratio=ratio.detach(),
        is_clipped=is_clipped,
        is_dual_clipped=is_dual_clipped,
    )
