"""Corrections for tokens that other weights, or another program, sampled. Pure functions.

Three log-probs of one token: behaviour (the engine's, when sampled), proximal (the trainer's,
before the update) and policy (with gradient). PPO's ratio is policy / proximal; here is what stands
for proximal / behaviour: a weight without gradient, and which tokens are rejected. Denominators are
fixed before rejection, so a rejected token makes no other one louder.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from agent_rl.config import KLEstimator, RejectionSamplingConfig
from agent_rl.train.loss import kl_estimate, log_ratio, row_mean

_KL_METRICS: dict[str, KLEstimator] = {"kl_k1": "k1", "kl_k2": "k2", "kl_k3": "k3"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """``weights`` [T] multiply the policy loss (0: rejected, or off the mask)."""

    weights: Tensor
    is_kept: Tensor
    is_touched: Tensor
    """Rejected or clamped."""


def behaviour_correction(
    proximal: Tensor,
    behaviour: Tensor,
    mask: Tensor,
    rows: Tensor,
    config: RejectionSamplingConfig,
) -> Correction:
    """Truncated (clamp) or masked importance weights, by token or by row.

    Level token, action clamp is TIS; token, mask with both bounds is IcePop; sequence, mask with
    agg sum is MIS, with agg mean geometric rejection. Log ratios .1 .1 2.0, upper 5: token level
    rejects the third (7.39); sequence mean keeps all at exp(.733) = 2.08; sum rejects the row.
    """
    logs = log_ratio(proximal, behaviour, mask & torch.isfinite(proximal - behaviour))
    by_row, is_ratio = config.level == "sequence", config.metric == "ratio"
    kind = _KL_METRICS.get(config.metric)
    tested = logs if kind is None else kl_estimate(kind, logs, torch.zeros_like(logs), mask)
    if by_row:
        tested = _aggregate(tested, mask, rows, config.agg)
    if is_ratio:
        tested = tested.exp()
    lower = config.lower
    is_outside = (tested > config.upper) | (tested < (-torch.inf if lower is None else lower))
    is_outside &= mask
    weights = (row_mean(logs, mask, rows) if by_row and is_ratio else logs).exp()
    if config.action == "clamp":
        clamped = weights.clamp(0.0 if lower is None else lower, config.upper)
        weights = torch.where(is_outside, clamped, weights)
        is_kept = mask
    else:
        is_kept = mask & ~is_outside
    return Correction(
        weights=torch.where(is_kept, weights, 0.0).detach(),
        is_kept=is_kept,
        is_touched=is_outside,
    )


def loglinear_proximal(
    new: Tensor, behaviour: Tensor, versions: Tensor, mask: Tensor, *, current_version: int
) -> Tensor:
    """Proximal log-probs without a forward pass: behaviour + alpha (new - behaviour), no gradient.

    alpha = clip((v - 1 - v_b) / (v - v_b), 0, 1) for a token of version v_b under version v:
    v_b = v - 1 -> 0 and v_b = v - 3 -> 2/3.
    """
    age = (current_version - versions).double()
    alpha = torch.where(age > 0.0, ((age - 1.0) / age.clamp(min=1.0)).clamp(0.0, 1.0), 0.0)
    safe = torch.where(mask, behaviour, 0.0)
    moved = safe + alpha.to(new.dtype) * (torch.where(mask, new, 0.0) - safe)
    return torch.where(mask, moved, 0.0).detach()


def m2po_mask(proximal: Tensor, behaviour: Tensor, mask: Tensor, *, threshold: float) -> Tensor:
    """Drop the tokens with the largest squared log-ratio until the mean of the rest is < threshold.

    M2PO (arxiv.org/abs/2510.01161). Squares 4, 1, .1, .1 and threshold .5: without the 4 the mean
    is .4, so one token goes. If nothing helps, the smallest one stays.
    """
    places = torch.nonzero(mask)[:, 0]
    if not len(places):
        return mask
    squares = (behaviour - proximal)[places].double().square()
    order = torch.argsort(squares, stable=True)
    means = squares[order].cumsum(0) / torch.arange(1, len(order) + 1, device=mask.device)
    # Dropping the largest first leaves a prefix of the ascending order; its mean only grows.
    num_kept = (means < threshold).sum().clamp(min=1)
    kept = torch.zeros_like(mask)
    kept[places[order[: int(num_kept)]]] = True
    return kept


def _aggregate(values: Tensor, mask: Tensor, rows: Tensor, how: str) -> Tensor:
    """[T]: at each token the mean, sum or maximum of its row over trained tokens."""
    if how == "mean":
        return row_mean(values, mask, rows)
    _, places = torch.unique(rows, return_inverse=True)
    start = torch.zeros(len(rows), dtype=values.dtype, device=values.device)
    if how == "sum":
        return start.index_add(0, places, torch.where(mask, values, 0.0))[places]
    lowest = torch.where(mask, values, -torch.inf)
    highest = (start - torch.inf).scatter_reduce(0, places, lowest, "amax")
    return torch.where(torch.isfinite(highest), highest, 0.0)[places]
