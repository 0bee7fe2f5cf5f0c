"""The critic: what return to expect after each prefix of a row. A trunk with one linear head.

The value of token t is read where t is predicted, so it knows what comes before t and not t itself.
The trunk is a model of its own, trained here, or the actor's; then only the head belongs to the
critic and the value loss is a component of the actor's loss.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from agent_rl.config import CriticConfig
from agent_rl.errors import CheckpointError
from agent_rl.stats import tracker as stats_tracker
from agent_rl.train import loss
from agent_rl.train.batch import Batch, MicroBatch, micro_batches, minibatches
from agent_rl.train.estimator import Values
from agent_rl.train.forward import hidden_states, segment_attention
from agent_rl.train.metrics import StepRecord
from agent_rl.train.optimizer import Optimizer
from agent_rl.train.sharding import run_pass, shard
from agent_rl.train.team import Team

logger = logging.getLogger(__name__)


class ValueHead(torch.nn.Linear):
    """Starts at 0: before it has learnt anything it moves no advantage."""

    def __init__(self, trunk: Any) -> None:
        dtype = torch.promote_types(trunk.dtype, torch.float32)
        super().__init__(trunk.config.hidden_size, 1, device=trunk.device, dtype=dtype)
        torch.nn.init.zeros_(self.weight)
        torch.nn.init.zeros_(self.bias)

    def values(self, hidden: Tensor) -> Tensor:
        """[N, hidden size] -> [N]."""
        result: Tensor = self(hidden.to(self.weight.dtype))[:, 0]
        return result


class Critic:
    """``model`` is a transformers model, whose language head is not used.

    With ``config.trunk=shared`` it is the actor's, and ``update`` may not be called.
    """

    def __init__(
        self, model: Any, config: CriticConfig, *, total_steps: int, team: Team | None = None
    ) -> None:
        self.config = config
        self._model = model
        self._trunk = model.base_model
        self._team = team or Team()
        self.head = ValueHead(self._trunk)
        shard(self.head, self._team)
        self._optimizer = None
        if not self.is_shared:
            self._trunk.eval()
            shard(self._model, self._team)
            parameters = [*self._trunk.parameters(), *self.head.parameters()]
            self._optimizer = Optimizer(parameters, config.optimizer, total_steps=total_steps)

    @property
    def is_shared(self) -> bool:
        return self.config.trunk == "shared"

    @torch.no_grad()
    def values(self, batch: Batch) -> Values:
        """Before and after each trained token, by the weights as they are."""
        before = torch.zeros(batch.num_tokens, dtype=torch.float64)
        after = torch.zeros_like(before)
        with segment_attention(self._trunk):
            for part in self._micro_batches(batch, range(batch.num_rows)):
                values = run_pass(self._model, self._predict, part).double().cpu()
                predictors, slots = part.predictors.cpu(), part.slots.cpu()
                before[part.tokens.cpu()] = values[predictors][slots]
                after[part.tokens.cpu()] = values[part.nodes.cpu()]
        add_up = self._team.add_up
        return Values(before=add_up(before), after=add_up(after))

    def update(self, batch: Batch, values: Values, returns: Tensor) -> None:
        """One pass over the batch; metrics go to ``stats_tracker`` under ``ppo_critic``."""
        assert self._optimizer is not None, "a shared trunk is trained by the actor"
        self._optimizer.clear()
        recompute = self.config.gradient_checkpointing
        with segment_attention(self._trunk, recompute_layers=recompute):
            steps = [
                self._step(batch, rows, values.before, returns)
                for rows in minibatches(batch, self.config.ppo_n_minibatches)
            ]
        self._optimizer.end_update()
        record_values(batch, values, returns)
        with stats_tracker.scope("ppo_critic"):
            for step in steps:
                stats_tracker.scalar(
                    grad_norm=float(step.grad_norm),
                    update_successful=step.is_successful,
                    value_loss=float(step.losses.get("value", 0.0)),
                )
            stats_tracker.scalar(lr=self._optimizer.lr)

    def allocate(self) -> None:
        """See ``Optimizer.allocate``."""
        if self._optimizer is not None:
            self._optimizer.allocate()

    def state_dict(self) -> dict[str, Any]:
        if self._optimizer is None:
            return {"head": self.head.state_dict()}
        return {
            "head": self.head.state_dict(),
            "trunk": self._trunk.state_dict(),
            "optimizer": self._optimizer.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.head.load_state_dict(state["head"])
        if self._optimizer is not None:
            self._trunk.load_state_dict(state["trunk"])
            self._optimizer.load_state_dict(state["optimizer"])

    def _micro_batches(self, batch: Batch, rows: Sequence[int]) -> list[MicroBatch]:
        batch = batch.without_choices()
        parts = micro_batches(
            batch,
            self._team.own_rows(batch, rows),
            max_tokens=self.config.max_tokens_per_mb,
            share_prefixes=True,
        )
        return [part.to(self._trunk.device) for part in self._team.even(parts, batch)]

    def _predict(self, micro_batch: MicroBatch) -> Tensor:
        """[N] the value after each node."""
        return self.head.values(hidden_states(self._trunk, micro_batch))

    def _step(self, batch: Batch, rows: list[int], old: Tensor, returns: Tensor) -> StepRecord:
        assert self._optimizer is not None, "a shared trunk is trained by the actor"
        weights = loss.aggregation_weights(
            "token-mean", batch.rewarded & batch.is_in(rows), batch.rows, batch.rollouts
        )
        step = StepRecord()
        for part in self._micro_batches(batch, rows):
            predicted = run_pass(self._model, self._predict, part)
            values = predicted[part.predictors][part.slots]
            places = part.tokens.cpu()
            losses = loss.value_loss(
                values,
                old[places].to(values),
                returns[places].to(values),
                torch.ones_like(part.tokens, dtype=torch.bool),
                eps_clip=self.config.eps_clip,
                huber_delta=self.config.huber_delta,
            )
            total = (losses * weights[places].to(values)).sum()
            torch.autograd.backward(total)
            self._optimizer.collect()
            step.add_loss("value", total)
            step.num_micro_batches += 1
        step.add_up(self._team)
        if step.num_micro_batches:
            step.grad_norm, step.is_successful = self._optimizer.step()
            if not step.is_successful:
                logger.warning("the critic's gradient is not finite; this step is skipped")
        return step


def load_critic(critic: Critic | None, state: dict[str, Any] | None) -> None:
    """
    Raises:
        CheckpointError: the state has no critic and there is one, or it is of another kind.
    """
    saved = "absent" if state is None else "separate" if "trunk" in state else "shared"
    own = "absent" if critic is None else critic.config.trunk
    if saved != own:
        raise CheckpointError(f"its critic is {saved}, that of the config is {own}")
    if critic is not None and state is not None:
        critic.load_state_dict(state)


def record_values(batch: Batch, values: Values, returns: Tensor) -> None:
    """How well the values foretold the returns, before the update.

    ``explained_variance`` 1 - var(return - value) / var(return): 1 is perfect, 0 as good as a
    constant, below 0 worse.
    """
    mask = batch.rewarded
    with stats_tracker.scope("ppo_critic"):
        stats_tracker.denominator(n_valid_tokens=mask)
        stats_tracker.stat("n_valid_tokens", values=values.before.float(), returns=returns.float())
        spread = returns[mask].var(correction=0) if bool(mask.any()) else torch.zeros(())
        if float(spread) > 0.0:
            missed = (returns - values.before)[mask].var(correction=0)
            stats_tracker.scalar(explained_variance=1.0 - float(missed / spread))
