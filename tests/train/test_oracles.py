"""Losses and advantages against the functions of verl and trl, where these are installed.

    pip install --no-deps verl trl ...   (neither is needed by anything else here)

Four rows of up to seven tokens with holes in their masks; the loss and its gradient in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from agent_rl.config import NormConfig
from agent_rl.train import advantage, loss, normalization
from agent_rl.types import RolloutGroup, TrajBatchMeta

pytestmark = pytest.mark.filterwarnings("ignore")  # of what these import
B, T = 4, 7
LOW, HIGH = 0.2, 0.28


class Data:
    """The same numbers as a padded [B, T] table, and packed."""

    def __init__(self) -> None:
        draw = torch.Generator().manual_seed(0)

        def table(scale: float) -> Tensor:
            return scale * torch.randn(B, T, dtype=torch.float64, generator=draw)

        self.mask = torch.rand(B, T, generator=draw) < 0.7
        self.mask[:, 0] = True
        self.new, self.old, self.reference = table(0.5) - 2.0, table(0.5) - 2.0, table(0.5) - 2.0
        self.advantages = table(1.0)[:, :1].expand(B, T)
        self.rewards = torch.tensor([1.0, 0.0, 0.5, 0.25], dtype=torch.float64)
        self.groups = torch.tensor([0, 0, 1, 1])
        self.rows = torch.arange(B).repeat_interleave(T)

    @property
    def token_rewards(self) -> Tensor:
        return advantage.rewards_at_end(self.rewards, self.mask.flatten(), self.rows).view(B, T)

    @property
    def meta(self) -> TrajBatchMeta:
        group = RolloutGroup(row_counts=(1, 1))
        return TrajBatchMeta(
            traj_group_sizes=(2, 2), traj_seqlens=(T, T), rollout_groups=(group, group)
        )


@pytest.fixture
def data() -> Data:
    return Data()


@pytest.fixture(scope="module")
def verl() -> Any:
    pytest.importorskip("verl", reason="verl is not installed: nothing to compare with")
    from verl.trainer.ppo import core_algos

    return core_algos


@pytest.fixture(scope="module")
def verl_config(verl: Any) -> Any:
    from verl.workers.config import ActorConfig

    return ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        clip_ratio_low=LOW,
        clip_ratio_high=HIGH,
        clip_ratio_c=3.0,
        tau_pos=1.0,
        tau_neg=1.05,
    )


def our_total(data: Data, new: Tensor, losses: Tensor, mode: loss.Aggregation) -> Tensor:
    weights = loss.aggregation_weights(
        mode, data.mask.flatten(), data.rows, torch.arange(B), horizon=T
    )
    return (losses * weights).sum()


def ours(data: Data, kind: str) -> Callable[[Tensor], Tensor]:
    """The token losses of a method, packed."""
    mask, rows = data.mask.flatten(), data.rows
    advantages, old = data.advantages.flatten(), data.old.flatten()

    def losses(new: Tensor) -> Tensor:
        packed = new.flatten()
        token = loss.log_ratio(packed, old, mask)
        clip = {"eps_clip": LOW, "eps_clip_higher": HIGH}
        if kind == "gspo":
            by_row = loss.sequence_log_ratio(packed, old, mask, rows)
            return loss.ppo_clip(by_row, advantages, mask, **clip).loss
        if kind == "cispo":
            return loss.cispo(token, packed, advantages, mask, **clip).loss
        if kind == "sapo":
            return loss.sapo(token, advantages, mask).loss
        return loss.ppo_clip(
            token, advantages, mask, c_clip=3.0 if kind == "dual" else None, **clip
        ).loss

    return losses


def compare(
    first: Callable[[Tensor], Tensor], second: Callable[[Tensor], Tensor], at: Tensor
) -> None:
    results = []
    for function in (first, second):
        point = at.clone().requires_grad_()
        value = function(point)
        (gradient,) = torch.autograd.grad(value, point)
        results.append((value.detach(), gradient))
    (value, gradient), (other, other_gradient) = results
    assert gradient.abs().max() > 0.0
    torch.testing.assert_close(value, other)
    torch.testing.assert_close(gradient, other_gradient)


VERL_LOSSES = [
    ("dual", "vanilla", "token-mean", "token-mean"),
    ("dual", "vanilla", "seq-mean-token-mean", "seq-mean-token-mean"),
    ("dual", "vanilla", "seq-mean-token-sum", "seq-mean-token-sum"),
    ("dual", "vanilla", "dr-grpo", "seq-mean-token-sum-norm"),
    ("gspo", "gspo", "seq-mean-token-mean", "seq-mean-token-mean"),
    ("cispo", "cispo", "token-mean", "token-mean"),
    ("sapo", "sapo", "seq-mean-token-mean", "seq-mean-token-mean"),
]


@pytest.mark.parametrize(("kind", "theirs", "mode", "their_mode"), VERL_LOSSES)
def test_policy_losses_of_verl(
    data: Data, verl: Any, verl_config: Any, kind: str, theirs: str, mode: Any, their_mode: str
) -> None:
    function = getattr(verl, f"compute_policy_loss_{theirs}")

    def reference(new: Tensor) -> Tensor:
        total, _ = function(
            old_log_prob=data.old,
            log_prob=new,
            advantages=data.advantages,
            response_mask=data.mask.double(),
            loss_agg_mode=their_mode,
            config=verl_config,
        )
        return total

    compare(lambda new: our_total(data, new, ours(data, kind)(new), mode), reference, data.new)


@pytest.mark.parametrize(("kind", "theirs"), [("k1", "k1"), ("k2", "k2"), ("k3", "k3")])
def test_kl_estimates_of_verl(data: Data, verl: Any, kind: Any, theirs: str) -> None:
    everywhere = torch.ones(B, T, dtype=torch.bool)
    got = loss.kl_estimate(kind, data.new, data.reference, everywhere)
    torch.testing.assert_close(got, verl.kl_penalty(data.new, data.reference, theirs))


def test_value_loss_of_verl(data: Data, verl: Any) -> None:
    def reference(values: Tensor) -> Tensor:
        total, _ = verl.compute_value_loss(
            vpreds=values,
            returns=data.reference,
            values=data.old,
            response_mask=data.mask.double(),
            cliprange_value=0.5,
        )
        return total

    def own(values: Tensor) -> Tensor:
        mask = data.mask.flatten()
        losses = loss.value_loss(
            values.flatten(), data.old.flatten(), data.reference.flatten(), mask, eps_clip=0.5
        )
        return our_total(data, values, losses, "token-mean")

    compare(own, reference, data.new)


def test_gae_of_verl(data: Data, verl: Any) -> None:
    """Theirs whitens afterwards; returns are before that."""
    rewards = data.token_rewards + 0.1 * data.reference * data.mask
    _, returns = verl.compute_gae_advantage_return(rewards, data.old, data.mask.double(), 0.9, 0.8)
    got = advantage.generalized_advantage(
        rewards.flatten(), data.old.flatten(), data.mask.flatten(), data.rows, gamma=0.9, lam=0.8
    )
    expected = (returns - data.old).flatten()[data.mask.flatten()]
    torch.testing.assert_close(got[data.mask.flatten()], expected)


def normalized(data: Data, **keys: Any) -> Tensor:
    return normalization.normalize_rewards(
        data.rewards, data.rewards, data.meta, NormConfig.model_validate(keys)
    )


def test_group_advantages_of_verl(data: Data, verl: Any) -> None:
    """Each row's own value, on its first token; stds differ by the place of epsilon only."""
    index, mask = data.groups.numpy(), data.mask.double()
    given = {"token_level_rewards": data.token_rewards, "response_mask": mask}

    def first(pair: tuple[Tensor, Tensor]) -> Tensor:
        return pair[0][:, 0]

    group = {"mean_level": "group", "std_level": None}
    expected = {
        "grpo": (first(verl.compute_grpo_outcome_advantage(**given, index=index)), 1e-4),
        "dr-grpo": (
            first(
                verl.compute_grpo_outcome_advantage(
                    **given, index=index, norm_adv_by_std_in_grpo=False
                )
            ),
            1e-6,
        ),
        "rloo": (first(verl.compute_rloo_outcome_advantage(**given, index=index)), 1e-6),
        "opo": (first(verl.compute_opo_outcome_advantage(**given, index=index)), 1e-6),
    }
    baseline = advantage.length_weighted_mean(data.rewards, data.mask.sum(1), data.groups)
    got = {
        "grpo": normalized(data, mean_level="group", std_level="group"),
        "dr-grpo": normalized(data, **group),
        "rloo": normalized(data, **group, mean_leave1out=True),
        "opo": data.rewards - baseline,
    }
    for name, (theirs, tolerance) in expected.items():
        torch.testing.assert_close(got[name], theirs.double(), atol=tolerance, rtol=tolerance)


def test_whitening_of_reinforce_plus_plus_in_verl(data: Data, verl: Any) -> None:
    config = SimpleNamespace(gamma=1.0)
    theirs, _ = verl.compute_reinforce_plus_plus_outcome_advantage(
        data.token_rewards, data.mask.double(), config=config
    )
    mask = data.mask.flatten()
    plain = advantage.generalized_advantage(
        data.token_rewards.flatten(), torch.zeros(B * T), mask, data.rows, gamma=1.0, lam=1.0
    )
    got = normalization.normalize_advantages(
        plain, mask, data.groups[data.rows], torch.tensor([2, 2]), NormConfig()
    )
    torch.testing.assert_close(got[mask], theirs.flatten()[mask], atol=1e-4, rtol=1e-4)


TRL_LOSSES = [
    ("grpo", "token", "ppo", "seq-mean-token-mean"),
    ("bnpo", "token", "ppo", "token-mean"),
    ("dapo", "token", "ppo", "token-mean"),
    ("dr_grpo", "token", "ppo", "dr-grpo"),
    ("grpo", "sequence", "gspo", "seq-mean-token-mean"),
    ("sapo", "token", "sapo", "seq-mean-token-mean"),
]


@pytest.mark.parametrize(("loss_type", "level", "kind", "mode"), TRL_LOSSES)
@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_losses_of_trl(
    data: Data, loss_type: str, level: str, kind: str, mode: Any, beta: float
) -> None:
    """Their KL term has the policy's weights: ours with kl_loss_coef = beta, k3."""
    pytest.importorskip("trl", reason="trl is not installed: nothing to compare with")
    from trl import GRPOTrainer

    def reference(new: Tensor) -> Tensor:
        stub = trl_stub(new, loss_type, level, beta)
        inputs = {
            "prompt_ids": torch.zeros(B, 1, dtype=torch.long),
            "prompt_mask": torch.ones(B, 1),
            "completion_ids": torch.zeros(B, T, dtype=torch.long),
            "completion_mask": data.mask.double(),
            "advantages": data.advantages[:, 0],
            "old_per_token_logps": data.old,
            "ref_per_token_logps": data.reference,
            "num_items_in_batch": data.mask.sum(),
        }
        total: Tensor = GRPOTrainer._compute_loss(stub, None, inputs)
        return total

    def own(new: Tensor) -> Tensor:
        losses = ours(data, kind)(new)
        kl = loss.kl_estimate("k3", new.flatten(), data.reference.flatten(), data.mask.flatten())
        return our_total(data, new, losses + beta * kl, mode)

    compare(own, reference, data.new)


def trl_stub(new: Tensor, loss_type: str, level: str, beta: float) -> Any:
    """What GRPOTrainer._compute_loss reads of a trainer: one process, one micro-batch."""
    from collections import defaultdict

    return SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (new, torch.zeros_like(new), None),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level=level,
        beta=beta,
        loss_type=loss_type,
        epsilon_low=LOW,
        epsilon_high=HIGH,
        use_vllm=False,
        max_completion_length=T,
        current_gradient_accumulation_steps=1,
        _entropy_bonus_enabled=False,
        model=SimpleNamespace(training=True),
        args=SimpleNamespace(
            delta=None,
            use_bias_correction_kl=False,
            sapo_temperature_pos=1.0,
            sapo_temperature_neg=1.05,
            steps_per_generation=1,
        ),
        accelerator=SimpleNamespace(
            num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x
        ),
        _metrics=defaultdict(lambda: defaultdict(list)),
    )
