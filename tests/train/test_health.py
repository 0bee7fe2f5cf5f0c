"""Health in plain words: what the line says, and when a warning comes."""

from __future__ import annotations

import pytest

from agent_rl.train import health

STATS = {
    "ppo_actor/task_reward/avg": 0.5,
    "ppo_actor/group_reward_std/avg": 0.25,
    "eval-rollout/reward": 0.625,
    "ppo_actor/n_groups": 8.0,
    "ppo_actor/zero_advantage_groups/avg": 0.125,
    "ppo_actor/n_valid_tokens": 1200.0,
    "ppo_actor/version_stats/staleness_share_0/avg": 0.75,
    "ppo_actor/version_stats/staleness_share_1/avg": 0.0,
    "ppo_actor/version_stats/staleness_share_4_or_more/avg": 0.25,
    "ppo_actor/update/entropy/avg": 1.25,
    "ppo_actor/update/clip_ratio/avg": 0.021,
    "ppo_actor/update/behave_logp_error/avg": 0.004,
    "ppo_actor/update/behave_logp_error/max": 0.3,
    "ppo_actor/update/behave_kl/avg": 0.001,
    "ppo_actor/update/n_computed_tokens": 2400.0,
    "ppo_actor/update/tree_saving": 0.4,
    "ppo_actor/update/trained_tokens_per_s": 60.0,
    "ppo_actor/update/advantage_max": 1.5,
    "ppo_actor/update/update_successful": 1.0,
    "timeperf/rollout": 30.0,
    "timeperf/train_step": 10.0,
    "timeperf/train_step/actor": 9.0,
}


def test_the_line_of_a_step() -> None:
    """40 s are 30 of rollout and 10 of training; 1200 tokens in 40 s are 30 a second."""
    assert health.one_line(STATS, version=3) == (
        "reward 0.5, held out 0.625; 1 of 8 groups teach nothing; 40.0 s, 30 tokens/s; version 3"
    )
    evaluated = {**STATS, "timeperf/eval": 20.0}
    assert "; 60.0 s, 30 tokens/s; " in health.one_line(evaluated, version=3)
    assert health.one_line({}, version=1) == "version 1"


def test_the_words_above_the_table() -> None:
    assert health.describe(STATS) == (
        "reward 0.5, held out 0.625, std in a group 0.25; 1 of 8 groups teach nothing; "
        "entropy 1.25; 2.1% of ratios clipped; "
        "trainer and engine differ by 0.004 nats (max 0.3, KL 0.001); "
        "token age 0: 75%, 4+: 25%; "
        "1,200 tokens trained, 2,400 computed (40% saved), 60 trained/s; "
        "40.0 s: rollout 75%, train_step 25%"
    )


def test_what_was_not_measured_is_left_out() -> None:
    assert health.describe({}) == ""
    assert health.describe({"ppo_actor/update/entropy/avg": 1.0}) == "entropy 1"


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("ppo_actor/n_valid_tokens", 0.0, "no token of this batch is trained"),
        ("ppo_actor/update/advantage_max", 0.0, "raise rollout.group_size"),
        ("ppo_actor/update/update_successful", 0.5, "its step was skipped"),
        ("ppo_actor/update/behave_logp_error/avg", 0.31, "same weights and temperature"),
        ("ppo_actor/update/clip_ratio/avg", 0.51, "raise actor.eps_clip"),
        ("ppo_actor/no_eos_ratios/avg", 0.75, "do not end with an end token"),
    ],
)
def test_faults_say_what_to_do(key: str, value: float, said: str) -> None:
    assert health.find_faults(STATS) == []
    (fault,) = health.find_faults({**STATS, key: value})
    assert said in fault.text


def test_what_chance_may_do_is_said_once_it_lasts() -> None:
    """Three batches in a row; then not again until a batch was without it."""
    bad = {**STATS, "ppo_actor/no_eos_ratios/avg": 0.75}
    watch = health.FaultWatch()
    said = [len(watch.look(stats)) for stats in (bad, bad, STATS, bad, bad, bad, bad)]
    assert said == [0, 0, 0, 0, 0, 1, 0]


def test_a_fault_whose_figure_changes_is_the_same_fault() -> None:
    key = "ppo_actor/update/behave_logp_error/avg"
    watch = health.FaultWatch()
    assert [len(watch.look({**STATS, key: error})) for error in (0.4, 0.5, 0.1, 0.6)] == [
        1,
        0,
        0,
        1,
    ]


def test_what_was_said_before_the_first_step_is_not_said_again() -> None:
    futile = {**STATS, "ppo_actor/update/advantage_max": 0.0}
    watch = health.FaultWatch(known=[health.ZERO_ADVANTAGES])
    assert [watch.look(futile) for _ in range(4)] == [[], [], [], []]
