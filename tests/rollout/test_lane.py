from __future__ import annotations

from agent_rl.errors import EpisodeError
from agent_rl.rollout.lane import Counts, Finished, Lane
from agent_rl.rollout.staleness import Limits


def lane(submission, count: int, *, keeps_all: bool = False) -> Lane:
    made = Lane(limits=Limits(max_concurrent=8), counts=Counts(), keeps_all=keeps_all)
    for number in range(count):
        made.add(submission(number))
    return made


def end(found: Lane, number: int, status: str, reason: str = "", error=None) -> None:
    trajectory = {} if status == "accepted" else None
    found.end(
        Finished(
            submission=found.running[number],
            status=status,
            trajectory=trajectory,
            reason=reason,
            error=error,
        )
    )


def total(counts: Counts) -> int:
    return counts.waiting + counts.running + counts.accepted + counts.rejected + counts.failed


def test_every_group_is_in_exactly_one_place(submission) -> None:
    found = lane(submission, 10)
    assert len(found.start(0)) == 8
    for number, status in enumerate(["accepted", "rejected", "failed"]):
        end(found, number, status)
        assert total(found.counts) == found.counts.submitted == 10
    assert found.counts == Counts(
        submitted=10, waiting=2, running=5, accepted=1, rejected=1, failed=1
    )
    assert [s.number for s in found.unconsumed()] == [0, 3, 4, 5, 6, 7, 8, 9]
    found.drop_waiting()
    assert total(found.counts) == found.counts.submitted == 8


def test_oldest_first_by_creation_not_by_end(submission) -> None:
    found = lane(submission, 4)
    found.start(0)
    for number in (3, 1, 0, 2):
        end(found, number, "accepted")
    assert [done.submission.number for done in found.take(3)] == [0, 1, 2]
    assert found.ended == 1
    assert [done.submission.number for done in found.take(3)] == [3]


def test_rejected_groups_are_handed_over_only_where_asked(submission) -> None:
    for keeps_all, expected in ((False, []), (True, [0])):
        found = lane(submission, 1, keeps_all=keeps_all)
        found.start(0)
        end(found, 0, "rejected")
        assert [done.submission.number for done in found.finished] == expected
        assert found.is_stuck(0)


def test_reasons_since_the_last_acceptance(submission) -> None:
    found, error = lane(submission, 5), EpisodeError("x")
    found.start(0)
    end(found, 0, "rejected", "filter")
    end(found, 1, "accepted")
    assert (found.fruitless, found.explain()) == (0, "")
    end(found, 2, "failed", "agent", error)
    end(found, 3, "rejected", "filter")
    end(found, 4, "rejected", "filter")
    assert (found.fruitless, found.explain()) == (3, "2 x filter, 1 x agent")
    assert found.last_error is error
