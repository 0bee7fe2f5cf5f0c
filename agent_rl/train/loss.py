"""Losses of each token, and the weights that sum them up. Pure functions, formulas cited.

Tensors are packed, one entry per token; ``mask`` says which tokens count and ``rows`` in which row
they stand. A loss is ``sum(token_loss * weight)`` with weights fixed for the whole minibatch before
the first forward pass: how it is divided into micro-batches or processes cannot change it. Masking
is by ``torch.where``: nan at a masked place stays there.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from agent_rl.config import Aggregation, KLEstimator

_MAX_LOG_RATIO = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoss:
    """Per token: the loss with its gradient, the ratio, and which tokens a clip decided."""

    loss: Tensor
    ratio: Tensor
    is_clipped: Tensor
    is_dual_clipped: Tensor


def aggregation_weights(
    mode: Aggregation, mask: Tensor, rows: Tensor, rollouts: Tensor, *, horizon: int | None = None
) -> Tensor:
    """[T] weights that sum the token losses of a minibatch up to its loss; 0 off the mask.

    N trained tokens, n_row of them in a row, R rows that have any, L the ``horizon``:

    - token-mean: 1 / N (DAPO, arxiv.org/abs/2503.14476)
    - seq-mean-token-mean: 1 / (R n_row) (GRPO, 2402.03300)
    - seq-mean-token-sum: 1 / R
    - seq-mean-token-sum-norm: 1 / L
    - dr-grpo: 1 / (R L) (2503.20783)
    - rollout-mean: 1 / (logical rollouts * trained tokens of the rollout)

    Losses 1 1 | 4 with L = 4 -> 2, 2.5, 3, 1.5, 0.75. ``rollouts`` [R] is the rollout of each row.
    """
    trained = mask.double()
    if mode == "token-mean":
        return trained / trained.sum().clamp(min=1.0)
    if mode in ("seq-mean-token-sum-norm", "dr-grpo") and horizon is None:
        raise ValueError(f"loss_aggregation={mode} divides by a horizon; none was given")
    if mode == "seq-mean-token-sum-norm":
        return trained / float(horizon or 1)
    units = rollouts[rows] if mode == "rollout-mean" else rows
    counts = torch.zeros(len(rollouts), dtype=torch.float64, device=mask.device)
    counts.index_add_(0, units, trained)
    weights = trained / (counts > 0).sum().clamp(min=1)
    if mode == "seq-mean-token-sum":
        return weights
    if mode == "dr-grpo":
        return weights / float(horizon or 1)
    return weights / counts[units].clamp(min=1.0)


def row_mean(values: Tensor, mask: Tensor, rows: Tensor) -> Tensor:
    """[T] -> [T]: at each token the mean of its row over trained tokens; 0 for an empty row."""
    _, places = torch.unique(rows, return_inverse=True)
    sums = torch.zeros(len(rows), dtype=values.dtype, device=values.device)
    counts = torch.zeros_like(sums)
    sums = sums.index_add(0, places, torch.where(mask, values, 0.0))
    counts = counts.index_add(0, places, mask.to(values.dtype))
    return (sums / counts.clamp(min=1.0))[places]


def log_ratio(new: Tensor, old: Tensor, mask: Tensor) -> Tensor:
    """new - old, at least in float32 and within +-20, so that no exp overflows; 0 off the mask."""
    dtype = torch.promote_types(new.dtype, torch.float32)
    difference = torch.where(mask, new, 0.0).to(dtype) - torch.where(mask, old, 0.0).to(dtype)
    return difference.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)


def sequence_log_ratio(new: Tensor, proximal: Tensor, mask: Tensor, rows: Tensor) -> Tensor:
    """GSPO: the mean log-ratio of the row at each of its tokens (arxiv.org/abs/2507.18071).

    Log-ratios 0.3, -0.1, 0.2 -> 0.4 / 3, a ratio of 1.14263, whatever stands off the mask.
    """
    return row_mean(log_ratio(new, proximal, mask), mask, rows)


def ppo_clip(
    log_ratios: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    eps_clip: float,
    eps_clip_higher: float | None = None,
    c_clip: float | None = None,
) -> PolicyLoss:
    """max(-A r, -A clip(r, 1 - eps, 1 + eps_higher)).

    PPO (arxiv.org/abs/1707.06347), asymmetric as in DAPO (2503.14476); ``c_clip`` c > 1 limits the
    loss to c |A| where A < 0 (dual clip, 1912.09729). A -1, r 5, eps 0.2: 5, with c 3: 3.
    """
    ratio = log_ratios.exp()
    advantages = torch.where(mask, advantages, 0.0)
    higher = eps_clip if eps_clip_higher is None else eps_clip_higher
    free = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - eps_clip, 1.0 + higher)
    loss = torch.maximum(free, clipped)
    is_dual_clipped = torch.zeros_like(mask)
    if c_clip is not None:
        limit = -advantages * c_clip
        is_dual_clipped = (advantages < 0.0) & (limit < loss) & mask
        loss = torch.where(is_dual_clipped, limit, loss)
    return PolicyLoss(
        loss=torch.where(mask, loss, 0.0),
        ratio=ratio.detach(),
        is_clipped=(clipped > free) & mask,
        is_dual_clipped=is_dual_clipped,
    )


def cispo(
    log_ratios: Tensor,
    new: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    eps_clip: float,
    eps_clip_higher: float | None = None,
) -> PolicyLoss:
    """-sg(clip(r, 1 - eps, 1 + eps_higher)) A log p: every token keeps a gradient.

    CISPO (arxiv.org/abs/2506.13585). r 2, eps_higher 0.2, A 1, log p -1 -> 1.2.
    """
    ratio = log_ratios.exp().detach()
    higher = eps_clip if eps_clip_higher is None else eps_clip_higher
    capped = ratio.clamp(1.0 - eps_clip, 1.0 + higher)
    safe_new = torch.where(mask, new, 0.0)
    return PolicyLoss(
        loss=torch.where(mask, -capped * advantages * safe_new, 0.0),
        ratio=ratio,
        is_clipped=(capped != ratio) & mask,
        is_dual_clipped=torch.zeros_like(mask),
    )


def sapo(
    log_ratios: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    tau_positive: float = 1.0,
    tau_negative: float = 1.05,
) -> PolicyLoss:
    """-(4 / tau) sigmoid(tau (r - 1)) A: a soft gate in place of the clip, tau by the sign of A.

    SAPO (arxiv.org/abs/2511.20347). At r = 1 the loss is -2 A / tau and its slope -A.
    """
    ratio = log_ratios.exp()
    advantages = torch.where(mask, advantages, 0.0)
    tau = torch.where(advantages > 0.0, tau_positive, tau_negative)
    gate = torch.sigmoid(tau * (ratio - 1.0)) * 4.0 / tau
    return PolicyLoss(
        loss=torch.where(mask, -gate * advantages, 0.0),
        ratio=ratio.detach(),
        is_clipped=torch.zeros_like(mask),
        is_dual_clipped=torch.zeros_like(mask),
    )


def kl_estimate(kind: KLEstimator, new: Tensor, reference: Tensor, mask: Tensor) -> Tensor:
    """KL(new || reference) from sampled tokens (joschu.net/blog/kl-approx.html), 0 off the mask.

    d = new - reference: k1 d, k2 d^2 / 2, k3 exp(-d) - 1 + d. As a loss it is added: + beta KL.
    new -1, reference -1.5 -> 0.5, 0.125, 0.106531.

    Raises:
        ValueError: another name.
    """
    d = log_ratio(new, reference, mask)
    if kind == "k1":
        return d
    if kind == "k2":
        return d.square() / 2.0
    if kind == "k3":
        return torch.exp(-d) - 1.0 + d
    raise ValueError(f"KL estimator {kind!r} is not one of k1, k2, k3")


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    mask: Tensor,
    *,
    eps_clip: float = 0.5,
    huber_delta: float | None = None,
) -> Tensor:
    """Per token max(l(V, R), l(oldV + clip(V - oldV, +-eps), R)), l = d^2 / 2 or Huber.

    The clipped value loss of PPO's reference implementation. V 2, old 1, R 0, eps 0.5 -> 2.
    """
    values = torch.where(mask, values, 0.0)
    old_values, returns = torch.where(mask, old_values, 0.0), torch.where(mask, returns, 0.0)
    clipped = old_values + (values - old_values).clamp(-eps_clip, eps_clip)
    return torch.maximum(
        _squared(values - returns, huber_delta), _squared(clipped - returns, huber_delta)
    )


def topk_distillation(student: Tensor, teacher: Tensor) -> Tensor:
    """[M] KL(student || teacher) over k tokens and one bucket for all others.

    On-policy distillation (arxiv.org/abs/2306.13649) from the log-probs [M, k] of the teacher's
    likeliest tokens. Student 0.5, teacher 0.8 of one token: 0.5 ln(5/8) + 0.5 ln(5/2) = 0.223144.
    """
    student_all, teacher_all = _with_rest(student), _with_rest(teacher.to(student.dtype))
    return (student_all.exp() * (student_all - teacher_all)).sum(1)


def _with_rest(logprobs: Tensor) -> Tensor:
    """[M, k] -> [M, k + 1]: the log of the probability that is left, at least 1e-6."""
    total = logprobs.exp().sum(1, keepdim=True)
    return torch.cat([logprobs, torch.log1p(-total.clamp(max=1.0 - 1e-6))], dim=1)


def _squared(difference: Tensor, huber_delta: float | None) -> Tensor:
    half = difference.square() / 2.0
    if huber_delta is None:
        return half
    size = difference.abs()
    return torch.where(size <= huber_delta, half, huber_delta * (size - huber_delta / 2.0))
