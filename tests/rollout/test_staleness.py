from __future__ import annotations

import pytest

from agent_rl.rollout.lane import Counts, Finished, Lane
from agent_rl.rollout.staleness import Limits


@pytest.mark.parametrize(
    ("staleness", "batch", "version", "accepted", "running", "expected"),
    [
        (2, 4, 0, 0, 0, 12),
        (2, 4, 1, 4, 6, 6),
        (0, 4, 0, 0, 0, 4),
        (0, 4, 0, 3, 1, 0),
        (0, 4, 1, 4, 0, 4),
        (2, 8, 50, 400, 0, 24),
        (0, 4, 0, 8, 0, -4),
    ],
)
def test_staleness_bounds_the_capacity(
    staleness, batch, version, accepted, running, expected
) -> None:
    """case B128: 24 and not 424 after a restart at version 50."""
    limits = Limits(max_concurrent=1000, batch_size=batch, max_staleness=staleness)
    assert limits.capacity(version=version, accepted=accepted, running=running) == expected


def test_concurrency_bounds_it_too() -> None:
    limits = Limits(max_concurrent=8, batch_size=8, max_staleness=2)
    assert limits.capacity(version=0, accepted=0, running=6) == 2


def test_evaluation_knows_concurrency_only() -> None:
    assert Limits(max_concurrent=8).capacity(version=0, accepted=10**6, running=3) == 5


def test_bound_is_for_the_whole_run_not_for_each_worker() -> None:
    """case B129: 24 in total."""
    limits = Limits(max_concurrent=10**6, batch_size=8, max_staleness=2)
    assert limits.capacity(version=0, accepted=0, running=0) == 24


def test_a_lane_that_starts_at_version_50_counts_the_batches_before(submission) -> None:
    """case B128"""
    limits = Limits(max_concurrent=1000, batch_size=8, max_staleness=2)
    lane = Lane(limits=limits, counts=Counts())
    for number in range(100):
        lane.add(submission(number))
    assert len(lane.start(50)) == 24
    assert lane.start(50) == []
    for found in list(lane.running.values())[:8]:
        lane.end(Finished(submission=found, status="accepted"))
    assert lane.start(50) == []
    assert len(lane.start(51)) == 8
    assert lane.counts == Counts(submitted=100, waiting=68, running=24, accepted=8)
