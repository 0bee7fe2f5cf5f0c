"""The policy: advantages of a batch, the loss of its tokens, and the optimizer steps.

Invariants: each trained token enters exactly one optimizer step of an update, with a weight fixed
for its whole minibatch, so micro-batches, their order and prefix sharing change nothing but the
time. Parameters change in place; the engine that shares them must be paused during ``update``.
Knows nothing of how rows were collected.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from agent_rl.config import ActorConfig
from agent_rl.train import advantage, loss, normalization
from agent_rl.train.batch import Batch, MicroBatch, micro_batches, minibatches
from agent_rl.train.forward import check_model, predicted_logprobs, segment_attention
from agent_rl.train.optimizer import Optimizer

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Update:
    """What one update learns about its tokens, [T] each; metrics are made of it at the end."""

    batch: Batch
    mask: Tensor
    advantages: Tensor
    proximal: Tensor | None
    """None: the log-probs of the current weights, which is the same before the first step."""
    new_logprobs: Tensor
    entropies: Tensor
    losses: Tensor
    ratios: Tensor
    is_clipped: Tensor
    is_dual_clipped: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """One optimizer step; not successful: nothing to train on, or a gradient that is not finite."""

    grad_norm: Tensor | float
    is_successful: bool
    num_micro_batches: int = 0
    num_computed: int = 0


class Actor:
    """Trains ``model``, a transformers causal language model that an engine may share.

    ``total_steps`` is the number of updates of the run (for the schedule); ``temperature`` the one
    the log-probs of the batch are stated under (``gconfig.logprob_temperature``).
    """

    def __init__(
        self, model: Any, config: ActorConfig, *, total_steps: int, temperature: float
    ) -> None:
        self.model = model
        self.config = config
        self.temperature = temperature
        self._device = model.device
        self._dtype = torch.promote_types(model.dtype, torch.float32)
        self._optimizer = Optimizer(model.parameters(), config.optimizer, total_steps=total_steps)
        self._has_warned_of_singletons = False
        model.eval()
        check_model(model)

    def compute_advantages(self, batch: Batch) -> Tensor:
        """[T] float64 advantages, 0 off the mask.

        (reward + bias) * scaling, clipped -> reward_norm -> GAE without a critic -> adv_norm.

        Raises:
            WorkflowContractError: reward_norm needs one reward per logical rollout and a rollout
                has several and no ``rollout_reward``.
        """
        config, mask, rows = self.config, batch.loss_mask, batch.rows
        rewards = self._shape_reward(batch.rewards)
        if config.reward_norm is not None:
            self._warn_of_singletons(batch)
            references = normalization.resolve_references(batch.rewards, batch.meta)
            rewards = normalization.normalize_rewards(
                rewards, self._shape_reward(references), batch.meta, config.reward_norm
            )
        token_rewards = advantage.rewards_at_end(rewards, mask, rows)
        advantages = advantage.generalized_advantage(
            token_rewards,
            torch.zeros_like(token_rewards),
            mask,
            rows,
            gamma=config.gamma,
            lam=config.gae_lambda,
        )
        if config.adv_norm is not None:
            advantages = normalization.normalize_advantages(
                advantages,
                mask,
                batch.to_tokens(batch.groups),
                torch.tensor([group.num_rollouts for group in batch.meta.rollout_groups]),
                config.adv_norm,
            )
        return advantages

    def update(self, batch: Batch) -> dict[str, float]:
        """One pass over the batch in ``ppo_n_minibatches`` optimizer steps."""
        with segment_attention(self.model):
            update = self._begin(batch)
            self.model.train(self.config.gradient_checkpointing)
            try:
                steps = [
                    self._step(update, rows)
                    for rows in minibatches(batch, self.config.ppo_n_minibatches)
                ]
            finally:
                self.model.eval()
        lr = self._optimizer.lr
        self._optimizer.end_update()
        return self._metrics(update, steps, lr)

    def state_dict(self) -> dict[str, Any]:
        """Everything an exact continuation needs: weights and optimizer."""
        return {"model": self.model.state_dict(), "optimizer": self._optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """In place: an engine that shares the parameters sees the loaded ones."""
        self.model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])

    def _shape_reward(self, rewards: Tensor) -> Tensor:
        config = self.config
        shaped = (rewards + config.reward_bias) * config.reward_scaling
        return shaped.clamp(-config.reward_clip, config.reward_clip)

    def _begin(self, batch: Batch) -> _Update:
        config, device = self.config, self._device
        mask = batch.loss_mask.to(device)
        zeros = torch.zeros(len(mask), dtype=self._dtype, device=device)
        update = _Update(
            batch=batch,
            mask=mask,
            advantages=self.compute_advantages(batch).to(device, self._dtype),
            proximal=None,
            new_logprobs=zeros.clone(),
            entropies=zeros.clone(),
            losses=zeros.clone(),
            ratios=zeros + 1.0,
            is_clipped=torch.zeros_like(mask),
            is_dual_clipped=torch.zeros_like(mask),
        )
        if batch.logprobs is not None and not config.recompute_logprob:
            update.proximal = batch.logprobs.to(device)
        elif config.ppo_n_minibatches > 1:
            update.proximal = self._recompute(batch)
        return update

    @torch.no_grad()
    def _recompute(self, batch: Batch) -> Tensor:
        """[T] log-probs of the trained tokens under the current weights."""
        logprobs = torch.zeros(batch.num_tokens, dtype=self._dtype, device=self._device)
        for micro_batch in self._micro_batches(batch, range(batch.num_rows)):
            predicted, _ = predicted_logprobs(self.model, micro_batch, self.temperature)
            logprobs[micro_batch.tokens] = predicted[micro_batch.slots]
        return logprobs

    def _micro_batches(self, batch: Batch, rows: Sequence[int]) -> Iterator[MicroBatch]:
        config = self.config
        for micro_batch in micro_batches(
            batch,
            rows,
            max_tokens=config.max_tokens_per_mb,
            share_prefixes=config.tree_packing == "auto",
        ):
            yield micro_batch.to(self._device)

    def _step(self, update: _Update, rows: list[int]) -> _Step:
        """One optimizer step on these rows; without a trained token nothing is touched."""
        batch = update.batch
        in_step = torch.zeros(batch.num_rows, dtype=torch.bool)
        in_step[rows] = True
        weights = loss.aggregation_weights(
            self.config.loss_aggregation,
            batch.loss_mask & batch.to_tokens(in_step),
            batch.rows,
            batch.rollouts,
        ).to(self._device, self._dtype)
        num_computed = num_micro_batches = 0
        for micro_batch in self._micro_batches(batch, rows):
            self._backward(update, micro_batch, weights)
            num_micro_batches += 1
            num_computed += len(micro_batch.input_ids)
        if not num_micro_batches:
            return _Step(grad_norm=0.0, is_successful=False)
        grad_norm, is_successful = self._optimizer.step()
        if not is_successful:
            logger.warning("the gradient is not finite; this optimizer step is skipped")
        return _Step(
            grad_norm=grad_norm,
            is_successful=is_successful,
            num_micro_batches=num_micro_batches,
            num_computed=num_computed,
        )

    def _backward(self, update: _Update, micro_batch: MicroBatch, weights: Tensor) -> None:
        config, tokens, slots = self.config, micro_batch.tokens, micro_batch.slots
        predicted, entropies = predicted_logprobs(self.model, micro_batch, self.temperature)
        new = predicted[slots]
        proximal = new.detach() if update.proximal is None else update.proximal[tokens]
        policy = loss.ppo_clip(
            new,
            proximal,
            update.advantages[tokens],
            update.mask[tokens],
            eps_clip=config.eps_clip,
            eps_clip_higher=config.eps_clip_higher,
            c_clip=config.c_clip,
        )
        torch.autograd.backward((policy.loss * weights[tokens]).sum())
        self._optimizer.collect()
        update.new_logprobs[tokens] = new.detach()
        update.entropies[tokens] = entropies.detach()[slots]
        update.losses[tokens] = policy.loss.detach()
        update.ratios[tokens] = policy.ratio
        update.is_clipped[tokens] = policy.is_clipped
        update.is_dual_clipped[tokens] = policy.is_dual_clipped

    def _metrics(self, update: _Update, steps: list[_Step], lr: float) -> dict[str, float]:
        count = update.mask.sum().clamp(min=1)

        def mean(values: Tensor) -> float:
            return float(torch.where(update.mask, values, 0.0).sum() / count)

        return {
            "actor_loss": mean(update.losses),
            "entropy": mean(update.entropies),
            "importance_weight": mean(update.ratios),
            "clip_ratio": mean(update.is_clipped.float()),
            "dual_clip_ratio": mean(update.is_dual_clipped.float()),
            "grad_norm": sum(float(step.grad_norm) for step in steps) / len(steps),
            "lr": lr,
            "update_successful": sum(step.is_successful for step in steps) / len(steps),
            "num_micro_batches": float(sum(step.num_micro_batches for step in steps)),
            "n_valid_tokens": float(update.mask.sum()),
            "n_tokens": float(update.batch.num_tokens),
            "n_computed_tokens": float(sum(step.num_computed for step in steps)),
        }

    def _warn_of_singletons(self, batch: Batch) -> None:
        norm = self.config.reward_norm
        assert norm is not None, "called with reward_norm only"
        singles = all(group.num_rollouts == 1 for group in batch.meta.rollout_groups)
        if singles and norm.mean_level == "group" and not self._has_warned_of_singletons:
            self._has_warned_of_singletons = True
            logger.warning(
                "every group has one episode and actor.reward_norm subtracts the group mean: all "
                "advantages are 0 and nothing is learnt; raise rollout.group_size or set "
                "actor.reward_norm=null"
            )
