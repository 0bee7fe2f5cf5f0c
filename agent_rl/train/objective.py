"""The loss as a sum of components, each with weights and a denominator of its own.

    loss = sum over components c, tokens t of  weight[c, t] * loss[c, t]

Weights [T] hold coefficient and denominator and are fixed for the whole minibatch before its first
forward pass, so that no division into micro-batches changes the sum. What a component needs of a
token beside the present log-probs (a reference, a teacher, a return) it holds itself: a new method
is one more component, and neither the actor nor the trainer changes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from agent_rl.config import ActorConfig, CriticConfig
from agent_rl.train import advantage, correction, loss
from agent_rl.train.batch import Batch
from agent_rl.train.metrics import TokenRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Predictions:
    """The ``M`` trained tokens of one micro-batch; all but places, rows and old carry gradient."""

    places: Tensor  # [M] index into the batch
    rows: Tensor  # [M]
    new: Tensor  # [M] log-probs
    old: Tensor  # [M] log-probs that ratios are taken against
    entropies: Tensor  # [M]
    choices: Tensor | None  # [M, k] log-probs of the teacher's likeliest tokens
    values: Tensor | None  # [M] of a value head on the same trunk


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What is known of the tokens before the step, [T] each, on the model's device."""

    behaviour: Tensor | None
    proximal: Tensor | None
    reference: Tensor | None
    values: Tensor | None
    returns: Tensor | None


TokenLosses: TypeAlias = Callable[[Predictions], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """``losses`` gives [M], finite also where the weight is 0."""

    name: str
    weights: Tensor  # [T]
    losses: TokenLosses

    def total(self, predictions: Predictions) -> Tensor:
        """The part of these tokens in the loss of the minibatch."""
        return (self.losses(predictions) * self.weights[predictions.places]).sum()


def components(
    config: ActorConfig,
    critic: CriticConfig | None,
    batch: Batch,
    mask: Tensor,
    evidence: Evidence,
    record: TokenRecord,
) -> list[Component]:
    """What the config asks for, over the tokens ``mask`` [T] of one minibatch.

    ``critic`` is given where its value head shares the actor's trunk.
    """
    device, dtype = record.advantages.device, record.advantages.dtype
    parts: list[Component] = []

    def add(name: str, coefficient: float, losses: TokenLosses, chosen: Tensor = mask) -> None:
        share = loss.aggregation_weights(
            config.loss_aggregation, chosen, batch.rows, batch.rollouts, horizon=config.loss_horizon
        )
        weights = (coefficient * share).to(device, dtype)
        parts.append(Component(name=name, weights=weights, losses=losses))

    add("policy", 1.0, _policy(config, batch, mask, evidence, record))
    if config.entropy_coef:
        add("entropy", config.entropy_coef, lambda t: -t.entropies)
    if config.kl_loss_coef:
        add("reference_kl", config.kl_loss_coef, _reference_kl(config, evidence))
    if config.distillation.topk and batch.teacher is not None:
        taught = mask & batch.teacher.is_topk_known
        losses = _topk_distillation(batch, device)
        add("distillation", config.distillation.weight, losses, taught)
    if config.cross_entropy_coef:
        positive = mask & batch.to_tokens(batch.rewards > 0.0)
        add("cross_entropy", config.cross_entropy_coef, lambda t: -t.new, positive)
    if critic is not None:
        add("value", critic.loss_coef, value_losses(critic, evidence), mask & batch.rewarded)
    return parts


def value_losses(critic: CriticConfig, evidence: Evidence) -> TokenLosses:
    """Clipped squared error between the value and the return of each token."""
    old, returns = evidence.values, evidence.returns
    assert old is not None and returns is not None, "a critic gave values before the update"

    def losses(t: Predictions) -> Tensor:
        assert t.values is not None, "the predictions come from a model with a value head"
        return loss.value_loss(
            t.values,
            old[t.places],
            returns[t.places],
            torch.ones_like(t.places, dtype=torch.bool),
            eps_clip=critic.eps_clip,
            huber_delta=critic.huber_delta,
        )

    return losses


def _reference_kl(config: ActorConfig, evidence: Evidence) -> TokenLosses:
    reference = evidence.reference
    assert reference is not None, "kl_loss_coef makes the actor ask its reference"

    def losses(t: Predictions) -> Tensor:
        everywhere = torch.ones_like(t.places, dtype=torch.bool)
        return loss.kl_estimate(config.kl_loss_estimator, t.new, reference[t.places], everywhere)

    return losses


def _topk_distillation(batch: Batch, device: torch.device) -> TokenLosses:
    assert batch.teacher is not None and batch.teacher.topk_logprobs is not None, "checked before"
    known = batch.teacher.is_topk_known.to(device)
    teacher = batch.teacher.topk_logprobs.to(device)

    def losses(t: Predictions) -> Tensor:
        assert t.choices is not None, "micro-batches ask for what the teacher finds likely"
        is_taught = known[t.places]
        # Where no teacher speaks, the student stands in for it: the loss is 0 and finite.
        theirs = torch.where(is_taught[:, None], teacher[t.places], t.choices.detach().float())
        return torch.where(is_taught, loss.topk_distillation(t.choices, theirs), 0.0)

    return losses


def _policy(
    config: ActorConfig, batch: Batch, mask: Tensor, evidence: Evidence, record: TokenRecord
) -> TokenLosses:
    """The policy gradient's loss; writes down what it saw of each token.

    What is said of a row as a whole is over ``mask`` [T]: of a token that M2PO drops, a row's ratio
    knows as little as the denominator does.
    """
    device = record.advantages.device
    counted = mask.to(device)
    weight = config.distillation.weight
    teacher = None
    if batch.teacher is not None and not config.distillation.topk:
        teacher = batch.teacher.logprobs.to(device)
    behaviour = evidence.behaviour

    def losses(t: Predictions) -> Tensor:
        mask = counted[t.places]
        advantages = record.advantages[t.places]
        if teacher is not None:
            theirs = teacher[t.places]
            gain = advantage.distillation_advantage(theirs, t.old, torch.isfinite(theirs))
            advantages = advantages + weight * gain
            record.write(t.places, advantages=advantages)
        policy = policy_loss(config, t, advantages, mask)
        result = policy.loss
        if config.use_decoupled_loss:
            assert behaviour is not None, "checked by the actor"
            corrected = correction.behaviour_correction(
                t.old, behaviour[t.places], mask, t.rows, config.rejection_sampling
            )
            result = result * corrected.weights
            record.write(
                t.places, behaviour_weights=corrected.weights, is_rejected=corrected.is_touched
            )
        record.write(
            t.places,
            losses=result.detach(),
            ratios=policy.ratio,
            is_clipped=policy.is_clipped,
            is_dual_clipped=policy.is_dual_clipped,
        )
        return result

    return losses


def policy_loss(
    config: ActorConfig, t: Predictions, advantages: Tensor, mask: Tensor
) -> loss.PolicyLoss:
    """The loss that ``actor.policy_loss`` names, by token or by row."""
    if config.importance_sampling_level == "sequence":
        log_ratios = loss.sequence_log_ratio(t.new, t.old, mask, t.rows)
        advantages = loss.row_mean(advantages, mask, t.rows)
    else:
        log_ratios = loss.log_ratio(t.new, t.old, mask)
    low, high = config.eps_clip, config.eps_clip_higher
    if config.policy_loss == "cispo":
        return loss.cispo(log_ratios, t.new, advantages, mask, eps_clip=low, eps_clip_higher=high)
    if config.policy_loss == "sapo":
        return loss.sapo(
            log_ratios,
            advantages,
            mask,
            tau_positive=config.sapo_tau_pos,
            tau_negative=config.sapo_tau_neg,
        )
    return loss.ppo_clip(
        log_ratios,
        advantages,
        mask,
        eps_clip=low,
        eps_clip_higher=high,
        c_clip=config.c_clip,
    )
