"""From rewards to advantages, by hand-worked numbers."""

from __future__ import annotations

import pytest
import torch
from tiny_batches import trajectory

from agent_rl import RolloutEngine, RolloutWorkflow, ScriptedEngine
from agent_rl.config import ActorConfig, NormConfig
from agent_rl.engine.base import InferenceEngine
from agent_rl.errors import WorkflowContractError
from agent_rl.train.batch import Batch
from agent_rl.train.estimator import AdvantageEstimator, Values
from agent_rl.types import JsonObject, RolloutGroup, TensorDict


def advantages_of(config: ActorConfig, trajectories: list[TensorDict]) -> list[float]:
    estimate = AdvantageEstimator(config).estimate(Batch.from_trajectories(trajectories))
    result: list[float] = estimate.advantages.tolist()
    return result


def test_grpo_is_the_default() -> None:
    """Rewards 1 and 0 of one prompt: +-0.5 / (0.7071 + 1e-5) on the trained tokens."""
    got = advantages_of(
        ActorConfig(), [trajectory([[1, 2, 3], [1, 4]], [[0, 1, 1], [0, 1]], [1, 0])]
    )
    assert got == pytest.approx([0, 0.70710, 0.70710, 0, -0.70710], abs=1e-4)


def test_overlong_penalty_bias_scale_and_clip() -> None:
    """Rewards 1, 2 | 4, lengths 3, 1 | 2, references 1 and 4: 2, 6 | 8 around 6 with std 2."""
    rows = trajectory(
        [[1, 2, 3, 4], [1, 2], [1, 2, 3]], [[0, 1, 1, 1], [0, 1], [0, 1, 1]], [1.0, 2.0, 4.0]
    )
    rows["rollout_group"] = RolloutGroup(row_counts=(2, 1), rewards=(1.0, 4.0))
    config = ActorConfig(
        overlong_reward_penalty=True,
        overlong_tokens=2,
        overlong_penalty_factor=1.0,
        max_new_tokens=3,
        reward_bias=1.0,
        reward_scaling=2.0,
        reward_clip=8.0,
        reward_norm=NormConfig(mean_level="group", std_level="group", std_unbiased=False),
    )
    got = advantages_of(config, [rows])
    assert got == pytest.approx([0, -2, -2, -2, 0, 0, 0, 1, 1], abs=1e-4)


def test_reward_clip_limits_the_reference() -> None:
    """Clip 1, reference 3, rows 1 and 3: everything becomes 1 and nothing is left."""
    rows = trajectory([[1, 2], [1, 3]], [[0, 1], [0, 1]], [1.0, 3.0])
    rows["rollout_group"] = RolloutGroup(row_counts=(2,), rewards=(3.0,))
    assert advantages_of(ActorConfig(reward_clip=1.0), [rows]) == [0.0] * 4


@pytest.mark.parametrize(("rewards", "lengths"), [((1.0, 1.0), (3, 1)), ((1.0, 2.0), (1, 3))])
def test_a_penalty_hides_no_ambiguity(
    rewards: tuple[float, float], lengths: tuple[int, int]
) -> None:
    """Equal rows that a penalty makes differ, and differing rows it makes equal: both refused."""
    rows = trajectory(
        [[1] + [2] * n for n in lengths], [[0] + [1] * n for n in lengths], rewards, row_counts=(2,)
    )
    config = ActorConfig(
        overlong_reward_penalty=True,
        overlong_tokens=2,
        overlong_penalty_factor=1.0,
        max_new_tokens=3,
    )
    with pytest.raises(WorkflowContractError, match="explicit rollout_reward"):
        advantages_of(config, [rows])


def test_a_reward_is_not_lost_on_tool_output() -> None:
    """Case B88: rows that end in, or go through, the output of a tool; gamma .5, then lambda .9."""
    rows = trajectory([[1, 2, 3, 4, 5]], [[0, 1, 1, 0, 0]], [1.0])
    assert advantages_of(ActorConfig(reward_norm=None, gamma=0.5), [rows]) == [0, 0.5, 1, 0, 0]
    rows = trajectory([[1, 2, 3, 4, 5, 6]], [[0, 1, 1, 0, 0, 1]], [1.0])
    got = advantages_of(ActorConfig(reward_norm=None, gae_lambda=0.9), [rows])
    assert got == pytest.approx([0, 0.81, 0.9, 0, 0, 1])


def test_a_failed_episode_shifts_no_other_group() -> None:
    """Case B92: of three prompts with three episodes each, one of the second fails."""

    class Graded(RolloutWorkflow):
        async def arun_episode(self, engine: InferenceEngine, data: JsonObject) -> TensorDict:
            reward = rewards[data["prompt"]].pop(0)
            if reward is None:
                raise ConnectionError("refused")
            rows = trajectory([[1, 2]], [[0, 1]], [reward])
            del rows["rollout_group"]
            return rows

    rewards = [[1.0, 0, 0], [1.0, None, 0], [0, 1.0, 1.0]]
    data: list[JsonObject] = [{"prompt": prompt} for prompt in range(3)]
    with RolloutEngine(ScriptedEngine([])) as rollout:
        found = rollout.rollout_batch(data, Graded(), group_size=3)
    groups = [group for group in found if group is not None]
    config = ActorConfig(
        reward_norm=NormConfig(mean_level="group", std_level="group", std_unbiased=False)
    )
    assert advantages_of(config, groups)[1::2] == pytest.approx(
        [1.41418, -0.70709, -0.70709, 0.99998, -0.99998, -1.41418, 0.70709, 0.70709], abs=1e-4
    )


def test_a_group_of_one_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    """Case B94: group statistics over one episode learn nothing; without them the reward counts."""
    rows = [trajectory([[1, 2]], [[0, 1]], [1.0])]
    assert advantages_of(ActorConfig(), rows) == [0.0, 0.0]
    assert "raise rollout.group_size" in caplog.text
    assert advantages_of(ActorConfig(reward_norm=None), rows) == [0.0, 1.0]


def test_discount_over_trained_tokens() -> None:
    rows = [trajectory([[1, 2, 3, 4]], [[0, 1, 0, 1]], [1.0])]
    config = ActorConfig(reward_norm=None, gamma=0.5)
    assert advantages_of(config, rows) == [0.0, 0.5, 0.0, 1.0]


def singles(*rewards: float, **others: torch.Tensor) -> list[TensorDict]:
    """Groups of one episode, one trained token each."""
    return [{**trajectory([[1, 2]], [[0, 1]], [reward]), **others} for reward in rewards]


def test_running_mean_knows_earlier_steps_only() -> None:
    """Case B94: single episodes learn against .5; rewards 1 0, then 1 1: mean .5 -> .5 .5.

    The mean becomes .9 * .5 + .1 * 1 = .55, which the state carries over.
    """
    config = ActorConfig(reward_norm=NormConfig(mean_level="running", std_level=None))
    estimator = AdvantageEstimator(config)

    def step(estimator: AdvantageEstimator, *rewards: float) -> list[float]:
        batch = Batch.from_trajectories(singles(*rewards))
        return estimator.estimate(batch).advantages[batch.loss_mask].tolist()

    assert step(estimator, 1.0, 0.0) == pytest.approx([0.5, -0.5])
    assert step(estimator, 1.0, 1.0) == pytest.approx([0.5, 0.5])
    resumed = AdvantageEstimator(config)
    resumed.load_state_dict(estimator.state_dict())
    assert step(resumed, 1.0) == pytest.approx([0.45])


def test_opo_weighs_the_baseline_by_length() -> None:
    """Rewards 1 and 0 of 3 tokens and 1: baseline .75; a rollout is as long as all its rows."""
    config = ActorConfig(reward_norm=NormConfig(mean_level="length", std_level=None))
    rows = trajectory([[1, 2, 3, 4], [1, 2]], [[0, 1, 1, 1], [0, 1]], [1.0, 0.0])
    assert advantages_of(config, [rows]) == pytest.approx([0, 0.25, 0.25, 0.25, 0, -0.75])
    joined = trajectory(
        [[1, 2, 3], [1, 2], [1, 2]],
        [[0, 1, 1], [0, 1], [0, 1]],
        [1.0, 1.0, 0.0],
        row_counts=(2, 1),
    )
    assert advantages_of(config, [joined]) == pytest.approx([0, 0.25, 0.25, 0, 0.25, 0, -0.75])


def test_remax_compares_with_a_given_reward() -> None:
    """Reward 1 and baseline .25; without the key the error names it."""
    config = ActorConfig(reward_norm=NormConfig(mean_level="given", std_level=None))
    rows = singles(1.0, baseline_rewards=torch.tensor([0.25]))
    assert advantages_of(config, rows) == pytest.approx([0.0, 0.75])
    with pytest.raises(WorkflowContractError, match="baseline_rewards"):
        advantages_of(config, singles(1.0))


METHODS = {
    "REINFORCE": ({"reward_norm": None}, [1.0, 0.0, 1.0, 1.0]),
    "GRPO": ({}, [0.70710, -0.70710, 0.0, 0.0]),
    "Dr.GRPO": (
        {"reward_norm": {"mean_level": "group", "std_level": None}},
        [0.5, -0.5, 0.0, 0.0],
    ),
    "RLOO": (
        {"reward_norm": {"mean_level": "group", "std_level": None, "mean_leave1out": True}},
        [1.0, -1.0, 0.0, 0.0],
    ),
    # rewards 1 0 1 1 around .75 with std .5
    "REINFORCE++": ({"reward_norm": None, "adv_norm": {}}, [0.5, -1.5, 0.5, 0.5]),
    # .5 -.5 0 0 around 0 with std .40825
    "REINFORCE++-baseline": (
        {"reward_norm": {"mean_level": "group", "std_level": None}, "adv_norm": {}},
        [1.22471, -1.22471, 0.0, 0.0],
    ),
}


@pytest.mark.parametrize("name", METHODS)
def test_methods_of_the_guide(name: str) -> None:
    """Groups with rewards 1 0 and 1 1, one trained token each (docs/guides/training.md)."""
    keys, expected = METHODS[name]
    pairs = [
        trajectory([[1, 2], [1, 3]], [[0, 1], [0, 1]], rewards)
        for rewards in ([1.0, 0.0], [1.0, 1.0])
    ]
    got = advantages_of(ActorConfig.model_validate(keys), pairs)
    assert got[1::2] == pytest.approx(expected, abs=1e-4)


def test_normalised_twice_is_said_and_done_by_token(caplog: pytest.LogCaptureFixture) -> None:
    """Case B101: +1 on one token and -1 on three: mean -.5, std .8660 -> 1.732 and -.577."""
    config = ActorConfig.model_validate(
        {
            "reward_norm": {"mean_level": "group", "std_level": "group", "std_unbiased": False},
            "adv_norm": {"std_unbiased": False},
        }
    )
    rows = trajectory([[1, 2], [1, 2, 3, 4]], [[0, 1], [0, 1, 1, 1]], [1.0, 0.0])
    with caplog.at_level("INFO"):
        got = advantages_of(config, [rows])
    assert [got[1], *got[3:]] == pytest.approx([1.732, -0.577, -0.577, -0.577], abs=1e-3)
    assert "are both set" in caplog.text
    caplog.clear()
    with caplog.at_level("INFO"):
        advantages_of(ActorConfig(), [rows])
    assert "are both set" not in caplog.text


@pytest.mark.parametrize("suppressed", [1.0, 100.0])
def test_a_truncated_row_moves_no_baseline(suppressed: float) -> None:
    """Case B99: rewards 1 and 1 or 100, the second row has no end: the first has advantage 0."""
    config = ActorConfig(
        truncated_rows="zero",
        reward_clip=1000.0,
        reward_norm=NormConfig(mean_level="batch", std_level=None),
    )
    batch = Batch.from_trajectories([trajectory([[1, 2], [1, 3]], [[0, 1]] * 2, [1.0, suppressed])])
    is_truncated = batch.truncated(end_ids=(2,))
    assert is_truncated.tolist() == [False, True]
    estimate = AdvantageEstimator(config).estimate(batch, is_truncated=is_truncated)
    assert estimate.advantages.tolist() == [0.0] * 4


def test_given_truncation_wins_over_end_tokens() -> None:
    rows = {**trajectory([[1, 2], [1, 3]], [[0, 1]] * 2, [1, 0]), "is_truncated": torch.ones(2)}
    assert Batch.from_trajectories([rows]).truncated(end_ids=(2,)).tolist() == [True, True]


def test_a_critic_stands_in_for_what_a_truncated_row_misses() -> None:
    """gamma 1, lambda 1, values .5 .25, after the last token .75: A .75 - .5 and .75 - .25.

    Not truncated, the reward 1 counts and nothing follows: .5 and .75. Returns are A + V.
    """
    rows = [trajectory([[1, 2, 3]], [[0, 1, 1]], [1.0])]
    batch = Batch.from_trajectories(rows)
    values = Values(before=torch.tensor([9.0, 0.5, 0.25]), after=torch.tensor([9.0, 9.0, 0.75]))
    config = ActorConfig(reward_norm=None, truncated_rows="zero")
    for is_truncated, expected in ((True, [0.0, 0.25, 0.5]), (False, [0.0, 0.5, 0.75])):
        estimate = AdvantageEstimator(config).estimate(
            batch, is_truncated=torch.tensor([is_truncated]), values=values
        )
        assert estimate.advantages.tolist() == pytest.approx(expected)
        returns = [0.0, 0.75, 0.75] if is_truncated else [0.0, 1.0, 1.0]
        assert estimate.returns.tolist() == pytest.approx(returns)


def test_kl_rewards_join_the_reward() -> None:
    """-.1 and -.2 of KL, reward 1 at the end, gamma 1: .7 and .8."""
    batch = Batch.from_trajectories([trajectory([[1, 2, 3]], [[0, 1, 1]], [1.0])])
    estimate = AdvantageEstimator(ActorConfig(reward_norm=None)).estimate(
        batch, kl_rewards=torch.tensor([float("nan"), -0.1, -0.2])
    )
    assert estimate.advantages.tolist() == pytest.approx([0.0, 0.7, 0.8])


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"reward_norm": {"mean_level": "running", "mean_leave1out": True}}, "batch or group"),
        ({"adv_norm": {"mean_level": "length"}}, "is for reward_norm"),
    ],
)
def test_baselines_that_make_no_sense_are_refused(keys: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ActorConfig.model_validate(keys)
