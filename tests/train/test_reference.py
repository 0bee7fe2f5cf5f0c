"""Reference: frozen log-probs, and which model a run takes for it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from tiny_batches import groups, tiny_model, trajectory

from agent_rl import PPOConfig, load_config, stats_tracker
from agent_rl.config import ActorConfig, OptimizerConfig, RefConfig
from agent_rl.engine.loading import load_model
from agent_rl.errors import ConfigError
from agent_rl.train import setup
from agent_rl.train.actor import Actor
from agent_rl.train.batch import Batch
from agent_rl.train.reference import Reference
from agent_rl.train.team import Team

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CPU = torch.device("cpu")


def test_logprobs_of_the_frozen_model() -> None:
    """Of the trained tokens, at the run's temperature; it asks for no gradient."""
    batch = Batch.from_trajectories([trajectory([[1, 2, 3]], [[0, 0, 1]], [1.0])])
    model = tiny_model(seed=7)
    got = Reference(model, RefConfig(), temperature=0.5).logprobs(batch)
    with torch.no_grad():
        logits = tiny_model(seed=7)(input_ids=torch.tensor([[1, 2]])).logits[0, -1]
    expected = float((logits / 0.5).log_softmax(-1)[3])
    assert got.tolist() == pytest.approx([0.0, 0.0, expected])
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_kl_in_the_loss_pulls_back_to_the_reference() -> None:
    """With no reward to speak of, the policy comes closer to the reference with each update."""
    config = ActorConfig(
        reward_norm=None, reward_scaling=0.0, kl_loss_coef=1.0, optimizer=OptimizerConfig(lr=0.01)
    )
    reference = Reference(tiny_model(seed=7), RefConfig(), temperature=1.0)
    actor = Actor(tiny_model(), config, total_steps=20, temperature=1.0, reference=reference)
    distances = []
    for _ in range(20):
        actor.update(Batch.from_trajectories(groups()))
        distances.append(stats_tracker.export_all()["ppo_actor/update/loss/reference_kl"])
    assert distances[-1] < 0.25 * distances[0]


def test_kl_terms_need_a_reference() -> None:
    with pytest.raises(ValueError, match="need a reference"):
        Actor(tiny_model(), ActorConfig(kl_ctl=0.1), total_steps=1, temperature=1.0)


def config_of(folder: Path, *overrides: str) -> PPOConfig:
    return load_config(None, [f"tokenizer_path={folder}", "actor.device=cpu", *overrides])


def test_a_run_compares_with_where_it_started(
    tiny_model_dir: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Moving the actor leaves its reference, a second copy, where both began."""
    model = load_model(tiny_model_dir, device=CPU, dtype=torch.float32)
    config = config_of(tiny_model_dir, "actor.kl_ctl=0.1")
    actor = setup.make_actor(config, model, tokenizer, total_steps=1, team=Team())
    batch = Batch.from_trajectories([trajectory([[1, 2, 3]], [[0, 1, 1]], [1.0])])
    assert actor._reference is not None
    before = actor._reference.logprobs(batch)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    assert torch.equal(actor._reference.logprobs(batch), before)


def test_a_reference_without_a_use_is_refused(
    tiny_model_dir: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    model = load_model(tiny_model_dir, device=CPU, dtype=torch.float32)
    with pytest.raises(ConfigError, match="ref has no effect"):
        config = config_of(tiny_model_dir, "ref={}")
        setup.make_actor(config, model, tokenizer, total_steps=1, team=Team())
