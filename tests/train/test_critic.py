"""Critic: where values are read, that they learn, and that packing changes nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_batches import groups, tiny_model, trajectory

from agent_rl import stats_tracker
from agent_rl.config import ActorConfig, CriticConfig
from agent_rl.errors import CheckpointError
from agent_rl.train.actor import Actor
from agent_rl.train.batch import Batch
from agent_rl.train.checkpoint import load_state, save_state
from agent_rl.train.critic import Critic

FAST = CriticConfig.model_validate({"optimizer": {"lr": 0.02}, "eps_clip": 100.0})
SMOOTH = {"optimizer": {"lr": 0.01, "eps": 1.0}, "eps_clip": 100.0}


def parameters(critic: Critic) -> torch.Tensor:
    state = critic.state_dict()
    return torch.cat(
        [v.flatten().double() for part in ("trunk", "head") for v in state[part].values()]
    )


def randomized(config: CriticConfig) -> Critic:
    """A critic whose head is not 0, so that the trunk gets a gradient in the first step."""
    torch.manual_seed(3)
    critic = Critic(tiny_model(), config, total_steps=10)
    torch.nn.init.normal_(critic.head.weight)
    return critic


def test_a_value_stands_before_its_token_and_the_last_one_after() -> None:
    """Row 1 2 3: before 2 the trunk saw 1; after 3 it saw all. Prefixes are shared."""
    critic = randomized(FAST)
    batch = Batch.from_trajectories([trajectory([[1, 2, 3], [1, 4]], [[0, 1, 1], [0, 1]], [1, 0])])
    values = critic.values(batch)

    def alone(*ids: int) -> float:
        with torch.no_grad():
            hidden = tiny_model().model(input_ids=torch.tensor([ids])).last_hidden_state[0]
            return float(critic.head.values(hidden)[-1])

    assert values.before.tolist() == pytest.approx([0, alone(1), alone(1, 2), 0, alone(1)])
    expected = [0, alone(1, 2), alone(1, 2, 3), 0, alone(1, 4)]
    assert values.after.tolist() == pytest.approx(expected)


def test_a_new_critic_moves_no_advantage() -> None:
    values = Critic(tiny_model(), FAST, total_steps=1).values(Batch.from_trajectories(groups()))
    assert not values.before.any() and not values.after.any()


def test_values_learn_returns() -> None:
    """Token 2 leads to return 1 and token 4 to 0: after 60 updates most of it is explained."""
    rows = trajectory([[1, 2, 3], [1, 4, 3]], [[0, 0, 1], [0, 0, 1]], [1.0, 0.0])
    batch = Batch.from_trajectories([rows])
    returns = torch.tensor([0.0, 0.0, 1.0, 0.0, 0.0, 0.0], dtype=torch.float64)
    critic = Critic(tiny_model(), FAST, total_steps=60)
    explained = []
    for _ in range(60):
        critic.update(batch, critic.values(batch), returns)
        explained.append(stats_tracker.export_all()["ppo_critic/explained_variance"])
    assert explained[0] == pytest.approx(0.0)
    assert explained[-1] > 0.9


@pytest.mark.parametrize("max_tokens_per_mb", [1, 20])
def test_packing_changes_nothing(max_tokens_per_mb: int) -> None:
    """Case B110: one micro-batch or many, the same weights afterwards."""
    batch = Batch.from_trajectories(groups())
    returns = torch.linspace(-1.0, 1.0, batch.num_tokens, dtype=torch.float64) * batch.loss_mask
    moved = []
    for size in (4096, max_tokens_per_mb):
        config = CriticConfig.model_validate(SMOOTH | {"max_tokens_per_mb": size})
        critic = randomized(config)
        start = parameters(critic)
        critic.update(batch, critic.values(batch), returns)
        moved.append(parameters(critic) - start)
    assert moved[0].abs().max() > 1e-4
    torch.testing.assert_close(moved[1], moved[0], atol=1e-9, rtol=1e-5)


def test_state_continues_exactly(tmp_path: Path) -> None:
    config = ActorConfig(reward_norm=None)
    actor, critic = with_critic(config, FAST)
    actor.update(Batch.from_trajectories(groups(1)))
    resumed, resumed_critic = with_critic(config, FAST)
    resumed.load_state_dict(load_state(save_state(actor.state_dict(), tmp_path / "a.safetensors")))
    for one in (actor, resumed):
        one.update(Batch.from_trajectories(groups(2)))
    assert torch.equal(parameters(critic), parameters(resumed_critic))


@pytest.mark.parametrize(
    ("saved", "now", "message"),
    [
        (None, CriticConfig(), "its critic is absent, that of the config is separate"),
        (CriticConfig(), CriticConfig(trunk="shared"), "is separate, .* is shared"),
        (CriticConfig(trunk="shared"), None, "is shared, .* is absent"),
    ],
)
def test_the_state_of_another_kind_of_critic_is_refused(
    saved: CriticConfig | None, now: CriticConfig | None, message: str
) -> None:
    def actor(critic: CriticConfig | None) -> Actor:
        if critic is None:
            return Actor(tiny_model(), ActorConfig(), total_steps=10, temperature=1.0)
        return with_critic(ActorConfig(), critic)[0]

    with pytest.raises(CheckpointError, match=message):
        actor(now).load_state_dict(actor(saved).state_dict())


def with_critic(config: ActorConfig, critic_config: CriticConfig) -> tuple[Actor, Critic]:
    model = tiny_model()
    trunk = model if critic_config.trunk == "shared" else tiny_model(seed=1)
    critic = Critic(trunk, critic_config, total_steps=10)
    return Actor(model, config, total_steps=10, temperature=1.0, critic=critic), critic


@pytest.mark.parametrize("trunk", ["separate", "shared"])
def test_an_actor_and_its_critic_learn_together(trunk: str) -> None:
    """The value loss of the same batch falls, in a model of its own and in the actor's."""
    own = {"optimizer": {"lr": 0.02}} if trunk == "separate" else {"loss_coef": 1.0}
    critic_config = CriticConfig.model_validate({"trunk": trunk, "eps_clip": 100.0, **own})
    config = ActorConfig.model_validate({"reward_norm": None, "optimizer": {"lr": 0.02}})
    actor, _ = with_critic(config, critic_config)
    key = "ppo_critic/value_loss" if trunk == "separate" else "ppo_actor/update/loss/value"
    losses = []
    for _ in range(8):
        actor.update(Batch.from_trajectories(groups()))
        losses.append(stats_tracker.export_all()[key])
    assert losses[-1] < 0.5 * losses[0]
