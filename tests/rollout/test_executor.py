"""RolloutEngine over workflows without a model: counting, order, limits, filters, evaluation."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from agent_rl.config import RolloutConfig
from agent_rl.engine.base import WeightUpdate
from agent_rl.engine.scripted import ScriptedEngine
from agent_rl.errors import CollectorError, EpisodeError, WorkflowContractError
from agent_rl.rollout.dataloader import DataLoader
from agent_rl.rollout.executor import RolloutEngine
from agent_rl.rollout.workflow import RolloutWorkflow
from agent_rl.types import ModelRequest, RolloutGroup


class Echo(RolloutWorkflow):
    """Rows whose reward is the datum's number and whose versions are the engine's."""

    def __init__(self, rows) -> None:
        self.rows = rows
        self.starts: list[tuple[int, int]] = []

    async def arun_episode(self, engine, data):
        version = engine.get_version()
        self.starts.append((data["i"], version))
        await asyncio.sleep(0)
        rows = self.rows(float(data["i"]))
        rows["versions"][rows["loss_mask"].bool()] = version
        return rows


def numbers(groups) -> list[int]:
    return [int(group["rewards"][0]) for group in groups]


def data(count: int) -> list[dict[str, int]]:
    return [{"i": i} for i in range(count)]


@pytest.fixture
def make(open_rollout, engine):
    """RolloutEngine with these keys of ``rollout``; closed at the end."""

    def build(engine=engine, *, min_usable_group_size=1, **keys) -> RolloutEngine:
        config = RolloutConfig(**keys)
        return open_rollout(engine, config, min_usable_group_size=min_usable_group_size)

    return build


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


def test_prepare_batch_fills_exactly(make, rows) -> None:
    """case B103, the mixed one: every second group is rejected."""
    rollout = make(consumer_batch_size=4)
    loader = DataLoader(data(8), 4, shuffle=False)
    groups = rollout.prepare_batch(
        loader, Echo(rows), should_accept_fn=lambda group: group["rewards"][0] % 2 == 0
    )
    assert len(groups) == 4
    assert all(number % 2 == 0 for number in numbers(groups))


def test_prepare_batch_gives_up_on_a_filter_that_rejects_all(make, rows) -> None:
    """case B103 (b): two passes over the data, but at least 8 batches."""
    rollout = make(consumer_batch_size=4)
    loader = DataLoader(data(8), 4)
    with pytest.raises(CollectorError, match=r"last \d+ groups gave nothing.*x filter"):
        rollout.prepare_batch(loader, Echo(rows), should_accept_fn=lambda group: False)
    assert rollout.counts().rejected >= 32


def test_prepare_batch_raises_when_the_engine_is_dead(make, rows) -> None:
    """case B131: the cause is named, the running counter goes back to 0."""
    calls = iter(range(10_000))

    class Calls(RolloutWorkflow):
        async def arun_episode(self, engine, data):
            if next(calls) >= 3:
                raise ConnectionRefusedError("engine stub died")
            return rows(1.0)

    rollout = make(consumer_batch_size=16, max_head_offpolicyness=4)
    with pytest.raises(CollectorError, match="x agent") as caught:
        rollout.prepare_batch(DataLoader(data(16), 16), Calls())
    assert "engine stub died" in str(caught.value.__cause__)
    rollout.close()
    counts = rollout.counts()
    assert counts.running == 0 and counts.accepted == 3
    assert counts.submitted == counts.waiting + counts.accepted + counts.failed


def test_dynamic_batch_ends_after_as_many_verdicts(make, rows) -> None:
    rollout = make(consumer_batch_size=4, max_head_offpolicyness=8)
    loader = DataLoader(data(8), 4, shuffle=False)
    groups = rollout.prepare_batch(
        loader,
        Echo(rows),
        should_accept_fn=lambda group: group["rewards"][0] < 1,
        dynamic_bs=True,
    )
    assert len(groups) < 4


def test_synchronous_collection_waits_for_the_version(make, rows) -> None:
    rollout = make(consumer_batch_size=4, max_concurrent_rollouts=16)
    loader, workflow = DataLoader(data(16), 4, shuffle=False), Echo(rows)
    for version in range(3):
        groups = rollout.prepare_batch(loader, workflow)
        assert sorted(numbers(groups)) == [4 * version + i for i in range(4)]
        assert len(workflow.starts) == 4 * (version + 1)
        rollout.set_version(version + 1)
    assert [version for _, version in workflow.starts[:12]] == [0] * 4 + [1] * 4 + [2] * 4


def test_synchronously_nothing_runs_between_batches(make, rows) -> None:
    rollout = make(consumer_batch_size=4)
    loader, workflow = DataLoader(data(16), 4), Echo(rows)
    rollout.prepare_batch(loader, workflow)
    rollout.set_version(1)
    counts = rollout.counts()
    assert (counts.submitted, counts.accepted) == (4, 4)
    assert loader.state_dict()["position"] == 4


def test_no_version_bump_is_an_error_not_a_hang(make, rows) -> None:
    rollout = make(consumer_batch_size=4)
    loader = DataLoader(data(8), 4)
    rollout.prepare_batch(loader, Echo(rows))
    with pytest.raises(CollectorError, match="call set_version or update_weights"):
        rollout.prepare_batch(loader, Echo(rows))


@pytest.mark.parametrize("restored_version", [0, 50])
def test_no_row_is_staler_than_the_bound(make, rows, restored_version) -> None:
    """case B128: also with counts that start from zero at version 50."""
    engine = ScriptedEngine([[7]], repeat=True, version=restored_version)
    rollout = make(
        engine, consumer_batch_size=8, max_concurrent_rollouts=64, max_head_offpolicyness=2
    )
    loader, workflow = DataLoader(data(64), 8), Echo(rows)
    for step in range(20):
        version = restored_version + step
        groups = rollout.prepare_batch(loader, workflow)
        head = min(int(group["versions"][group["loss_mask"].bool()].min()) for group in groups)
        assert 0 <= version - head <= 2
        assert rollout.export_stats()["rollout/max_staleness"] == version - head
        rollout.set_version(version + 1)
    assert len(workflow.starts) <= (2 + 20 + 1) * 8


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


def test_filter_that_raises_is_a_failure(make, rows) -> None:
    def broken(group):
        raise KeyError("no such key")

    rollout = make()
    assert rollout.rollout_batch(data(1), Echo(rows), should_accept_fn=broken) == [None]
    assert rollout.counts().failed == 1


def test_error_is_logged_once_with_its_traceback(make, caplog) -> None:
    """case B83: with the task's id."""

    class Fails(RolloutWorkflow):
        async def arun_episode(self, engine, data):
            raise AttributeError("answer is an int")

    caplog.set_level("INFO")
    make().rollout_batch(data(5), Fails())
    [record] = [r for r in caplog.records if "answer is an int" in r.getMessage()]
    assert "task 0" in record.getMessage()
    [traced] = [r for r in caplog.records if r.exc_info]
    assert traced.levelname == "INFO"


def test_state_holds_what_was_drawn_and_not_handed_over(make, rows) -> None:
    """case B149: items in flight are run again after a restart, none twice."""
    rollout = make(consumer_batch_size=2, max_head_offpolicyness=1)
    loader = DataLoader(data(20), 2, shuffle=False)
    used = []
    for version in range(3):
        used += numbers(rollout.prepare_batch(loader, Echo(rows)))
        rollout.set_version(version + 1)
    states = rollout.state_dict(), loader.state_dict()
    rollout.close()
    engine = ScriptedEngine([[7]], repeat=True, version=3)
    resumed = make(engine, consumer_batch_size=2, max_head_offpolicyness=1)
    resumed.load_state_dict(states[0])
    loader = DataLoader(data(20), 2, shuffle=False)
    loader.load_state_dict(states[1])
    for version in range(3, 10):
        used += numbers(resumed.prepare_batch(loader, Echo(rows)))
        resumed.set_version(version + 1)
    assert sorted(used) == list(range(20))


def test_pause_stops_starts_and_the_engine(make, rows) -> None:
    """case B134: a stub that fails whatever arrives while paused sees nothing."""
    arrivals = []

    class Stub(ScriptedEngine):
        is_paused = False

        async def agenerate(self, req):
            arrivals.append(self.is_paused)
            return await super().agenerate(req)

        async def pause(self):
            self.is_paused = True
            await super().pause()

        async def resume(self):
            self.is_paused = False
            await super().resume()

    class Generates(RolloutWorkflow):
        async def arun_episode(self, engine, data):
            response = await engine.agenerate(ModelRequest(rid=str(data["i"]), input_ids=[1]))
            return rows(float(response.output_versions[0]))

    rollout = make(Stub([[7]], repeat=True), consumer_batch_size=8)
    rollout.pause()
    for row in data(8):
        rollout.submit(row, Generates())
    assert rollout.counts().waiting == 8 and arrivals == []
    with pytest.raises(CollectorError, match="paused"):
        rollout.rollout_batch(data(1), Generates())
    rollout.update_weights(WeightUpdate(version=3))
    rollout.resume()
    assert numbers(rollout.wait(8, timeout=30)) == [3] * 8
    assert arrivals == [False] * 8
    assert rollout.get_version() == 3


def test_a_pause_does_not_use_up_the_deadline(make, rows) -> None:
    """The engine stands still three times as long as an episode may take."""
    asked = threading.Event()

    class Generates(RolloutWorkflow):
        async def arun_episode(self, engine, data):
            asked.set()
            await engine.agenerate(ModelRequest(rid="a", input_ids=[1]))
            return rows(1.0)

    class Slow(ScriptedEngine):
        async def agenerate(self, req):
            await asyncio.sleep(0.05)
            return await super().agenerate(req)

    rollout = make(Slow([[7]]), episode_timeout_s=0.3)
    rollout.submit({}, Generates())
    asked.wait(30)
    rollout.pause()
    time.sleep(0.9)
    rollout.resume()
    assert numbers(rollout.wait(1, timeout=30)) == [1]


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


def test_close_cancels_and_leaves_no_thread(make) -> None:
    ended = []

    class Hangs(RolloutWorkflow):
        async def arun_episode(self, engine, data):
            try:
                await asyncio.Event().wait()
            finally:
                ended.append(data["i"])

    rollout = make(consumer_batch_size=4)
    for row in data(4):
        rollout.submit(row, Hangs())
    with pytest.raises(TimeoutError):
        rollout.wait(1, timeout=0.05)
    rollout.close()
    rollout.close()
    assert sorted(ended) == [0, 1, 2, 3]
    assert rollout.counts().running == 0
    assert [t.name for t in threading.enumerate() if t.name == "agent-rl-collector"] == []
    with pytest.raises(CollectorError, match="closed"):
        rollout.submit({}, Hangs())


def test_close_wakes_whoever_waits(make) -> None:
    class Hangs(RolloutWorkflow):
        async def arun_episode(self, engine, data):
            started.set()
            await asyncio.Event().wait()

    started, raised = threading.Event(), []
    rollout = make()
    rollout.submit({}, Hangs())

    def wait() -> None:
        try:
            rollout.wait(1)
        except CollectorError as error:
            raised.append(str(error))

    waiter = threading.Thread(target=wait)
    waiter.start()
    started.wait(30)
    rollout.close()
    waiter.join(30)
    assert raised == ["the rollout engine is closed"]


def test_keyboard_interrupt_in_an_agent_stops_the_program(make, replay) -> None:
    """case B195"""
    rollout = make()
    with pytest.raises(KeyboardInterrupt):
        rollout.rollout_batch([{}], replay([KeyboardInterrupt()]))
    with pytest.raises(KeyboardInterrupt):
        rollout.submit({}, replay([]))


def test_exit_in_a_stray_task_costs_nothing(make, rows) -> None:
    """case B131: SystemExit in a task that nobody awaits."""

    class Stray(RolloutWorkflow):
        async def arun_episode(self, engine, data):
            async def leave() -> None:
                raise SystemExit(3)

            task = asyncio.create_task(leave())
            await asyncio.sleep(0.01)
            task.exception()
            return rows(1.0)

    groups = make().rollout_batch(data(4), Stray())
    assert all(group is not None for group in groups)


def test_death_of_the_background_is_raised_with_its_cause(make, rows) -> None:
    """case B131"""
    fault = RuntimeError("no version")

    class Broken(ScriptedEngine):
        def get_version(self) -> int:
            if threading.current_thread() is not threading.main_thread():
                raise fault
            return 0

    rollout = make(Broken([]))
    with pytest.raises(CollectorError, match="background work died") as caught:
        rollout.rollout_batch(data(2), Echo(rows))
    assert caught.value.__cause__ is fault
    with pytest.raises(CollectorError):
        rollout.submit({}, Echo(rows))


def test_an_error_beside_a_full_batch_loses_no_group(make, rows) -> None:
    """The batch is there when a later group breaks the contract: raised once, then handed over."""
    broken = threading.Event()

    class Breaks(Echo):
        async def arun_episode(self, engine, data):
            if data["i"] == 4:
                broken.set()
                return rows(1.0, rollout_reward=float("nan"))
            return await super().arun_episode(engine, data)

    rollout = make(consumer_batch_size=2, max_concurrent_rollouts=8, max_head_offpolicyness=4)
    loader, workflow = DataLoader(data(40), 2, shuffle=False), Breaks(rows)
    taken, raised = [], 0
    for version in range(6):
        try:
            taken += numbers(rollout.prepare_batch(loader, workflow))
        except WorkflowContractError:
            raised += 1
        rollout.set_version(version + 1)
    assert broken.is_set() and raised == 1
    pending = [row["i"] for _, row in rollout.state_dict()["pending"]]
    drawn = rollout.state_dict()["num_drawn"]
    assert sorted([*taken, *pending, 4]) == list(range(drawn))
