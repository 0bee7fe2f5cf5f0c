"""What an update learnt about its tokens, and the metrics made of it once, at its end.

While the update runs everything stays a tensor on the device, ``[T]`` over the tokens of the batch;
each token is written by the one optimizer step it belongs to. Keys are under ``ppo_actor``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from agent_rl.config import ActorConfig
from agent_rl.stats import tracker as stats_tracker
from agent_rl.train.batch import Batch
from agent_rl.train.loss import kl_estimate
from agent_rl.train.team import Team

_NUM_AGES = 4
"""Shares of staleness are told apart up to here; the last one counts all that are older."""


@dataclass(slots=True, kw_only=True)
class StepRecord:
    """One optimizer step; not successful: nothing to train on, or a gradient that is not finite."""

    grad_norm: Tensor | float = 0.0
    is_successful: bool = False
    num_micro_batches: int = 0
    num_computed_tokens: int = 0
    losses: dict[str, Tensor] = field(default_factory=dict)
    """The minibatch's loss by component, summed over micro-batches."""

    def add_loss(self, name: str, part: Tensor) -> None:
        part = part.detach()
        self.losses[name] = self.losses[name] + part if name in self.losses else part

    def add_up(self, team: Team) -> None:
        """Over all processes, which have the same components."""
        if team.size == 1:
            return
        own = [float(self.num_computed_tokens), *(float(part) for part in self.losses.values())]
        computed, *losses = team.add_up(torch.tensor(own, dtype=torch.float64))
        self.num_computed_tokens = int(computed)
        self.losses = dict(zip(self.losses, losses, strict=True))


@dataclass(slots=True, kw_only=True)
class TokenRecord:
    """[T] each; off the mask, and where no step came by, the values are neutral."""

    mask: Tensor
    advantages: Tensor
    new_logprobs: Tensor
    proximal: Tensor
    entropies: Tensor
    losses: Tensor
    ratios: Tensor
    behaviour_weights: Tensor
    is_clipped: Tensor
    is_dual_clipped: Tensor
    is_rejected: Tensor

    @classmethod
    def empty(cls, mask: Tensor, advantages: Tensor) -> TokenRecord:
        zeros, no = torch.zeros_like(advantages), torch.zeros_like(mask)
        return cls(
            mask=mask,
            advantages=advantages,
            new_logprobs=zeros.clone(),
            proximal=zeros.clone(),
            entropies=zeros.clone(),
            losses=zeros.clone(),
            ratios=zeros + 1.0,
            behaviour_weights=zeros + 1.0,
            is_clipped=no.clone(),
            is_dual_clipped=no.clone(),
            is_rejected=no.clone(),
        )

    def write(self, places: Tensor, **values: Tensor) -> None:
        """Set fields of the tokens at ``places``."""
        for name, value in values.items():
            getattr(self, name)[places] = value.detach()

    def add_up(self, own: Tensor, team: Team) -> None:
        """Take from each process what it wrote; ``own`` [T]: the tokens of this one's rows."""
        if team.size == 1:
            return
        for name in self.__slots__:
            values = getattr(self, name)
            total = team.add_up(torch.where(own, values, 0).double())
            setattr(self, name, total.to(values.dtype))


def record_batch(
    batch: Batch,
    advantages: Tensor,
    config: ActorConfig,
    *,
    is_truncated: Tensor,
    version: int,
) -> None:
    """Rewards, lengths and groups as they came, and the advantages made of them."""
    mask = batch.loss_mask
    lengths = torch.tensor(batch.lengths, dtype=torch.float32)
    is_row = torch.ones(batch.num_rows, dtype=torch.bool)
    is_rewarded = torch.isfinite(batch.rewards)
    is_correct = is_rewarded & (batch.rewards > 0.0)
    with stats_tracker.scope("ppo_actor"):
        stats_tracker.denominator(
            n_seqs=is_row,
            n_rewarded_seqs=is_rewarded,
            n_tokens=torch.ones_like(mask),
            n_valid_tokens=mask,
            correct_n_seqs=is_correct,
            incorrect_n_seqs=is_rewarded & ~is_correct,
        )
        stats_tracker.stat("correct_n_seqs", correct_seq_len=lengths)
        stats_tracker.stat("incorrect_n_seqs", incorrect_seq_len=lengths)
        stats_tracker.stat("n_rewarded_seqs", task_reward=batch.rewards.float())
        stats_tracker.stat(
            "n_seqs",
            prompt_len=_prompt_lengths(batch),
            seq_len=lengths,
            no_eos_ratios=is_truncated.float(),
        )
        stats_tracker.stat("n_valid_tokens", advantages=advantages.float())
        _record_groups(batch, advantages)
        if batch.versions is not None:
            _record_staleness(mask, batch.versions, version)
        stats_tracker.scalar(eps_clip=config.eps_clip, use_dual_clip=config.c_clip is not None)
        if config.c_clip is not None:
            stats_tracker.scalar(c_clip=config.c_clip)
        if config.use_decoupled_loss:
            stats_tracker.scalar(rs_upper=config.rejection_sampling.upper)
            if config.rejection_sampling.lower is not None:
                stats_tracker.scalar(rs_lower=config.rejection_sampling.lower)


def record_update(
    batch: Batch, tokens: TokenRecord, steps: Sequence[StepRecord], *, lr: float, seconds: float
) -> None:
    """Losses, ratios, clips and how far the trainer's log-probs are from the engine's.

    ``tree_saving`` is the share of the batch's tokens that did not go through the model: shared
    prefixes, and what follows the last trained token of a row.
    """
    mask = tokens.mask
    with stats_tracker.scope("ppo_actor"), stats_tracker.scope("update"):
        stats_tracker.denominator(n_valid_tokens=mask, clipped_tokens=tokens.is_clipped)
        stats_tracker.stat(
            "n_valid_tokens",
            importance_weight=tokens.ratios.float(),
            approx_kl=(tokens.new_logprobs - tokens.proximal).float(),
            new_logp=tokens.new_logprobs.float(),
            entropy=tokens.entropies.float(),
            actor_loss=tokens.losses.float(),
            clip_ratio=tokens.is_clipped.float(),
            dual_clip_ratio=tokens.is_dual_clipped.float(),
        )
        stats_tracker.stat("clipped_tokens", clipped_new_logp=tokens.new_logprobs.float())
        if batch.logprobs is not None:
            _record_mismatch(tokens, batch.logprobs.to(mask.device))
        for step in steps:
            stats_tracker.scalar(
                grad_norm=float(step.grad_norm),
                update_successful=step.is_successful,
                num_micro_batches=step.num_micro_batches,
                **{f"loss/{name}": float(total) for name, total in step.losses.items()},
            )
        num_computed = sum(step.num_computed_tokens for step in steps)
        trained = torch.where(mask, tokens.advantages, 0.0).abs()
        stats_tracker.scalar(
            lr=lr,
            advantage_max=float(trained.max()) if len(trained) else 0.0,
            n_computed_tokens=num_computed,
            tree_saving=1.0 - num_computed / max(1, batch.num_tokens),
            trained_tokens_per_s=int(batch.loss_mask.sum()) / max(seconds, 1e-9),
        )


def _record_mismatch(tokens: TokenRecord, behaviour: Tensor) -> None:
    """Engine against trainer; the denominators are its own, as some batches know no log-probs.

    ``behave_logp_error`` and ``behave_kl``, KL(engine || trainer), compare with the log-probs of
    the tokens' own optimizer step.
    """
    difference = (tokens.proximal - behaviour).float()
    stats_tracker.denominator(
        n_behave_tokens=tokens.mask,
        clipped_behave_tokens=tokens.is_clipped,
        unclipped_behave_tokens=tokens.mask & ~tokens.is_rejected,
    )
    stats_tracker.stat(
        "n_behave_tokens",
        old_logp=behaviour,
        behave_logp_error=(tokens.new_logprobs - behaviour).float().abs(),
        behave_kl=kl_estimate("k3", behaviour, tokens.new_logprobs, tokens.mask).float(),
        rs_filtered_fraction=tokens.is_rejected.float(),
    )
    stats_tracker.stat("clipped_behave_tokens", clipped_old_logp=behaviour)
    stats_tracker.stat(
        "unclipped_behave_tokens",
        behave_imp_weight=tokens.behaviour_weights.float(),
        behave_approx_kl=difference,
    )


def _record_groups(batch: Batch, advantages: Tensor) -> None:
    """Per prompt group, under the row that starts it; sizes count logical rollouts."""
    mask, groups = batch.loss_mask, batch.to_tokens(batch.groups)
    num_groups = batch.meta.n_trajs
    sizes = torch.tensor([float(group.num_rollouts) for group in batch.meta.rollout_groups])
    weights = torch.zeros(num_groups).index_add_(0, groups, mask.float())
    strengths = torch.zeros(num_groups, dtype=torch.float64)
    strengths.index_add_(0, groups, torch.where(mask, advantages, 0.0).double().abs())
    stats_tracker.denominator(n_groups=torch.ones(num_groups, dtype=torch.bool))
    stats_tracker.stat(
        "n_groups",
        usable_group_size=sizes,
        group_loss_weight=weights,
        zero_advantage_groups=(strengths == 0.0).float(),
    )
    spreads = _reward_spreads(batch)
    is_known = torch.isfinite(spreads)
    stats_tracker.denominator(n_groups_with_reward=is_known)
    stats_tracker.stat(
        "n_groups_with_reward", group_reward_std=torch.where(is_known, spreads, 0.0).float()
    )
    for size in sorted({int(size) for size in sizes.tolist()}):
        by_size: dict[str, Any] = {f"group_loss_weight_size_{size}": weights}
        stats_tracker.denominator(**{f"n_groups_size_{size}": sizes == size})
        stats_tracker.stat(f"n_groups_size_{size}", **by_size)


def _record_staleness(mask: Tensor, versions: Tensor, version: int) -> None:
    # An engine may count versions from elsewhere; its newest one is then the present.
    newest = torch.where(mask, versions, version).max()
    ages = (newest - versions).float()
    shares: dict[str, Any] = {
        f"staleness_share_{age}": (ages == age).float() for age in range(_NUM_AGES)
    }
    shares[f"staleness_share_{_NUM_AGES}_or_more"] = (ages >= _NUM_AGES).float()
    with stats_tracker.scope("version_stats"):
        stats_tracker.denominator(n_tokens=mask)
        stats_tracker.stat("n_tokens", staleness=ages, **shares)


def _reward_spreads(batch: Batch) -> Tensor:
    """[groups] population std of the known rewards of rows; nan: there is none."""
    known = torch.isfinite(batch.rewards)
    rewards = torch.where(known, batch.rewards, 0.0)
    sums = torch.zeros(3, batch.meta.n_trajs, dtype=torch.float64)
    for row, values in enumerate((known.double(), rewards, rewards.square())):
        sums[row].index_add_(0, batch.groups, values)
    count, total, squares = sums.unbind()
    variances: Tensor = squares / count - (total / count).square()
    return variances.clamp(min=0.0).sqrt()


def _prompt_lengths(batch: Batch) -> Tensor:
    """[R] index of the first trained token: tool turns later in the row do not count."""
    places = torch.arange(batch.num_tokens)
    starts = torch.tensor(batch.starts)
    first = torch.tensor(batch.lengths) + starts
    rows = batch.rows[batch.loss_mask]
    first = first.scatter_reduce(0, rows, places[batch.loss_mask], "amin")
    return (first - starts).float()
