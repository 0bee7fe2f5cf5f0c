"""Training batches: full, as old as the bound allows, and nothing drawn is lost."""

from __future__ import annotations

import threading

import pytest
from echo import Echo, data, numbers

from agent_rl.engine.scripted import ScriptedEngine
from agent_rl.errors import CollectorError, WorkflowContractError
from agent_rl.rollout.dataloader import DataLoader
from agent_rl.rollout.workflow import RolloutWorkflow


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
    """cases B128, B129: also with counts that start from zero at version 50."""
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
