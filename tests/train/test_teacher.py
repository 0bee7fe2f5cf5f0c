"""Teacher: which tokens of a batch are distilled, and what that adds to their advantage."""

from __future__ import annotations

import pytest
import torch
from tiny_batches import tiny_model

from agent_rl import stats_tracker
from agent_rl.config import ActorConfig
from agent_rl.errors import WorkflowContractError
from agent_rl.train.actor import Actor
from agent_rl.train.batch import Batch
from agent_rl.types import TensorDict

NAN = float("nan")


def rows(reward: float, teacher: list[float] | None, **others: torch.Tensor) -> TensorDict:
    """One row 1 2 3 whose last two tokens are sampled with log-prob -1.5."""
    result: TensorDict = {
        "input_ids": torch.tensor([[1, 2, 3]]),
        "attention_mask": torch.ones(1, 3, dtype=torch.bool),
        "loss_mask": torch.tensor([[0, 1, 1]]),
        "logprobs": torch.tensor([[0.0, -1.5, -1.5]]),
        "rewards": torch.tensor([reward]),
    }
    if teacher is not None:
        result["teacher_logprobs"] = torch.tensor([teacher])
    result.update(others)
    return result


def test_reward_and_teacher_add_up() -> None:
    """Teacher -1.0, proximal -1.5, reward +1: 0.5 + 1 = 1.5; weights 2 and 0.5: 1 + 0.5 = 1.5."""
    for weights in ({"weight": 1.0}, {"weight": 2.0}):
        config = ActorConfig.model_validate(
            {
                "reward_norm": None,
                "distillation": weights,
                "reward_weight": 1.0 / weights["weight"],
            }
        )
        assert advantages(config, rows(1.0, [NAN, -1.0, -1.0])) == pytest.approx([0.0, 1.5, 1.5])


def test_rows_of_either_kind_stand_in_one_batch() -> None:
    """Reward only: its advantage. Teacher only (reward nan): 0.5 where it speaks, else no token."""
    config = ActorConfig.model_validate({"reward_norm": None, "distillation": {"weight": 1.0}})
    batch = [rows(1.0, None), rows(NAN, [NAN, -1.0, NAN]), rows(NAN, None)]
    assert Batch.from_trajectories(batch).loss_mask.tolist() == [
        *(False, True, True),
        *(False, True, False),
        *(False, False, False),
    ]
    got = advantages(config, *batch)
    assert got == pytest.approx([0.0, 1.0, 1.0, 0.0, 0.5, 0.0, 0.0, 0.0, 0.0])


def test_without_a_weight_the_teacher_is_not_there() -> None:
    """A row without a reward has no trained token then: it must not thin out the others."""
    config = ActorConfig(reward_norm=None)
    assert advantages(config, rows(1.0, [NAN, -1.0, -1.0]), rows(NAN, [NAN, -1.0, -1.0])) == (
        pytest.approx([0.0, 1.0, 1.0, 0.0, 0.0, 0.0])
    )
    assert stats_tracker.export_all()["ppo_actor/n_valid_tokens"] == 2


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("teacher_logprobs", torch.zeros(1, 2), r"shape \(1, 3\)"),
        ("teacher_logprobs", torch.tensor([[0.0, -torch.inf, 0.0]]), "infinite"),
        ("teacher_topk_ids", torch.zeros(1, 3, 2, dtype=torch.int64), "both have the shape"),
    ],
)
def test_what_does_not_fit_is_refused(key: str, value: torch.Tensor, said: str) -> None:
    with pytest.raises(WorkflowContractError, match=said):
        Batch.from_trajectories([rows(1.0, [NAN, -1.0, -1.0], **{key: value})])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "have 0 likeliest tokens"),
        (
            {
                "teacher_topk_ids": torch.ones(1, 3, 1, dtype=torch.int64),
                "teacher_topk_logprobs": torch.zeros(1, 3, 1),
            },
            "have 1 likeliest tokens",
        ),
        (
            {
                "teacher_topk_ids": torch.ones(1, 3, 2, dtype=torch.int64),
                "teacher_topk_logprobs": torch.full((1, 3, 2), NAN),
            },
            "have no teacher_topk_logprobs",
        ),
    ],
)
def test_likeliest_tokens_that_are_missing_are_named(
    given: dict[str, torch.Tensor], said: str
) -> None:
    config = ActorConfig.model_validate({"distillation": {"weight": 1.0, "topk": 2}})
    with pytest.raises(WorkflowContractError, match=said):
        advantages(config, rows(1.0, [NAN, -1.0, -1.0], **given))


def test_an_id_where_the_teacher_says_nothing_is_not_looked_up() -> None:
    config = ActorConfig.model_validate({"distillation": {"weight": 1.0, "topk": 1}})
    given = {
        "teacher_topk_ids": torch.tensor([[[-1], [-1], [7]]]),
        "teacher_topk_logprobs": torch.tensor([[[NAN], [NAN], [-0.5]]]),
    }
    plain = {key: value.clone() for key, value in given.items()}
    plain["teacher_topk_ids"][0, :2] = 3
    losses = [
        _distillation(config, rows(1.0, [NAN, NAN, -1.0], **tensors)) for tensors in (given, plain)
    ]
    assert losses[0] == losses[1] > 0.0


def _distillation(config: ActorConfig, trajectory: TensorDict) -> float:
    advantages(config, trajectory)
    return stats_tracker.export_all()["ppo_actor/update/loss/distillation"]


def advantages(config: ActorConfig, *trajectories: TensorDict) -> list[float]:
    """What the loss multiplies, by the gradient-free record of one update."""
    actor = Actor(tiny_model(), config, total_steps=1, temperature=1.0)
    update = actor.update(Batch.from_trajectories(list(trajectories)))
    assert update.num_skipped == 0
    result: list[float] = update.tokens.advantages.tolist()
    return result
