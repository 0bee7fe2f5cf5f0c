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
from agent_rl.errors import WorkflowContractError
from agent_rl.train import advantage, correction, loss, metrics, normalization
from agent_rl.train.batch import Batch, MicroBatch, micro_batches, minibatches
from agent_rl.train.forward import check_model, predicted_logprobs, segment_attention
from agent_rl.train.metrics import StepRecord, TokenRecord
from agent_rl.train.optimizer import Optimizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateReport:
    """``num_skipped`` steps had nothing to train on, or a gradient that was not finite.

    ``num_computed_tokens`` went through the model: fewer than the batch holds where rows share
    prefixes. ``tokens`` is what the update learnt about each token of the batch.
    """

    num_steps: int
    num_skipped: int
    num_trained_tokens: int
    num_computed_tokens: int
    tokens: TokenRecord


class Actor:
    """Trains ``model``, a transformers causal language model that an engine may share.

    ``total_steps`` is the number of updates of the run (for the schedule); ``temperature`` the one
    that log-probs of batches without ``temperatures`` are stated under.
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

        Overlong penalty -> (reward + bias) * scaling, clipped -> reward_norm -> GAE without a
        critic (the reward, discounted by gamma * lambda) -> adv_norm -> reward_weight. A teacher's
        part is added per token in the update: it needs the proximal log-probs.

        Raises:
            WorkflowContractError: reward_norm needs one reward per logical rollout and a rollout
                has several and no ``rollout_reward``.
        """
        config, mask, rows = self.config, batch.rewarded, batch.rows
        penalized = batch.rewards + self._penalty(batch)
        rewards = self._shape_reward(penalized)
        if config.reward_norm is not None and config.reward_norm.uses_references:
            self._warn_of_singletons(batch)
            # Raw rewards as well: a penalty must not make differing ones look equal.
            normalization.resolve_references(batch.rewards, batch.meta)
            references = normalization.resolve_references(penalized, batch.meta)
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
        return config.reward_weight * advantages

    def update(self, batch: Batch) -> UpdateReport:
        """One pass over the batch in ``ppo_n_minibatches`` optimizer steps.

        Metrics go to ``stats_tracker`` under ``ppo_actor``.

        Raises:
            WorkflowContractError: see ``compute_advantages``; or the config needs behaviour
                log-probs and the batch has none.
        """
        if not self.config.distillation.weight:
            batch = batch.without_teacher()
        advantages = self.compute_advantages(batch)
        metrics.record_batch(batch, advantages, self.config)
        tokens = metrics.TokenRecord.empty(
            batch.loss_mask.to(self._device), advantages.to(self._device, self._dtype)
        )
        self._optimizer.clear()
        with segment_attention(self.model, recompute_layers=self.config.gradient_checkpointing):
            proximal = self._proximal(batch)
            steps = [
                self._step(batch, rows, proximal, tokens)
                for rows in minibatches(batch, self.config.ppo_n_minibatches)
            ]
        metrics.record_update(batch, tokens, steps, self._optimizer.lr)
        for warning in metrics.find_faults(batch, tokens):
            logger.warning(warning)
        self._optimizer.end_update()
        return UpdateReport(
            num_steps=len(steps),
            num_skipped=sum(not step.is_successful for step in steps),
            num_trained_tokens=int(batch.loss_mask.sum()),
            num_computed_tokens=sum(step.num_computed_tokens for step in steps),
            tokens=tokens,
        )

    def state_dict(self) -> dict[str, Any]:
        """Everything an exact continuation needs: weights and optimizer."""
        return {"model": self.model.state_dict(), "optimizer": self._optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """In place: an engine that shares the parameters sees the loaded ones."""
        self.model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])

    def _penalty(self, batch: Batch) -> Tensor:
        """[R] what the overlong penalty adds to each row's reward."""
        config = self.config
        if not config.overlong_reward_penalty:
            return torch.zeros(batch.num_rows, dtype=torch.float64)
        assert config.overlong_tokens is not None, "checked in ActorConfig"
        assert config.overlong_penalty_factor is not None, "checked in ActorConfig"
        lengths = torch.zeros(batch.num_rows, dtype=torch.int64)
        lengths.index_add_(0, batch.rows, batch.loss_mask.long())
        return normalization.overlong_penalty(
            lengths,
            max_new_tokens=config.max_new_tokens,
            overlong_tokens=config.overlong_tokens,
            factor=config.overlong_penalty_factor,
        )

    def _shape_reward(self, rewards: Tensor) -> Tensor:
        config = self.config
        shaped = (rewards + config.reward_bias) * config.reward_scaling
        return shaped.clamp(-config.reward_clip, config.reward_clip)

    def _proximal(self, batch: Batch) -> Tensor | None:
        """[T] log-probs that ratios are taken against; None: those of the weights as they are.

        With one optimizer step the current log-probs, which the step computes anyway, are the
        recomputed ones.
        """
        config = self.config
        needs_behaviour = config.use_decoupled_loss or config.m2_threshold is not None
        if batch.logprobs is None and needs_behaviour:
            raise WorkflowContractError(
                "actor.use_decoupled_loss and actor.m2_threshold need the behaviour log-probs; "
                "the trajectories have no key 'logprobs'"
            )
        is_own = config.recompute_logprob or config.use_decoupled_loss
        if batch.logprobs is not None and not is_own:
            return batch.logprobs.to(self._device, self._dtype)
        if config.ppo_n_minibatches > 1 or config.m2_threshold is not None:
            return self._recompute(batch)
        return None

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

    def _step(
        self, batch: Batch, rows: list[int], proximal: Tensor | None, tokens: TokenRecord
    ) -> StepRecord:
        """One optimizer step on these rows; without a trained token nothing is touched."""
        config = self.config
        in_step = torch.zeros(batch.num_rows, dtype=torch.bool)
        in_step[rows] = True
        mask = batch.loss_mask & batch.to_tokens(in_step)
        if config.m2_threshold is not None:
            assert batch.logprobs is not None and proximal is not None, "checked in _proximal"
            mask = correction.m2po_mask(
                proximal.cpu(), batch.logprobs, mask, threshold=config.m2_threshold
            )
        weights = loss.aggregation_weights(
            config.loss_aggregation,
            mask,
            batch.rows,
            batch.rollouts,
            horizon=config.loss_horizon,
        ).to(self._device, self._dtype)
        step = StepRecord()
        for micro_batch in self._micro_batches(batch, rows):
            self._backward(batch, micro_batch, proximal, weights, tokens)
            step.num_micro_batches += 1
            step.num_computed_tokens += len(micro_batch.input_ids)
        if step.num_micro_batches:
            step.grad_norm, step.is_successful = self._optimizer.step()
            if not step.is_successful:
                logger.warning("the gradient is not finite; this optimizer step is skipped")
        return step

    def _backward(
        self,
        batch: Batch,
        micro_batch: MicroBatch,
        proximal: Tensor | None,
        weights: Tensor,
        tokens: TokenRecord,
    ) -> None:
        """Add the gradient of these tokens; the sum over micro-batches is the minibatch's."""
        config, here, slots = self.config, micro_batch.tokens, micro_batch.slots
        predicted, entropies = predicted_logprobs(self.model, micro_batch, self.temperature)
        new, entropy = predicted[slots], entropies[slots]
        old = new.detach() if proximal is None else proximal[here]
        mask = torch.ones_like(here, dtype=torch.bool)
        rows = micro_batch.rows
        if batch.teacher is not None:
            teacher = batch.teacher.logprobs.to(here.device)[here]
            tokens.advantages[here] += config.distillation.weight * (
                advantage.distillation_advantage(teacher, old, torch.isfinite(teacher))
            )
        policy = self._policy_loss(new, old, tokens.advantages[here], mask, rows)
        losses = policy.loss
        if config.use_decoupled_loss:
            assert batch.logprobs is not None, "checked in _proximal"
            behaviour = batch.logprobs.to(here.device)[here]
            corrected = correction.behaviour_correction(
                old, behaviour, mask, rows, config.rejection_sampling
            )
            losses = losses * corrected.weights
            tokens.behaviour_weights[here] = corrected.weights
            tokens.is_rejected[here] = corrected.is_touched
        if config.entropy_coef:
            losses = losses - config.entropy_coef * entropy
        torch.autograd.backward((losses * weights[here]).sum())
        self._optimizer.collect()
        tokens.new_logprobs[here] = new.detach()
        tokens.proximal[here] = old
        tokens.entropies[here] = entropy.detach()
        tokens.losses[here] = losses.detach()
        tokens.ratios[here] = policy.ratio
        tokens.is_clipped[here] = policy.is_clipped
        tokens.is_dual_clipped[here] = policy.is_dual_clipped

    def _policy_loss(
        self, new: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, rows: Tensor
    ) -> loss.PolicyLoss:
        config = self.config
        if config.importance_sampling_level == "sequence":
            log_ratios = loss.sequence_log_ratio(new, old, mask, rows)
            advantages = loss.row_mean(advantages, mask, rows)
        else:
            log_ratios = loss.log_ratio(new, old, mask)
        low, high = config.eps_clip, config.eps_clip_higher
        if config.policy_loss == "cispo":
            return loss.cispo(log_ratios, new, advantages, mask, eps_clip=low, eps_clip_higher=high)
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
