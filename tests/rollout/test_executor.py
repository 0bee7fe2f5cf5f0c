"""RolloutEngine over workflows without a model: counting, order, limits, filters, evaluation."""

from __future__ import annotations

import asyncio

import pytest
from echo import Echo, data, numbers

from agent_rl.errors import CollectorError, EpisodeError, WorkflowContractError
from agent_rl.rollout.dataloader import DataLoader
from agent_rl.rollout.workflow import RolloutWorkflow
from agent_rl.types import ModelRequest, RolloutGroup


def test_submit_and_wait(make, rows) -> None:
    rollout = make()
    workflow = Echo(rows)
    assert rollout.submit({"i": 5}, workflow, task_id=0) == "0"
    [group] = rollout.wait(1, timeout=30)
    assert group["rewards"].tolist() == [5.0]
    assert group["rollout_group"] == RolloutGroup(row_counts=(1,))
    assert rollout.counts().accepted == rollout.counts().submitted == 1


def test_explicit_reference_moves_into_the_group(make, rows, replay) -> None:
    rollout = make()
    rollout.submit({}, replay([rows(1.0, 3.0, rollout_reward=3.0)]))
    [group] = rollout.wait(1, timeout=30)
    assert group["rollout_group"] == RolloutGroup(row_counts=(2,), rewards=(3.0,))
    assert "rollout_reward" not in group


def test_steps_of_a_normalised_group_stay_visible(make, interaction, replay) -> None:
    """case B79: steps -0.2, 1 | 0 around the references 1 and 0; the raw ones beside them."""
    slots = [
        {
            "a": interaction("a", -0.2, rollout_reward=1.0),
            "b": interaction("b", 1.0, rollout_reward=1.0),
        },
        {"c": interaction("c", 0.0)},
    ]
    rollout = make(reward_normalization=True)
    [group] = rollout.rollout_batch([{}], replay(slots), group_size=2)
    assert group["rewards"].tolist() == pytest.approx([-1.4, 1.0, -1.0])
    assert group["original_rewards"].tolist() == pytest.approx([-0.2, 1.0, 0.0])
    assert group["rollout_group"].rewards == pytest.approx((1.0, -1.0))


def test_finished_groups_are_kept_for_the_next_call(make, rows) -> None:
    """case B137: 11 groups, taken four at a time."""
    rollout = make(consumer_batch_size=16, max_concurrent_rollouts=16)
    workflow = Echo(rows)
    for row in data(11):
        rollout.submit(row, workflow)
    taken = [sorted(numbers(rollout.wait(count, timeout=30))) for count in (4, 4, 3)]
    assert sorted(number for part in taken for number in part) == list(range(11))


def test_oldest_first_in_a_seeded_order(make, rows) -> None:
    def order() -> list[list[int]]:
        rollout = make(consumer_batch_size=12, max_concurrent_rollouts=12)
        workflow = Echo(rows)
        for row in data(12):
            rollout.submit(row, workflow)
        everything = rollout.wait(12, timeout=30)
        return numbers(everything)

    first, second = order(), order()
    assert first == second
    assert sorted(first) == list(range(12)) and first != list(range(12))


def test_waiting_in_vain_is_an_error(make, rows, replay) -> None:
    """case B130: one accepted, one rejected by the filter, one failed, one None."""
    rollout = make(consumer_batch_size=4)
    workflow = replay([rows(1.0), rows(0.0), ConnectionError("down"), None])
    for _ in range(4):
        rollout.submit({}, workflow, should_accept_fn=lambda group: group["rewards"][0] > 0)
    with pytest.raises(CollectorError, match="nothing is left to wait for"):
        rollout.wait(4, timeout=30)
    assert numbers(rollout.wait(1, timeout=30)) == [1]
    counts = rollout.counts()
    assert (counts.accepted, counts.rejected, counts.failed) == (1, 2, 1)


def test_wait_times_out(make) -> None:
    class Hangs(RolloutWorkflow):
        async def arun_episode(self, engine, data):
            await asyncio.Event().wait()

    rollout = make()
    rollout.submit({}, Hangs())
    with pytest.raises(TimeoutError, match="only 0 groups"):
        rollout.wait(1, timeout=0.05)
    with pytest.raises(ValueError, match="at least 1"):
        rollout.wait(0)


def test_one_shot_batch_keeps_the_order_and_the_holes(make, rows, replay) -> None:
    """cases B82, B103 (a), B130"""
    rollout = make()
    workflow = replay([rows(1.0), rows(0.0), ConnectionError("down"), None])
    groups = rollout.rollout_batch(
        [{}] * 4, workflow, should_accept_fn=lambda group: bool(group["rewards"][0] > 0)
    )
    assert [group is not None for group in groups] == [True, False, False, False]
    stats = rollout.export_stats()
    assert stats["rollout/accepted"] == 0.25 and stats["rollout/failed"] == 0.25
    assert stats["rollout/rejected"] == 0.5 and stats["rollout/accepted__count"] == 4


def test_filter_that_rejects_all_returns(make, rows) -> None:
    """case B103 (a)"""
    rollout = make()
    groups = rollout.rollout_batch(data(4), Echo(rows), should_accept_fn=lambda group: False)
    assert groups == [None] * 4
    assert rollout.counts().rejected == 4


def test_one_shot_batch_ignores_the_staleness_bound(make, rows) -> None:
    rollout = make(consumer_batch_size=2, max_concurrent_rollouts=2)
    groups = rollout.rollout_batch(data(20), Echo(rows))
    assert numbers(groups) == list(range(20))
    loader = DataLoader(data(4), 2)
    assert len(rollout.prepare_batch(loader, Echo(rows))) == 2


def test_many_finished_groups_leave_the_loop_responsive(make, rows) -> None:
    """case B137"""
    rollout = make(max_concurrent_rollouts=64)
    groups = rollout.rollout_batch(data(1000), Echo(rows))
    assert numbers(groups) == list(range(1000))


def test_groups_and_their_floor(make, rows, replay) -> None:
    rollout = make(min_usable_group_size=2)
    workflow = replay([rows(1.0), None, rows(2.0), None, None, rows(3.0)])
    first, second = rollout.rollout_batch([{}, {}], workflow, group_size=3)
    assert first["rollout_group"].num_rollouts == 2
    assert second is None
    assert rollout.rollout_batch([{}], replay([rows(1.0)]), group_size=1)[0] is not None


def test_slot_metrics_speak_of_the_time_before_the_filter(make, rows, replay) -> None:
    rollout = make()
    workflow = replay([rows(1.0), None, rows(2.0)])
    rollout.rollout_batch([{}], workflow, group_size=3, should_accept_fn=lambda group: False)
    stats = rollout.export_stats()
    assert stats["rollout/usable_slot_count"] == stats["rollout/trainable_slot_count"] == 2.0
    assert stats["rollout/rejected"] == 1.0


def test_the_filter_sees_the_group(make, rows, replay) -> None:
    seen = []
    workflow = replay([rows(1.0, 2.0, rollout_reward=2.0), rows(2.0)])
    make().rollout_batch([{}], workflow, group_size=2, should_accept_fn=seen.append)
    assert seen[0]["rollout_group"] == RolloutGroup(row_counts=(2, 1), rewards=(2.0, None))


def test_evaluation_stands_beside_training(make, rows) -> None:
    """cases B147, B151: no capacity for training, 5 data, exactly 5 episodes."""
    rollout = make(consumer_batch_size=2, group_size=8)
    training, evaluation = Echo(rows), Echo(rows)
    loader = DataLoader(data(2), 2)
    rollout.prepare_batch(loader, training, group_size=1)
    before = rollout.counts()
    groups = rollout.rollout_batch(data(5), evaluation, is_eval=True)
    assert numbers(groups) == [0, 1, 2, 3, 4]
    assert len(evaluation.starts) == 5
    assert rollout.counts() == before
    assert rollout.counts(is_eval=True).accepted == 5
    rollout.submit({"i": 9}, evaluation, is_eval=True)
    assert numbers(rollout.wait(1, timeout=30, is_eval=True)) == [9]
    assert rollout.export_stats()["eval-rollout/accepted__count"] == 6


def test_eight_rollouts_run_at_once(make, rows) -> None:
    """Each waits until all eight are there: they could not finish one after the other."""
    barrier = asyncio.Barrier(8)

    class Tool(RolloutWorkflow):
        async def arun_episode(self, engine, data):
            await barrier.wait()
            return rows(1.0)

    groups = make(consumer_batch_size=8, episode_timeout_s=30).rollout_batch(data(8), Tool())
    assert all(group is not None for group in groups)


def test_concurrency_is_limited(make, rows) -> None:
    running, most = set(), []

    class Counts(RolloutWorkflow):
        async def arun_episode(self, engine, data):
            running.add(data["i"])
            most.append(len(running))
            await asyncio.sleep(0)
            running.remove(data["i"])
            return rows(1.0)

    make(max_concurrent_rollouts=3).rollout_batch(data(20), Counts())
    assert max(most) == 3


def test_queue_size(make, rows) -> None:
    """case B137: submission ends where enough wait."""
    rollout = make(consumer_batch_size=1, queue_size=2)
    rollout.pause()
    for row in data(2):
        rollout.submit(row, Echo(rows))
    with pytest.raises(CollectorError, match="queue_size=2"):
        rollout.submit({"i": 3}, Echo(rows))


def test_deadline_counts_as_a_failure_of_its_own_kind(make, rows, replay) -> None:
    """case B165: the error rate is over all episodes."""

    class Mixed(RolloutWorkflow):
        async def arun_episode(self, engine, data):
            if data["i"] == 2:
                await asyncio.Event().wait()
            return rows(float(data["i"]))

    rollout = make(episode_timeout_s=0.5)
    assert sum(group is None for group in rollout.rollout_batch(data(4), Mixed())) == 1
    stats = rollout.export_stats()
    assert stats["rollout/failed/timeout"] == 0.25
    assert stats["rollout/failed/agent"] == 0.0


def test_broken_contract_is_raised_once(make, rows, replay) -> None:
    """case B131: the trainer hears of it, and the collector goes on."""
    rollout = make(consumer_batch_size=2)
    bad = replay([rows(1.0, rollout_reward=float("nan"))] * 8)
    with pytest.raises(WorkflowContractError, match="rollout_reward"):
        rollout.prepare_batch(DataLoader(data(2), 2), bad)
    with pytest.raises(WorkflowContractError, match="rollout_reward"):
        rollout.rollout_batch([{}], bad)
    assert rollout.rollout_batch([{"i": 1}], Echo(rows))[0] is not None
    assert rollout.counts().running == 0


def test_on_error_raise(make, replay) -> None:
    rollout = make(on_error="raise")
    with pytest.raises(EpisodeError, match="ConnectionError: down"):
        rollout.rollout_batch([{}], replay([ConnectionError("down")]), group_size=1)


def test_filter_that_raises_is_a_failure(make, rows, caplog) -> None:
    def broken(group):
        raise KeyError("no such key")

    rollout = make()
    assert rollout.rollout_batch(data(1), Echo(rows), should_accept_fn=broken) == [None]
    assert rollout.counts().failed == 1
    [record] = [r for r in caplog.records if "should_accept_fn raised KeyError" in r.getMessage()]
    assert " in broken: " in record.getMessage() and record.exc_info


@pytest.mark.parametrize("returned", [None, asyncio.sleep])
def test_a_filter_that_forgot_its_verdict_is_a_failure(make, rows, caplog, returned) -> None:
    """None rejected every group, and a coroutine accepted every one."""
    rollout = make()

    def forgetful(group):
        return None if returned is None else returned(0)

    assert rollout.rollout_batch(data(1), Echo(rows), should_accept_fn=forgetful) == [None]
    assert rollout.counts().failed == 1
    assert "return True to train on the group, else False" in caplog.text


def test_error_is_logged_once_with_its_traceback(make, caplog) -> None:
    """case B83: with the task's id, and its place in the user's code."""

    class Fails(RolloutWorkflow):
        async def arun_episode(self, engine, data):
            raise AttributeError("answer is an int")

    make().rollout_batch(data(5), Fails())
    [record] = [r for r in caplog.records if "answer is an int" in r.getMessage()]
    assert "task 0" in record.getMessage()
    assert 'in arun_episode: raise AttributeError("answer is an int")' in record.getMessage()
    assert [r for r in caplog.records if r.exc_info] == [record]


async def test_it_is_an_engine(make, engine) -> None:
    rollout = make()
    response = await rollout.agenerate(ModelRequest(rid="a", input_ids=[1, 2]))
    assert response.output_tokens == (7,)
    items = [item async for item in rollout.astream(ModelRequest(rid="b", input_ids=[1]))]
    assert items[-1].output_tokens == (7,)
    await rollout.abort("b")
    assert await rollout.health()
    assert rollout.max_seq_len == engine.max_seq_len
    assert rollout.supported == engine.supported
