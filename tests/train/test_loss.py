"""Losses by hand-worked numbers."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from agent_rl.config import ActorConfig
from agent_rl.errors import ConfigError
from agent_rl.train import loss


def tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def mask_of(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.bool)


def total(token_losses: Tensor, mask: Tensor, rows: list[int], mode: loss.Aggregation) -> float:
    num_rows = max(rows) + 1
    weights = loss.aggregation_weights(
        mode, mask, torch.tensor(rows), torch.arange(num_rows), horizon=4
    )
    return float((token_losses * weights).sum())


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", 2.0),
        ("seq-mean-token-sum", 3.0),
        ("seq-mean-token-mean", 2.5),
        ("seq-mean-token-sum-norm", 1.5),
        ("dr-grpo", 0.75),
        ("rollout-mean", 2.5),
    ],
)
def test_aggregation_modes(mode: loss.Aggregation, expected: float) -> None:
    mask = torch.ones(3, dtype=torch.bool)
    assert total(tensor(1, 1, 4), mask, [0, 0, 1], mode) == pytest.approx(expected)


def test_empty_rows_do_not_count_as_sequences() -> None:
    mask = mask_of(1, 1, 0, 1)
    for mode, expected in (("seq-mean-token-mean", 2.5), ("seq-mean-token-sum", 3.0)):
        assert total(tensor(1, 1, 9, 4), mask, [0, 0, 1, 2], mode) == pytest.approx(expected)


def test_rollout_mean_joins_the_rows_of_a_rollout() -> None:
    """Rows 0 and 1 are one rollout: (1 + 1 + 4) / 3 = 2; the other is 8; the mean is 5."""
    weights = loss.aggregation_weights(
        "rollout-mean",
        torch.ones(4, dtype=torch.bool),
        torch.tensor([0, 0, 1, 2]),
        torch.tensor([0, 0, 1]),
    )
    assert float((tensor(1, 1, 4, 8) * weights).sum()) == pytest.approx(5.0)


def test_token_mean_does_not_depend_on_the_split() -> None:
    """Case B107: a row of one token with loss 4 and a row of three with loss 1: 7 / 4 = 1.75."""
    weights = loss.aggregation_weights(
        "token-mean",
        torch.ones(4, dtype=torch.bool),
        torch.tensor([0, 1, 1, 1]),
        torch.tensor([0, 1]),
    )
    parts = tensor(4, 1, 1, 1) * weights
    assert float(parts[:1].sum() + parts[1:].sum()) == pytest.approx(1.75)


def test_value_loss_is_averaged_over_the_minibatch() -> None:
    """Case B110: six tokens of 0.5 in micro-batches of 1, 2 and 3 -> 0.5, not 1.5."""
    losses = loss.value_loss(
        torch.ones(6), torch.ones(6), torch.zeros(6), torch.ones(6, dtype=torch.bool)
    )
    weights = loss.aggregation_weights(
        "token-mean", torch.ones(6, dtype=torch.bool), torch.arange(6), torch.arange(6)
    )
    parts = losses * weights
    assert float(parts[:1].sum() + parts[1:3].sum() + parts[3:].sum()) == pytest.approx(0.5)


def test_length_bias_of_the_aggregation_modes() -> None:
    """Case B120: 2 tokens with A +1 and 8 with A -1, ratio 1, horizon 16."""
    losses = tensor(*[-1.0] * 2, *[1.0] * 8)
    rows = torch.tensor([0] * 2 + [1] * 8)
    expected = {"seq-mean-token-mean": 0.0, "token-mean": 0.6, "dr-grpo": 0.1875}
    weight = {
        "seq-mean-token-mean": (0.25, 0.0625),
        "token-mean": (0.1, 0.1),
        "dr-grpo": (1 / 32, 1 / 32),
    }
    for mode, value in expected.items():
        weights = loss.aggregation_weights(
            mode,  # type: ignore[arg-type]
            torch.ones(10, dtype=torch.bool),
            rows,
            torch.arange(2),
            horizon=16,
        )
        assert float((losses * weights).sum()) == pytest.approx(value)
        assert (float(weights[0]), float(weights[9])) == pytest.approx(weight[mode])


def test_partial_groups_weigh_by_their_tokens() -> None:
    """Groups of 2 and 3 tokens with A 1 and 3: -(2 * 1 + 3 * 3) / 5 = -2.2."""
    advantages = tensor(1, 1, 3, 3, 3)
    mask = torch.ones(5, dtype=torch.bool)
    policy = loss.ppo_clip(torch.zeros(5), advantages, mask, eps_clip=0.2)
    weights = loss.aggregation_weights("token-mean", mask, torch.arange(5), torch.arange(5))
    assert float((policy.loss * weights).sum()) == pytest.approx(-2.2)


@pytest.mark.parametrize(
    ("advantage", "ratio", "c_clip", "expected"),
    [
        (1.0, 1.5, None, -1.2),  # the gain stops at 1 + eps
        (1.0, 0.5, None, -0.5),
        (-1.0, 0.5, None, 0.8),
        (-1.0, 5.0, None, 5.0),
        (-1.0, 5.0, 3.0, 3.0),  # dual clip
        (1.0, 5.0, 3.0, -1.2),  # and only for A < 0
    ],
)
def test_ppo_clip(advantage: float, ratio: float, c_clip: float | None, expected: float) -> None:
    policy = loss.ppo_clip(
        tensor(math.log(ratio)), tensor(advantage), mask_of(1), eps_clip=0.2, c_clip=c_clip
    )
    assert float(policy.loss) == pytest.approx(expected)


def test_clip_higher_is_asymmetric() -> None:
    policy = loss.ppo_clip(
        tensor(math.log(1.5), math.log(0.5)),
        tensor(1.0, -1.0),
        mask_of(1, 1),
        eps_clip=0.2,
        eps_clip_higher=0.28,
    )
    assert policy.loss.tolist() == pytest.approx([-1.28, 0.8])
    assert policy.is_clipped.tolist() == [True, True]


def test_sequence_ratio_leaves_masked_places_out() -> None:
    """Case B114: log-ratios .3 -.1 .2 and two masked ones -> exp(.4 / 3) = 1.14263 everywhere."""
    new = tensor(0.3, -0.1, 0.2, 7.0, float("nan"))
    mask = mask_of(1, 1, 1, 0, 0)
    ratio = loss.sequence_log_ratio(
        new, torch.zeros(5), mask, torch.zeros(5, dtype=torch.long)
    ).exp()
    assert ratio[:3].tolist() == pytest.approx([1.14263] * 3, abs=1e-5)


def test_sequence_advantages_leave_masked_places_out() -> None:
    """Case B114: mask 1 1 0 0, advantages 1 1 10 10 -> loss -1."""
    mask, rows = mask_of(1, 1, 0, 0), torch.zeros(4, dtype=torch.long)
    advantages = loss.row_mean(tensor(1, 1, 10, 10), mask, rows)
    zeros = torch.zeros(4, dtype=torch.float64)
    logs = loss.sequence_log_ratio(zeros, zeros, mask, rows)
    policy = loss.ppo_clip(logs, advantages, mask, eps_clip=0.2)
    assert float(policy.loss.sum() / 2) == pytest.approx(-1.0)


def test_gspo_gradient_spreads_over_the_row() -> None:
    """d exp(mean(x)) / dx_t = ratio / n for each of the n tokens, from every token's term."""
    new = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    mask, rows = mask_of(1, 1), torch.zeros(2, dtype=torch.long)
    logs = loss.sequence_log_ratio(new, torch.zeros(2), mask, rows)
    loss.ppo_clip(logs, tensor(1, 1), mask, eps_clip=0.2).loss.sum().backward()
    assert new.grad is not None
    assert new.grad.tolist() == pytest.approx([-1.0, -1.0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_ratio_never_overflows(dtype: torch.dtype) -> None:
    """Case B115: log-ratio 1000 under advantage 0: loss -0.5, gradients exactly 0 and -0.5."""
    new = torch.zeros(2, dtype=dtype, requires_grad=True)
    old = torch.tensor([-1000.0, 0.0], dtype=dtype)
    mask = mask_of(1, 1)
    policy = loss.ppo_clip(
        loss.log_ratio(new, old, mask), torch.tensor([0.0, 1.0]), mask, eps_clip=0.2
    )
    value = policy.loss.sum() / 2
    value.backward()
    assert float(value.detach()) == -0.5
    assert new.grad is not None
    assert new.grad.tolist() == [0.0, -0.5]


def test_real_nan_is_not_hidden() -> None:
    """Case B115: a nan log-prob at a trained token reaches the loss."""
    mask = mask_of(1)
    logs = loss.log_ratio(tensor(float("nan")), tensor(0.0), mask)
    assert torch.isnan(loss.ppo_clip(logs, tensor(1.0), mask, eps_clip=0.2).loss).all()


@pytest.mark.parametrize("filler", [0.0, 1.0, float("nan"), float("-inf")])
def test_filler_off_the_mask_changes_nothing(filler: float) -> None:
    """Cases B60 and B117: loss and gradient are the same whatever stands off the mask."""
    new = tensor(filler, -1.0, filler, -2.0).requires_grad_()
    mask = mask_of(0, 1, 0, 1)
    logs = loss.log_ratio(new, tensor(filler, -1.5, filler, -2.0), mask)
    policy = loss.ppo_clip(logs, tensor(filler, 1.0, filler, 1.0), mask, eps_clip=1.0)
    policy.loss.sum().backward()
    assert float(policy.loss.detach().sum()) == pytest.approx(-(math.exp(0.5) + 1.0))
    assert new.grad is not None
    assert new.grad.tolist() == pytest.approx([0.0, -math.exp(0.5), 0.0, -1.0])


def test_kl_ignores_nan_off_the_mask() -> None:
    """Case B117: the value of position 0 only."""
    value = loss.kl_estimate("k1", tensor(-1, float("nan")), tensor(-1.5, 0), mask_of(1, 0))
    assert value.tolist() == [0.5, 0.0]


@pytest.mark.parametrize(("kind", "expected"), [("k1", 0.5), ("k2", 0.125), ("k3", 0.106531)])
def test_kl_estimators(kind: loss.KLEstimator, expected: float) -> None:
    """Case B118: log-prob -1, reference -1.5."""
    value = loss.kl_estimate(kind, tensor(-1.0), tensor(-1.5), mask_of(1))
    assert float(value) == pytest.approx(expected, abs=1e-6)


def test_unknown_kl_estimator_is_refused() -> None:
    """Case B118: at config time, and by the function."""
    for keys in ({"kl_ctl": 0.1, "kl_estimator": "k2+"}, {"kl_loss_estimator": "low_var_kl"}):
        with pytest.raises(ConfigError, match="'k1', 'k2' or 'k3'"):
            ActorConfig(**{"kl_loss_coef": 0.1, **keys})
    with pytest.raises(ValueError, match="low_var_kl"):
        loss.kl_estimate("low_var_kl", tensor(0.0), tensor(0.0), mask_of(1))  # type: ignore[arg-type]


def test_cispo_caps_the_weight_and_keeps_the_gradient() -> None:
    new = tensor(-1.0).requires_grad_()
    logs = loss.log_ratio(new, tensor(-1.0 - math.log(2.0)), mask_of(1))
    policy = loss.cispo(logs, new, tensor(1.0), mask_of(1), eps_clip=0.2)
    policy.loss.sum().backward()
    assert float(policy.loss.detach()) == pytest.approx(1.2)
    assert new.grad is not None
    assert float(new.grad) == pytest.approx(-1.2)


def test_sapo_gate() -> None:
    """At ratio 1: -2 A / tau, slope -A. At ratio 2, A 1: -4 sigmoid(1) = -2.924234."""
    new = tensor(0.0, 0.0).requires_grad_()
    mask = mask_of(1, 1)
    policy = loss.sapo(loss.log_ratio(new, torch.zeros(2), mask), tensor(1.0, -1.0), mask)
    policy.loss.sum().backward()
    assert policy.loss.tolist() == pytest.approx([-2.0, 2.0 / 1.05])
    assert new.grad is not None
    assert new.grad.tolist() == pytest.approx([-1.0, 1.0])
    far = loss.sapo(tensor(math.log(2.0)), tensor(1.0), mask_of(1))
    assert float(far.loss) == pytest.approx(-2.924234, abs=1e-6)


def test_clipped_value_loss() -> None:
    """V 2, old 1, return 0, eps .5: max(2, 1.125) = 2; with Huber delta 1: max(1.5, 1) = 1.5."""
    mask = mask_of(1)
    assert float(loss.value_loss(tensor(2), tensor(1), tensor(0), mask)) == 2.0
    huber = loss.value_loss(tensor(2), tensor(1), tensor(0), mask, huber_delta=1.0)
    assert float(huber) == 1.5


def test_topk_distillation_by_hand() -> None:
    """Student .5, teacher .8, the rest .5 and .2: .5 ln(.5/.8) + .5 ln(.5/.2) = .223144.

    Two of the teacher's tokens, all that there are: .5 ln(.5/.8) + .3 ln(.3/.1) + .2 ln(.2/.1).
    """
    one = loss.topk_distillation(tensor(0.5)[:, None].log(), tensor(0.8)[:, None].log())
    assert float(one) == pytest.approx(0.223144, abs=1e-6)
    two = loss.topk_distillation(tensor(0.5, 0.3)[None].log(), tensor(0.8, 0.1)[None].log())
    assert float(two) == pytest.approx(-0.235002 + 0.329584 + 0.138629, abs=1e-6)
    same = loss.topk_distillation(tensor(0.5, 0.5)[None].log(), tensor(0.5, 0.5)[None].log())
    assert float(same) == pytest.approx(0.0, abs=1e-9)


def test_topk_distillation_pulls_towards_the_teacher() -> None:
    student = tensor(0.5)[:, None].log().requires_grad_()
    loss.topk_distillation(student, tensor(0.8)[:, None].log()).sum().backward()
    assert student.grad is not None
    assert float(student.grad) == pytest.approx(0.5 * math.log(0.5 / 0.8 * 0.2 / 0.5))
