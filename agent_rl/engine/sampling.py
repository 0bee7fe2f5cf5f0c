"""Sampling: one call turns the logits of a whole batch into token ids and behaviour log-probs.

The behaviour log-prob is log_softmax(logits / temperature) at the chosen token, before penalties,
bias and truncation. Each row is chosen by one uniform number of its own, so the noise of a request
does not depend on its neighbours. Plain batches (temperature only) skip everything else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from agent_rl.types import GenerationConfig

_FIXED_POINT = 2.0**40
# The most likely ids that top-p looks at first on a CPU; real nuclei are rarely wider.
_CANDIDATES = 1024


class Sampled(Protocol):
    """What sampling needs to know of a sequence."""

    @property
    def gconfig(self) -> GenerationConfig: ...

    ids: list[int]
    num_prompt: int
    end_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Truncation:
    """top-k, top-p and min-p of the R rows that use any of them.

    ``may_be_short``: the nucleus of a row may hold more ids than ``num_candidates``.
    """

    rows_R: Tensor
    top_k_R1: Tensor
    top_p_R1: Tensor
    min_p_R1: Tensor
    num_candidates: int
    may_be_short: bool

    def only(self, chosen_R: Tensor) -> Truncation:
        """Those rows alone."""
        return replace(
            self,
            rows_R=self.rows_R[chosen_R],
            top_k_R1=self.top_k_R1[chosen_R],
            top_p_R1=self.top_p_R1[chosen_R],
            min_p_R1=self.min_p_R1[chosen_R],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Penalties:
    """Penalties and bias of the R rows that use any; counts follow the tokens as they come."""

    rows_R: Tensor
    counts_RV: Tensor
    is_seen_RV: Tensor
    bias_RV: Tensor
    frequency_R1: Tensor
    presence_R1: Tensor
    repetition_R1: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingPlan:
    """The sampling parameters of one batch as tensors; built anew when the batch changes.

    ``num_steps`` is for how many steps it holds: until a row has reached its min_new_tokens.
    ``banned`` are the (row, end id) pairs of rows that have not; a grammar sees to that itself.
    """

    temperature_B1: Tensor
    is_greedy_B: Tensor | None
    all_greedy: bool
    truncation: Truncation | None
    penalties: Penalties | None
    banned: tuple[Tensor, Tensor] | None
    num_top: int
    num_steps: float


def plan_sampling(
    sequences: Sequence[Sampled], vocab_size: int, device: torch.device
) -> SamplingPlan:
    configs = [sequence.gconfig for sequence in sequences]
    greedy = [config.is_greedy for config in configs]
    missing = [
        config.min_new_tokens - (len(sequence.ids) - sequence.num_prompt)
        for config, sequence in zip(configs, sequences, strict=True)
    ]
    pairs = [
        (row, end_id)
        for row, sequence in enumerate(sequences)
        if missing[row] > 0 and sequence.gconfig.grammar is None
        for end_id in sequence.end_ids
    ]
    return SamplingPlan(
        temperature_B1=_column([config.logprob_temperature for config in configs], device),
        is_greedy_B=torch.tensor(greedy, device=device) if any(greedy) else None,
        all_greedy=all(greedy),
        truncation=_plan_truncation(configs, vocab_size, device),
        penalties=_plan_penalties(sequences, vocab_size, device),
        banned=_index(pairs, device) if pairs else None,
        num_top=max(config.top_logprobs for config in configs),
        num_steps=min((count for count in missing if count > 0), default=float("inf")),
    )


def sample(
    logits_BV: Tensor,
    plan: SamplingPlan,
    uniforms_B: Tensor,
    forbidden: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """[B, 2 + 2 * num_top] float64: id, log-prob, then ids and log-probs of the most likely.

    ``uniforms_B`` are float64 in [0, 1). ``forbidden``: of the rows [R] under a grammar, the ids
    [R, V] that may not come next; truncation takes from the others. Float64 holds ids and log-probs
    exactly, so that one transfer brings all of them to the host.
    """
    logits_BV = logits_BV.float()
    logprobs_BV = (logits_BV / plan.temperature_B1).log_softmax(-1)
    top_BK = logprobs_BV.topk(plan.num_top) if plan.num_top else None
    scores_BV = _penalized(logits_BV, logprobs_BV, plan)
    # In place: an id that is ruled out is never chosen, so its log-prob is not read any more.
    if plan.banned is not None:
        scores_BV[plan.banned] = -torch.inf
    if forbidden is not None:
        rows_R, is_forbidden_RV = forbidden
        scores_BV[rows_R] = scores_BV[rows_R].masked_fill(is_forbidden_RV, -torch.inf)
    ids_B1 = _choose(scores_BV, plan, uniforms_B)[:, None]
    if plan.penalties is not None:
        _count(plan.penalties, ids_B1)
    columns = [ids_B1.double(), logprobs_BV.gather(1, ids_B1).double()]
    if top_BK is not None:
        columns += [top_BK.indices.double(), top_BK.values.double()]
    return torch.cat(columns, 1)


def _choose(scores_BV: Tensor, plan: SamplingPlan, uniforms_B: Tensor) -> Tensor:
    if plan.all_greedy:
        return scores_BV.argmax(-1)
    weights_BV = (scores_BV - scores_BV.amax(-1, keepdim=True)).exp_()
    if plan.truncation is not None:
        rows_R = plan.truncation.rows_R
        weights_BV[rows_R] = truncate(weights_BV[rows_R], plan.truncation)
    ids_B = draw(weights_BV, uniforms_B)
    if plan.is_greedy_B is not None:
        ids_B = torch.where(plan.is_greedy_B, scores_BV.argmax(-1), ids_B)
    return ids_B


def draw(weights_BV: Tensor, uniforms_B: Tensor) -> Tensor:
    """Inverse transform sampling: the first id whose cumulated weight exceeds u * total.

    Weights [1, 0, 3], u = .25 -> id 2 (1 is not above 1); u = .24 -> id 0. The sums are of fixed
    point integers: exact in any order, so an id of weight 0 can never be drawn.
    """
    cumulated_BV = (weights_BV * _FIXED_POINT).to(torch.int64).cumsum_(-1)
    total_B = cumulated_BV[:, -1]
    target_B = (uniforms_B * total_B).to(torch.int64)
    ids_B = torch.searchsorted(cumulated_BV, target_B[:, None], right=True)[:, 0]
    return ids_B.clamp_(max=weights_BV.shape[1] - 1)  # past the end only if a weight is NaN


def truncate(weights_RV: Tensor, truncation: Truncation) -> Tensor:
    """Zero all weights below the row's threshold: top-k first, top-p of what is left, min-p.

    Weights [.5, .3, .15, .05]: top_p .7 keeps two (.5 does not reach it), min_p .2 keeps three.
    Ids whose weight equals the smallest kept one stay too.
    """
    vocab_size = weights_RV.shape[1]
    num_candidates = min(truncation.num_candidates, vocab_size)
    threshold_R1, is_short_R = _thresholds(weights_RV, truncation, num_candidates)
    if truncation.may_be_short and bool(is_short_R.any()):
        short = truncation.only(is_short_R)
        threshold_R1[is_short_R], _ = _thresholds(weights_RV[is_short_R], short, vocab_size)
    return weights_RV.masked_fill(weights_RV < threshold_R1, 0.0)


def _thresholds(
    weights_RV: Tensor, truncation: Truncation, num_candidates: int
) -> tuple[Tensor, Tensor]:
    """The smallest weight [R, 1] each row keeps; [R] whether it takes more candidates to tell."""
    top_k_R1, top_p_R1 = truncation.top_k_R1, truncation.top_p_R1
    values_RK = weights_RV.topk(num_candidates).values
    in_top_k_RK = torch.arange(num_candidates, device=values_RK.device) < top_k_R1
    mass_RK = values_RK * in_top_k_RK
    has_top_k_R1 = top_k_R1 < weights_RV.shape[1]
    total_R1 = torch.where(has_top_k_R1, mass_RK.sum(1, True), weights_RV.sum(1, True))
    before_RK = mass_RK.cumsum(1) - mass_RK
    num_kept_R1 = (in_top_k_RK & (before_RK < top_p_R1 * total_R1)).sum(1, True)
    is_cut_R1 = has_top_k_R1 | (top_p_R1 < 1)
    threshold_R1 = values_RK.gather(1, num_kept_R1 - 1) * is_cut_R1
    is_short_R1 = is_cut_R1 & (num_kept_R1 == num_candidates) & (top_k_R1 > num_candidates)
    threshold_R1 = torch.maximum(threshold_R1, truncation.min_p_R1 * values_RK[:, :1])
    return threshold_R1, is_short_R1[:, 0]


def _penalized(logits_BV: Tensor, logprobs_BV: Tensor, plan: SamplingPlan) -> Tensor:
    """Log-weights that are sampled from: repetition (arXiv:1909.05858), then the additive ones.

    frequency * count and presence * [count > 0] count completion tokens; repetition also prompt's.
    """
    penalties = plan.penalties
    if penalties is None:
        return logprobs_BV
    rows_R = penalties.rows_R
    logits_RV = logits_BV[rows_R]
    repeated_RV = torch.where(
        logits_RV > 0, logits_RV / penalties.repetition_R1, logits_RV * penalties.repetition_R1
    )
    logits_RV = torch.where(penalties.is_seen_RV, repeated_RV, logits_RV)
    logits_RV = logits_RV - penalties.frequency_R1 * penalties.counts_RV
    logits_RV = logits_RV - penalties.presence_R1 * (penalties.counts_RV > 0)
    logits_RV = logits_RV + penalties.bias_RV
    return logprobs_BV.index_copy(0, rows_R, logits_RV / plan.temperature_B1[rows_R])


def _count(penalties: Penalties, ids_B1: Tensor) -> None:
    ids_R1 = ids_B1[penalties.rows_R]
    penalties.counts_RV.scatter_add_(1, ids_R1, torch.ones_like(ids_R1, dtype=torch.float32))
    penalties.is_seen_RV.scatter_(1, ids_R1, True)


def _plan_truncation(
    configs: list[GenerationConfig], vocab_size: int, device: torch.device
) -> Truncation | None:
    rows = [
        row
        for row, config in enumerate(configs)
        if not config.is_greedy and (config.top_k or config.top_p < 1.0 or config.min_p)
    ]
    if not rows:
        return None
    chosen = [configs[row] for row in rows]
    num_candidates = max(1, *(config.top_k for config in chosen))
    has_top_p = any(config.top_p < 1.0 for config in chosen)
    # Sorting a vocabulary is slow on a CPU, elsewhere it is cheap and asking costs a sync.
    on_cpu = device.type == "cpu"
    if has_top_p:
        num_candidates = max(num_candidates, _CANDIDATES) if on_cpu else vocab_size
    return Truncation(
        rows_R=torch.tensor(rows, device=device),
        top_k_R1=_column([config.top_k or vocab_size for config in chosen], device),
        top_p_R1=_column([config.top_p for config in chosen], device),
        min_p_R1=_column([config.min_p for config in chosen], device),
        num_candidates=num_candidates,
        may_be_short=has_top_p and on_cpu,
    )


def _plan_penalties(
    sequences: Sequence[Sampled], vocab_size: int, device: torch.device
) -> Penalties | None:
    rows = [row for row, sequence in enumerate(sequences) if _has_penalty(sequence.gconfig)]
    if not rows:
        return None
    configs = [sequences[row].gconfig for row in rows]
    counts_RV = torch.zeros(len(rows), vocab_size)
    is_seen_RV = torch.zeros(len(rows), vocab_size, dtype=torch.bool)
    bias_RV = torch.zeros(len(rows), vocab_size)
    for index, row in enumerate(rows):
        sequence = sequences[row]
        ids = torch.tensor(sequence.ids)
        counts_RV[index] = torch.bincount(ids[sequence.num_prompt :], minlength=vocab_size)
        is_seen_RV[index, ids] = True
        bias = configs[index].logit_bias
        bias_RV[index, list(bias)] = torch.tensor(list(bias.values()), dtype=torch.float32)
    return Penalties(
        rows_R=torch.tensor(rows, device=device),
        counts_RV=counts_RV.to(device),
        is_seen_RV=is_seen_RV.to(device),
        bias_RV=bias_RV.to(device),
        frequency_R1=_column([config.frequency_penalty for config in configs], device),
        presence_R1=_column([config.presence_penalty for config in configs], device),
        repetition_R1=_column([config.repetition_penalty for config in configs], device),
    )


def _has_penalty(config: GenerationConfig) -> bool:
    additive = config.frequency_penalty or config.presence_penalty or config.logit_bias
    return bool(additive) or config.repetition_penalty != 1.0


def _column(values: list[float], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device)[:, None]


def _index(pairs: list[tuple[int, int]], device: torch.device) -> tuple[Tensor, Tensor]:
    rows, ids = torch.tensor(pairs, device=device).unbind(1)
    return rows, ids
