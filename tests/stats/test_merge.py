"""The controller's merge of workers' exports, by worked numbers."""

from __future__ import annotations

import math

import pytest

from agent_rl.stats.merge import merge_exports


def test_scalars_are_weighted_by_their_counts() -> None:
    """0.5 (count 1) and 1.0 (count 3) give 0.875, not 0.75."""
    a = {"r": 0.5, "r__count": 1}
    b = {"r": 1.0, "r__count": 3}
    assert merge_exports([a, b]) == {"r": 0.875}


def test_a_worker_without_the_key_contributes_nothing() -> None:
    a = {"r": 0.5, "r__count": 1, "only_a": 2.0, "only_a__count": 1}
    b = {"r": math.nan, "r__count": 0, "none": math.nan, "none__count": 0}
    assert merge_exports([a, {}, b]) == {"only_a": 2.0, "r": 0.5}
    assert merge_exports([]) == {}


def test_distributions_keep_mean_and_extrema_when_their_count_is_there() -> None:
    a = {"x/avg": 1.0, "x/min": 0.0, "x/max": 2.0, "x__count": 1}
    b = {"x/avg": 4.0, "x/min": 3.0, "x/max": 9.0, "x__count": 2}
    assert merge_exports([a, b]) == {"x/avg": 3.0, "x/max": 9.0, "x/min": 0.0}
    empty = {"x/avg": 0.0, "x/min": -9.0, "x/max": 99.0, "x__count": 0}
    assert merge_exports([a, empty]) == {"x/avg": 1.0, "x/max": 2.0, "x/min": 0.0}


def test_distributions_without_a_count_are_dropped() -> None:
    a = {"loss/avg": 0.5, "n_tokens": 10}
    b = {"loss/avg": 0.9, "loss/min": 0.1, "n_tokens": 30}
    assert merge_exports([a, b]) == {}


def test_a_scalar_may_be_called_min() -> None:
    a = {"x/min": 1.0, "x/min__count": 1}
    b = {"x/min": 5.0, "x/min__count": 3}
    assert merge_exports([a, b]) == {"x/min": 4.0}


@pytest.mark.parametrize("has_count", [True, False])
def test_judge_counts_are_added(has_count: bool) -> None:
    """Workers with 2 and 8 observations and one hit each: count 2, rate 0.2, 10 observed."""
    workers = []
    for observed in (2, 8):
        worker = {
            "prm_metric/hit/count": 1,
            "prm_metric/hit/sum": 1.5,
            "prm_metric/hit/observed_count": observed,
            "prm_metric/hit/rate": 1 / observed,
        }
        if has_count:
            worker["prm_metric/hit/rate__count"] = observed
        workers.append(worker)
    assert merge_exports(workers) == {
        "prm_metric/hit/count": 2,
        "prm_metric/hit/observed_count": 10,
        "prm_metric/hit/rate": pytest.approx(0.2),
        "prm_metric/hit/sum": 3.0,
    }


def test_rewards_by_episode_not_by_worker() -> None:
    """Case B162: task A four times 1, task B once 0: 0.8 for an episode."""
    a = {"reward": 1.0, "reward__count": 4}
    b = {"reward": 0.0, "reward__count": 1}
    assert merge_exports([a, b]) == {"reward": 0.8}
