"""The policy: what an update learns from a batch, and the optimizer steps of it.

Invariants: each trained token enters exactly one optimizer step of an update, with weights fixed
for its whole minibatch, so micro-batches, their order and prefix sharing change nothing but the
time. Parameters change in place; the engine that shares them must be paused during ``update``.
Knows nothing of how rows were collected; what the loss is, objective.py says.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from agent_rl.config import ActorConfig
from agent_rl.engine import loading
from agent_rl.errors import WorkflowContractError
from agent_rl.stats import tracker as stats_tracker
from agent_rl.train import advantage, correction, lora, metrics
from agent_rl.train.batch import Batch, MicroBatch, micro_batches, minibatches
from agent_rl.train.critic import Critic, load_critic, record_values
from agent_rl.train.estimator import AdvantageEstimator, Values
from agent_rl.train.forward import (
    check_ids,
    check_model,
    hidden_states,
    logprobs_of,
    score,
    segment_attention,
)
from agent_rl.train.metrics import StepRecord, TokenRecord
from agent_rl.train.objective import Component, Evidence, Predictions, components
from agent_rl.train.optimizer import Optimizer
from agent_rl.train.reference import Reference
from agent_rl.train.sharding import run_pass, shard
from agent_rl.train.team import Team

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
    that log-probs of batches without ``temperatures`` are stated under. A ``reference`` is asked
    where the config has KL terms; a ``critic`` gives the values of GAE and learns beside the actor.
    ``end_ids`` end a completion by choice (None: those that the model names).
    """

    def __init__(
        self,
        model: Any,
        config: ActorConfig,
        *,
        total_steps: int,
        temperature: float,
        reference: Reference | None = None,
        critic: Critic | None = None,
        team: Team | None = None,
        end_ids: Sequence[int] | None = None,
    ) -> None:
        self.model = model
        self.config = config
        self.temperature = temperature
        self.critic = critic
        self._team = team or Team()
        self._uses_reference = bool(config.kl_ctl or config.kl_loss_coef)
        if self._uses_reference and reference is None:
            raise ValueError("actor.kl_ctl and actor.kl_loss_coef need a reference")
        self._reference = reference
        self.estimator = AdvantageEstimator(config)
        self._end_ids = loading.end_ids(model, None) if end_ids is None else end_ids
        self._device = model.device
        self._dtype = torch.promote_types(model.dtype, torch.float32)
        model.eval()
        check_model(model)
        shard(model, self._team)
        trunk = model.base_model
        self._trunk = torch.compile(trunk, dynamic=True) if config.compile else trunk
        parameters = list(model.parameters())
        if critic is not None and critic.is_shared:
            parameters += critic.head.parameters()
        self._optimizer = Optimizer(parameters, config.optimizer, total_steps=total_steps)

    def update(self, batch: Batch) -> UpdateReport:
        """One pass over the batch in ``ppo_n_minibatches`` optimizer steps.

        Metrics go to ``stats_tracker`` under ``ppo_actor``.

        Raises:
            WorkflowContractError: the config needs something that the trajectories do not have:
                behaviour log-probs, one reward per logical rollout, likeliest tokens of a teacher;
                or a token id is none of the model's.
        """
        config = self.config
        check_ids(self.model, batch)
        is_truncated = batch.truncated(self._end_ids)
        batch = self._trainable(batch, is_truncated)
        reference, values = self._reference_logprobs(batch), self._values(batch)
        self._optimizer.clear()
        with segment_attention(self.model, recompute_layers=config.gradient_checkpointing):
            proximal = self._proximal(batch)
            estimate = self.estimator.estimate(
                batch,
                is_truncated=is_truncated,
                kl_rewards=self._kl_rewards(batch, proximal, reference),
                values=values,
            )
            metrics.record_batch(
                batch,
                estimate.advantages,
                config,
                is_truncated=is_truncated,
                version=self._optimizer.num_updates,
            )
            evidence = Evidence(
                behaviour=self._here(batch.logprobs),
                proximal=proximal,
                reference=reference,
                values=self._here(None if values is None else values.before),
                returns=self._here(estimate.returns),
            )
            record = TokenRecord.empty(
                batch.loss_mask.to(self._device), estimate.advantages.to(self._device, self._dtype)
            )
            start = time.perf_counter()
            with stats_tracker.record_timing("train_step/actor"):
                steps = [
                    self._step(batch, rows, evidence, record)
                    for rows in minibatches(batch, config.ppo_n_minibatches)
                ]
        record.add_up(self._own_tokens(batch), self._team)
        seconds = time.perf_counter() - start
        metrics.record_update(batch, record, steps, lr=self._optimizer.lr, seconds=seconds)
        self._update_critic(batch, values, estimate.returns)
        self._optimizer.end_update()
        return UpdateReport(
            num_steps=len(steps),
            num_skipped=sum(not step.is_successful for step in steps),
            num_trained_tokens=int(batch.loss_mask.sum()),
            num_computed_tokens=sum(step.num_computed_tokens for step in steps),
            tokens=record,
        )

    def allocate(self) -> None:
        """See ``Optimizer.allocate``."""
        self._optimizer.allocate()
        if self.critic is not None:
            self.critic.allocate()

    def state_dict(self) -> dict[str, Any]:
        """Everything an exact continuation needs; of a model with adapters, only these."""
        return {
            "model": lora.trained_state_dict(self.model),
            "optimizer": self._optimizer.state_dict(),
            "estimator": self.estimator.state_dict(),
            "critic": None if self.critic is None else self.critic.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """In place: an engine that shares the parameters sees the loaded ones.

        Raises:
            CheckpointError: it is that of an actor with other adapters or another critic.
        """
        lora.load_trained_state_dict(self.model, state["model"])
        load_critic(self.critic, state["critic"])
        self._optimizer.load_state_dict(state["optimizer"])
        self.estimator.load_state_dict(state["estimator"])

    def _trainable(self, batch: Batch, is_truncated: Tensor) -> Batch:
        """Only the tokens and the teachers that the config trains on."""
        distillation = self.config.distillation
        if self.config.truncated_rows == "mask":
            batch = batch.without_rows(is_truncated)
        if not distillation.weight:
            return batch.without_teacher()
        if batch.teacher is None:
            return batch
        return replace(batch, teacher=batch.teacher.narrowed(distillation.topk))

    def _here(self, values: Tensor | None) -> Tensor | None:
        return None if values is None else values.to(self._device, self._dtype)

    def _reference_logprobs(self, batch: Batch) -> Tensor | None:
        if self._reference is None or not self._uses_reference:
            return None
        with stats_tracker.record_timing("train_step/reference"):
            return self._here(self._reference.logprobs(batch))

    def _values(self, batch: Batch) -> Values | None:
        if self.critic is None:
            return None
        with stats_tracker.record_timing("train_step/values"):
            return self.critic.values(batch)

    def _update_critic(self, batch: Batch, values: Values | None, returns: Tensor) -> None:
        if self.critic is None or values is None:
            return
        if self.critic.is_shared:
            record_values(batch, values, returns)
            return
        with stats_tracker.record_timing("train_step/critic"):
            self.critic.update(batch, values, returns)

    def _kl_rewards(
        self, batch: Batch, proximal: Tensor | None, reference: Tensor | None
    ) -> Tensor | None:
        config = self.config
        if not config.kl_ctl:
            return None
        # Interpolated proximal log-probs are known within the step only.
        old = self._here(batch.logprobs) if proximal is None else proximal
        assert old is not None and reference is not None, "kl_ctl asks for both"
        rewards = advantage.kl_rewards(
            config.kl_estimator,
            old,
            reference,
            batch.loss_mask.to(self._device),
            coefficient=config.kl_ctl,
        )
        return rewards.cpu()

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
            return self._here(batch.logprobs)
        is_needed_now = config.m2_threshold is not None or bool(config.kl_ctl)
        if self._interpolates or (config.ppo_n_minibatches == 1 and not is_needed_now):
            return None
        with stats_tracker.record_timing("train_step/recompute_logprob"):
            return score(
                self.model,
                batch.without_choices(),
                temperature=self.temperature,
                max_tokens=config.max_tokens_per_mb,
                team=self._team,
            )

    @property
    def _interpolates(self) -> bool:
        return self.config.prox_logp_method == "loglinear"

    def _micro_batches(self, batch: Batch, rows: Sequence[int]) -> Iterator[MicroBatch]:
        """This process's passes over these rows."""
        config = self.config
        own = micro_batches(
            batch,
            self._team.own_rows(batch, rows),
            max_tokens=config.max_tokens_per_mb,
            share_prefixes=config.tree_packing == "auto",
        )
        for micro_batch in self._team.even(own, batch):
            yield micro_batch.to(self._device)

    def _step(
        self, batch: Batch, rows: list[int], evidence: Evidence, record: TokenRecord
    ) -> StepRecord:
        """One optimizer step on these rows; without a trained token nothing is touched."""
        config = self.config
        mask = batch.loss_mask & batch.is_in(rows)
        if config.m2_threshold is not None:
            assert batch.logprobs is not None and evidence.proximal is not None, "see _proximal"
            mask = correction.m2po_mask(
                evidence.proximal.cpu(), batch.logprobs, mask, threshold=config.m2_threshold
            )
        shared = self.critic if self.critic is not None and self.critic.is_shared else None
        parts = components(
            config, None if shared is None else shared.config, batch, mask, evidence, record
        )
        step = StepRecord(losses={part.name: torch.zeros(()) for part in parts})
        for micro_batch in self._micro_batches(batch, rows):
            predictions = self._predict(batch, micro_batch, evidence)
            self._backward(parts, predictions, step)
            record.write(
                predictions.places,
                new_logprobs=predictions.new,
                proximal=predictions.old,
                entropies=predictions.entropies,
            )
            step.num_micro_batches += 1
            step.num_computed_tokens += len(micro_batch.input_ids)
        step.add_up(self._team)
        if step.num_micro_batches:
            step.grad_norm, step.is_successful = self._optimizer.step()
            if not step.is_successful:
                logger.warning("the gradient is not finite; this optimizer step is skipped")
        return step

    def _predict(self, batch: Batch, micro_batch: MicroBatch, evidence: Evidence) -> Predictions:
        """What the weights say now of the trained tokens of the micro-batch."""
        logprobs, entropies, values = run_pass(self.model, self._forward, micro_batch)
        here, slots = micro_batch.tokens, micro_batch.slots
        logprobs, choices = logprobs[slots], None
        if logprobs.ndim == 2:
            logprobs, choices = logprobs[:, 0], logprobs[:, 1:]
        return Predictions(
            places=here,
            rows=micro_batch.rows,
            new=logprobs,
            old=self._old(logprobs.detach(), here, batch, evidence),
            entropies=entropies[slots],
            choices=choices,
            values=None if values is None else values[slots],
        )

    def _forward(self, micro_batch: MicroBatch) -> tuple[Tensor, Tensor, Tensor | None]:
        """Log-probs, entropies and, of a shared trunk, values; of what is predicted."""
        hidden = hidden_states(self._trunk, micro_batch)
        logprobs, entropies = logprobs_of(self.model, hidden, micro_batch, self.temperature)
        if self.critic is None or not self.critic.is_shared:
            return logprobs, entropies, None
        return logprobs, entropies, self.critic.head.values(hidden[micro_batch.predictors])

    def _old(self, new: Tensor, here: Tensor, batch: Batch, evidence: Evidence) -> Tensor:
        """[M] the denominator of the ratio."""
        if evidence.proximal is not None:
            return evidence.proximal[here]
        if not self._interpolates:
            return new
        assert evidence.behaviour is not None, "see _proximal"
        if batch.versions is None:
            raise WorkflowContractError(
                "actor.prox_logp_method=loglinear needs the key 'versions' in the trajectories"
            )
        return correction.loglinear_proximal(
            new,
            evidence.behaviour[here],
            batch.versions.to(self._device)[here],
            torch.ones_like(here, dtype=torch.bool),
            current_version=self._optimizer.num_updates,
        )

    def _backward(
        self, parts: Sequence[Component], predictions: Predictions, step: StepRecord
    ) -> None:
        """Add the gradient of these tokens; the sum over micro-batches is the minibatch's."""
        totals: dict[str, Tensor] = {}
        if len(predictions.places):
            totals = {part.name: part.total(predictions) for part in parts}
            total = sum(totals.values(), predictions.new.new_zeros(()))
        else:  # an idle pass: the sum of nothing, whose gradient is 0 for every parameter
            total = predictions.new.sum()
            if predictions.values is not None:
                total = total + predictions.values.sum()
        torch.autograd.backward(total)
        self._optimizer.collect()
        for name, total in totals.items():
            step.add_loss(name, total)

    def _own_tokens(self, batch: Batch) -> Tensor:
        """[T] those that this process computes in an update."""
        steps = minibatches(batch, self.config.ppo_n_minibatches)
        own = [row for rows in steps for row in self._team.own_rows(batch, rows)]
        return batch.is_in(own).to(self._device)
