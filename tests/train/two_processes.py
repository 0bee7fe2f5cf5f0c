"""Run by torchrun in several processes: an update of the team against that of one process alone.

The first process prints, for each case, the largest difference of any weight after two updates,
relative to the largest move of a weight, and that of every metric.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from typing import Any

import torch
from test_actor import OPTIONS, SGD_LIKE, taught_groups
from tiny_batches import groups, tiny_model, trajectory

from agent_rl import stats_tracker
from agent_rl.config import ActorConfig, CriticConfig, RefConfig
from agent_rl.train.actor import Actor
from agent_rl.train.batch import Batch
from agent_rl.train.critic import Critic
from agent_rl.train.reference import Reference
from agent_rl.train.sharding import whole_weights
from agent_rl.train.team import Team
from agent_rl.types import TensorDict


@dataclass(frozen=True, kw_only=True)
class Case:
    trajectories: list[TensorDict]
    actor: dict[str, Any] = field(default_factory=dict)
    critic: dict[str, Any] | None = None


def cases() -> dict[str, Case]:
    lonely = trajectory([[1, 2, 3, 4], [1, 2, 5]], [[0, 0, 1, 1], [0, 0, 1]], [1.0, 0.0], (2,))
    lonely["rollout_group"] = type(lonely["rollout_group"])(row_counts=(2,), rewards=(0.5,))
    masked = trajectory([[1, 2, 3], [1, 2, 4]], [[0, 0, 0], [0, 0, 0]], [1.0, 0.0])
    batch_norm = {"mean_level": "batch", "std_level": "batch"}
    uneven = groups()[:2]
    by_option = {
        f"option {i}": Case(trajectories=taught_groups(), actor=options)
        for i, options in enumerate(OPTIONS)
    }
    return by_option | {
        "small micro-batches": Case(trajectories=groups(), actor={"max_tokens_per_mb": 9}),
        "two minibatches": Case(trajectories=groups(), actor={"ppo_n_minibatches": 2}),
        "batch norms": Case(
            trajectories=uneven,
            actor={"reward_norm": batch_norm | {"mean_leave1out": True}, "adv_norm": batch_norm},
        ),
        "one rollout for two processes": Case(
            trajectories=[lonely], actor={"reward_norm": None, "reward_scaling": 2.0}
        ),
        "nothing to train": Case(trajectories=[masked], actor={"reward_norm": None}),
        "critic": Case(trajectories=groups(), critic={"trunk": "separate"}),
        "shared critic": Case(trajectories=groups(), critic={"trunk": "shared"}),
    }


def updated(case: Case, team: Team) -> tuple[torch.Tensor, dict[str, float]]:
    """All weights after two updates, and the metrics of both."""
    stats_tracker.export_all()
    base = ActorConfig(optimizer=SGD_LIKE, tree_packing="auto").model_dump()
    config = ActorConfig.model_validate(base | case.actor)
    model, own = tiny_model(), tiny_model(seed=3)
    critic = None
    if case.critic is not None:
        critic_config = CriticConfig.model_validate(case.critic)
        trunk = model if critic_config.trunk == "shared" else own
        critic = Critic(trunk, critic_config, total_steps=10, team=team)
    reference = Reference(tiny_model(seed=5), RefConfig(), temperature=0.7, team=team)
    actor = Actor(
        model,
        config,
        total_steps=10,
        temperature=0.7,
        reference=reference,
        critic=critic,
        team=team,
    )
    for _ in range(2):
        actor.update(Batch.from_trajectories(case.trajectories))
    parts = [model] if critic is None else [model, own, critic.head]
    weights = [value.flatten() for part in parts for _, value in whole_weights(part)]
    return torch.cat(weights).detach(), stats_tracker.export_all()


def compare(case: Case, team: Team) -> dict[str, float]:
    (expected, alone), (got, together) = updated(case, Team()), updated(case, team)
    start = torch.cat([value.flatten() for _, value in whole_weights(tiny_model())])
    moved = float((expected[: len(start)] - start).abs().max())
    # These depend on how fast a process is, and on how many rows it has to share prefixes among.
    marks = ("time", "per_s", "num_micro", "computed", "tree_saving", "mfu")
    own_time = {key for key in alone if any(mark in key for mark in marks)}
    worst = max(
        abs(alone[key] - together[key]) / max(1.0, abs(alone[key]))
        for key in alone.keys() & together.keys() - own_time
    )
    assert alone.keys() - own_time == together.keys() - own_time, alone.keys() ^ together.keys()
    return {
        "moved": moved,
        "weights": float((got - expected).abs().max()) / (moved or 1.0),
        "metrics": worst,
    }


if __name__ == "__main__":
    team = Team.join("cpu")
    results = {name: compare(case, team) for name, case in cases().items()}
    if team.is_first:
        json.dump(results, sys.stdout)
    team.leave()
