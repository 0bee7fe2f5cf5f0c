"""From the rewards of a batch to one advantage per trained token, as the config says.

    overlong penalty -> (reward + bias) * scaling, clipped -> baseline and std (reward_norm)
    -> KL rewards -> GAE -> adv_norm -> reward_weight

Owns the one thing that lasts from step to step, the running mean of rewards. Knows no model: values
and KL rewards are given.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from agent_rl.config import ActorConfig, NormConfig
from agent_rl.errors import WorkflowContractError
from agent_rl.train import advantage, normalization
from agent_rl.train.batch import Batch

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Values:
    """What a critic expects before and after each trained token, [T] each; 0 elsewhere."""

    before: Tensor
    after: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """[T] float64 each; 0 off the mask."""

    advantages: Tensor
    returns: Tensor  # advantage before adv_norm, plus value: what a critic should have said


class AdvantageEstimator:
    def __init__(self, config: ActorConfig) -> None:
        self._config = config
        self._running_mean: float | None = None
        self._has_warned_of_singletons = False
        if None not in (config.reward_norm, config.adv_norm):
            logger.info(
                "actor.reward_norm and actor.adv_norm are both set: rewards are normalised by "
                "rollout and then advantages by token, where long rows weigh more"
            )

    def estimate(
        self,
        batch: Batch,
        *,
        is_truncated: Tensor | None = None,
        kl_rewards: Tensor | None = None,
        values: Values | None = None,
    ) -> Estimate:
        """Advantages of the trained tokens of rows with a known reward.

        ``is_truncated`` [R] matters with ``truncated_rows`` zero or mask: such a row has no reward
        of its own, and with a critic the value after its last token stands for what is missing.

        Raises:
            WorkflowContractError: reward_norm needs one reward per logical rollout and a rollout
                has several and no ``rollout_reward``; or it needs baseline_rewards.
        """
        config, mask, rows = self._config, batch.rewarded, batch.rows
        if is_truncated is None or config.truncated_rows == "train":
            is_truncated = torch.zeros(batch.num_rows, dtype=torch.bool)
        rewards = self._normalized(batch, is_truncated)
        token_rewards = advantage.rewards_at_end(rewards, mask, rows)
        if kl_rewards is not None:
            token_rewards = token_rewards + torch.where(mask, kl_rewards.double(), 0.0)
        before = torch.zeros_like(token_rewards) if values is None else values.before.double()
        bootstrap = None
        if values is not None:
            after = advantage.last_trained(values.after.double(), mask, rows, batch.num_rows)
            bootstrap = torch.where(is_truncated, after, 0.0)
        advantages = advantage.generalized_advantage(
            token_rewards,
            before,
            mask,
            rows,
            gamma=config.gamma,
            lam=config.gae_lambda,
            bootstrap=bootstrap,
        )
        returns = torch.where(mask, advantages + before, 0.0)
        if config.adv_norm is not None:
            advantages = normalization.normalize_advantages(
                advantages,
                mask,
                batch.to_tokens(batch.groups),
                torch.tensor([group.num_rollouts for group in batch.meta.rollout_groups]),
                config.adv_norm,
            )
        return Estimate(advantages=config.reward_weight * advantages, returns=returns)

    def state_dict(self) -> dict[str, Any]:
        return {"running_mean": self._running_mean}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._running_mean = state["running_mean"]

    def _normalized(self, batch: Batch, is_truncated: Tensor) -> Tensor:
        """[R] shaped and normalised rewards; 0 where there is none."""
        norm = self._config.reward_norm
        raw = torch.where(is_truncated, torch.nan, batch.rewards)
        penalized = raw + self._penalty(batch)
        rewards = self._shaped(penalized)
        if norm is None or not norm.uses_references:
            return torch.where(torch.isfinite(rewards), rewards, 0.0)
        if all(group.num_rollouts == 1 for group in batch.meta.rollout_groups):
            self.warn_of_singletons()
        # Raw rewards as well: a penalty must not make differing ones look equal.
        normalization.resolve_references(raw, batch.meta)
        references = self._shaped(normalization.resolve_references(penalized, batch.meta))
        if norm.mean_level in ("length", "running", "given"):
            baseline = self._baseline(batch, references, norm)
            rewards, references = rewards - baseline[batch.rollouts], references - baseline
            norm = norm.model_copy(update={"mean_level": None})
        return normalization.normalize_rewards(rewards, references, batch.meta, norm)

    def _baseline(self, batch: Batch, references: Tensor, norm: NormConfig) -> Tensor:
        """What each logical rollout's reward is compared with, where it is no plain mean."""
        if norm.mean_level == "length":
            lengths = torch.zeros(len(references), dtype=torch.float64)
            lengths.index_add_(0, batch.rollouts[batch.rows], batch.rewarded.double())
            groups = batch.rollout_groups
            return advantage.length_weighted_mean(references, lengths, groups)
        if norm.mean_level == "running":
            return torch.full_like(references, self._advance_mean(references, norm))
        if batch.baseline_rewards is None:
            raise WorkflowContractError(
                "actor.reward_norm.mean_level=given needs the key 'baseline_rewards' [rows] in "
                "every trajectory, for ReMax the reward of a greedy answer; there is none"
            )
        baseline = torch.zeros_like(references)
        baseline[batch.rollouts] = self._shaped(batch.baseline_rewards)
        return baseline

    def _advance_mean(self, references: Tensor, norm: NormConfig) -> float:
        """The mean of earlier steps, which knows nothing of this one; at first, of this one."""
        known = references[torch.isfinite(references)]
        if not len(known):
            return self._running_mean or 0.0
        mean = float(known.mean())
        baseline = mean if self._running_mean is None else self._running_mean
        self._running_mean = norm.running_decay * baseline + (1.0 - norm.running_decay) * mean
        return baseline

    def _penalty(self, batch: Batch) -> Tensor:
        """[R] what the overlong penalty adds to each row's reward."""
        config = self._config
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

    def _shaped(self, rewards: Tensor) -> Tensor:
        config = self._config
        shaped = (rewards + config.reward_bias) * config.reward_scaling
        return shaped.clamp(-config.reward_clip, config.reward_clip)

    def warn_of_singletons(self) -> bool:
        """Groups have one episode: say once that rewards teach nothing, where that is so."""
        norm = self._config.reward_norm
        if norm is None or norm.mean_level not in ("group", "length"):
            return False
        if not self._has_warned_of_singletons:
            self._has_warned_of_singletons = True
            logger.warning(
                "rollout.group_size=1: an episode without company is its own mean, so all "
                "advantages are 0 and nothing is learnt; raise rollout.group_size, or set "
                "actor.reward_norm.mean_level=running or actor.reward_norm=null"
            )
        return True
