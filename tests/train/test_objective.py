"""Each component of the loss has weights and a denominator of its own: hand-worked numbers."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from tiny_batches import trajectory

from agent_rl.config import ActorConfig, CriticConfig
from agent_rl.train.batch import Batch
from agent_rl.train.metrics import TokenRecord
from agent_rl.train.objective import (
    Component,
    Evidence,
    Predictions,
    components,
    policy_loss,
)

NAN = float("nan")


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def batch() -> Batch:
    """Rows 1 2 3 and 1 4 with rewards 1 and 0; trained tokens at places 1, 2 and 4."""
    rows = trajectory([[1, 2, 3], [1, 4]], [[0, 1, 1], [0, 1]], [1.0, 0.0])
    rows["teacher_logprobs"] = torch.tensor([[NAN, -1.0, NAN], [NAN, NAN, NAN]])
    rows["teacher_topk_ids"] = torch.tensor([[[0], [7], [0]], [[0], [0], [0]]])
    rows["teacher_topk_logprobs"] = torch.tensor([0.8]).log().expand(2, 3, 1)
    return Batch.from_trajectories([rows])


def parts(
    keys: dict[str, object], critic: CriticConfig | None = None, **evidence: torch.Tensor
) -> dict[str, Component]:
    """The components over all trained tokens; every advantage is 1."""
    given = batch()
    known = dict.fromkeys(("behaviour", "proximal", "reference", "values", "returns")) | evidence
    record = TokenRecord.empty(given.loss_mask, torch.ones(given.num_tokens, dtype=torch.float64))
    config = ActorConfig.model_validate(keys)
    made = components(config, critic, given, given.loss_mask, Evidence(**known), record)
    return {part.name: part for part in made}


def predictions(**given: torch.Tensor) -> Predictions:
    """Log-probs -1 of the three trained tokens, before and now."""
    same = tensor(-1, -1, -1)
    values = {"new": same, "old": same, "entropies": tensor(2, 2, 2), "choices": None}
    return Predictions(
        places=torch.tensor([1, 2, 4]),
        rows=torch.tensor([0, 0, 1]),
        **({"values": None} | values | given),  # type: ignore[arg-type]
    )


def total(part: Component, **given: torch.Tensor) -> float:
    return float(part.total(predictions(**given)))


def test_the_policy_alone() -> None:
    """Three tokens with advantage 1 and ratio 1: -1."""
    made = parts({})
    assert list(made) == ["policy"]
    assert total(made["policy"]) == pytest.approx(-1.0)


def test_entropy_bonus() -> None:
    assert total(parts({"entropy_coef": 0.1})["entropy"]) == pytest.approx(-0.2)


def test_reference_kl() -> None:
    """Case B118: k3 of -1 against -1.5 is .106531 at each of the three tokens; + .5 of it."""
    made = parts({"kl_loss_coef": 0.5}, reference=tensor(NAN, -1.5, -1.5, NAN, -1.5))
    assert total(made["reference_kl"]) == pytest.approx(0.5 * 0.106531, abs=1e-6)


def test_cross_entropy_is_averaged_over_rewarded_rows() -> None:
    """Two of three tokens are of a row with a reward above 0: 0.25 * (1 + 3) / 2."""
    made = parts({"cross_entropy_coef": 0.25})
    assert total(made["cross_entropy"], new=tensor(-1, -3, -9)) == pytest.approx(0.5)


def test_distillation_is_averaged_over_taught_tokens() -> None:
    """One token has a teacher: .5 against .8 is .223144, twice that with weight 2."""
    made = parts({"distillation": {"weight": 2.0, "topk": 1}})
    choices = tensor(0.5, 0.9, 0.9)[:, None].log()
    assert total(made["distillation"], choices=choices) == pytest.approx(0.446287, abs=1e-6)
    assert total(made["policy"]) == pytest.approx(-1.0), "its advantage is the reward's alone"


def test_value_of_a_shared_trunk() -> None:
    """Values 2, 0, 0 against returns 0, before 1, 0, 0, clip .5: max(2, 1.125) / 3 * .5."""
    old = tensor(0, 1, 0, 0, 0)
    made = parts({}, CriticConfig(trunk="shared"), values=old, returns=tensor(0, 0, 0, 0, 0))
    assert total(made["value"], values=tensor(2, 0, 0)) == pytest.approx(1 / 3)


def test_one_ratio_and_one_advantage_for_each_row() -> None:
    """Case B114, GSPO: log-ratios .3 -.1 .2 -> 1.14263 at each token; advantages 1 1 4 -> 2."""
    config = ActorConfig(importance_sampling_level="sequence")
    one_row = replace(
        predictions(new=tensor(-0.7, -1.1, -0.8)), rows=torch.zeros(3, dtype=torch.int64)
    )
    policy = policy_loss(config, one_row, tensor(1, 1, 4), torch.ones(3, dtype=torch.bool))
    assert policy.loss.tolist() == pytest.approx([-2 * 1.14263] * 3, abs=1e-4)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, -1.0),
        ({"loss_aggregation": "seq-mean-token-sum"}, -1.5),
        ({"loss_aggregation": "dr-grpo", "loss_horizon": 16}, -1.5 / 16),
    ],
)
def test_the_aggregation_that_the_config_names(keys: dict[str, object], expected: float) -> None:
    """Case B120: losses -1 -1 | -1; the default is the mean over tokens."""
    assert total(parts(keys)["policy"]) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("keys", "ratio"),
    [
        ({"importance_sampling_level": "sequence", "eps_clip_higher": 3.0}, 2.0),
        ({"use_decoupled_loss": True, "rejection_sampling": {"level": "sequence"}}, 1.0),
    ],
)
def test_what_m2po_drops_is_in_no_ratio_of_its_row(keys: dict[str, object], ratio: float) -> None:
    """The second token of row 0 is dropped: whatever it says, the loss is -(ratio + 1) / 2."""
    given = batch()
    mask = given.loss_mask & (torch.arange(given.num_tokens) != 2)
    known = dict.fromkeys(("proximal", "reference", "values", "returns"))
    evidence = Evidence(behaviour=tensor(0, -1, -9, 0, -1), **known)
    record = TokenRecord.empty(given.loss_mask, torch.ones(given.num_tokens, dtype=torch.float64))
    (part,) = components(ActorConfig.model_validate(keys), None, given, mask, evidence, record)
    new = tensor(-1 + math.log(ratio), -7, -1)
    assert total(part, new=new) == pytest.approx(-(ratio + 1) / 2)


def test_a_weight_is_fixed_before_the_micro_batches() -> None:
    """Case B107: the parts of two micro-batches are the whole."""
    made = parts({"kl_loss_coef": 0.5}, reference=tensor(NAN, -1.5, -2.5, NAN, -0.5))
    whole = total(made["reference_kl"])
    split = 0.0
    for chosen in ([0], [1, 2]):
        some = Predictions(
            places=torch.tensor([1, 2, 4])[chosen],
            rows=torch.tensor([0, 0, 1])[chosen],
            new=tensor(-1, -1, -1)[chosen],
            old=tensor(-1, -1, -1)[chosen],
            entropies=tensor(2, 2, 2)[chosen],
            choices=None,
            values=None,
        )
        split += float(made["reference_kl"].total(some))
    assert split == pytest.approx(whole)
