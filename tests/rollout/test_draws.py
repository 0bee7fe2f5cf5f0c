"""What a restarted run finds of an earlier one: state, journal, and both together."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from agent_rl.config import RolloutConfig
from agent_rl.engine.scripted import ScriptedEngine
from agent_rl.errors import ConfigError, JournalError
from agent_rl.record.journal import Journal
from agent_rl.rollout.dataloader import DataLoader
from agent_rl.rollout.executor import RolloutEngine
from agent_rl.rollout.workflow import RolloutWorkflow


class Echo(RolloutWorkflow):
    """Rows whose reward is the datum's number; data of ``rejected`` give None."""

    def __init__(self, rows: Any, rejected: tuple[int, ...] = ()) -> None:
        self.rows = rows
        self.rejected = rejected
        self.started: list[int] = []

    async def arun_episode(self, engine: Any, data: Any) -> Any:
        self.started.append(data["i"])
        version = engine.get_version()
        await asyncio.sleep(0)
        if data["i"] in self.rejected:
            return None
        rows = self.rows(float(data["i"]))
        rows["versions"][rows["loss_mask"].bool()] = version
        return rows


def data(count: int) -> list[dict[str, int]]:
    return [{"i": i} for i in range(count)]


def numbers(groups: Any) -> list[int]:
    return sorted(int(group["rewards"][0]) for group in groups)


@pytest.fixture
def start(tmp_path: Path):
    """A process of the run, at a version of the weights."""
    opened = []

    def build(version: int = 0, **keys: Any) -> RolloutEngine:
        config = RolloutConfig(journal=True, fileroot=str(tmp_path), consumer_batch_size=4, **keys)
        rollout = RolloutEngine(ScriptedEngine([[7]], repeat=True, version=version), config)
        opened.append(rollout)
        return rollout

    yield build
    for rollout in opened:
        rollout.close()


def loader_at(state: Any = None, *, count: int = 40) -> DataLoader:
    loader = DataLoader(data(count), 4, shuffle=False)
    if state is not None:
        loader.load_state_dict(state)
    return loader


def settle(rollout: RolloutEngine) -> None:
    """Until nothing runs and nothing may start."""
    collector, lane = rollout._collector, rollout._stream
    collector.wait_for(lane, lambda: lane.is_stuck(rollout.get_version()), None)


def test_finished_groups_are_handed_over_and_not_run_again(start, rows, tmp_path) -> None:
    loader, first = loader_at(), Echo(rows)
    rollout = start(max_head_offpolicyness=1)
    trained = numbers(rollout.prepare_batch(loader, first))
    states = json.loads(json.dumps([rollout.state_dict(), loader.state_dict()]))
    rollout.mark_trained(1)
    settle(rollout)
    rollout.close()
    assert sorted(first.started) == list(range(8))
    left = sorted(set(range(8)) - set(trained))
    kept = [entry for entry in Journal.read(tmp_path / "rollout.journal") if "draw" in entry]
    assert sorted(entry["draw"] for entry in kept) == left

    second, loader = Echo(rows), loader_at(states[1])
    again = start(1, max_head_offpolicyness=1)
    again.load_state_dict(states[0])
    assert numbers(again.prepare_batch(loader, second)) == left
    assert again.counts().restored == 4
    again.set_version(2)
    assert min(numbers(again.prepare_batch(loader, second))) >= 8
    assert set(second.started) & set(first.started) == set()


def test_rows_come_back_bit_for_bit(start, rows) -> None:
    loader, workflow = loader_at(), Echo(rows)
    rollout = start()
    before = {int(g["rewards"][0]): g for g in rollout.prepare_batch(loader, workflow)}
    rollout.close()
    after = {int(g["rewards"][0]): g for g in start().prepare_batch(loader_at(), Echo(rows))}
    assert before.keys() == after.keys()
    for number, group in before.items():
        assert group["rollout_group"] == after[number]["rollout_group"]
        for key in ("input_ids", "attention_mask", "loss_mask", "logprobs", "versions", "rewards"):
            assert torch.equal(group[key], after[number][key])


def test_without_any_state_everything_is_untrained(start, rows) -> None:
    """Killed before the first checkpoint: the weights are those of the start again."""
    first = start(max_head_offpolicyness=1)
    loader, workflow = loader_at(), Echo(rows)
    for version in (1, 2):
        first.prepare_batch(loader, workflow)
        first.set_version(version)
    settle(first)
    first.close()
    num_started = len(workflow.started)
    assert sorted(workflow.started) == list(range(num_started)) and num_started >= 12
    again, second = start(max_head_offpolicyness=1), Echo(rows)
    loader, trained = loader_at(), []
    for version in range(1, num_started // 4 + 1):
        trained += numbers(again.prepare_batch(loader, second))
        again.set_version(version)
    assert sorted(trained) == list(range(num_started // 4 * 4))
    assert not set(second.started) & set(workflow.started)


def test_too_stale_groups_are_dropped_counted_and_not_run_again(start, rows) -> None:
    rollout, loader, first = start(max_head_offpolicyness=2), loader_at(), Echo(rows)
    rollout.prepare_batch(loader, first)
    states = rollout.state_dict(), loader.state_dict()
    settle(rollout)
    rollout.close()
    num_started = len(first.started)  # as many as were drawn, all under version 0
    assert sorted(first.started) == list(range(num_started)) and num_started >= 8

    again, loader, second = start(3, max_head_offpolicyness=2), loader_at(states[1]), Echo(rows)
    again.load_state_dict(states[0])
    assert min(numbers(again.prepare_batch(loader, second))) >= num_started
    counts = again.counts()
    assert (counts.dropped_stale, counts.restored) == (num_started - 4, 0)
    assert counts.submitted == sum(
        (counts.waiting, counts.running, counts.accepted, counts.rejected, counts.failed)
    )
    assert not set(second.started) & set(first.started)
    assert again.export_stats()["rollout/dropped_stale"] == 1.0


def test_rejected_data_are_not_run_again(start, rows) -> None:
    rollout, first = start(), Echo(rows, rejected=(0, 2))
    rollout.prepare_batch(loader_at(), first)
    rollout.close()
    again, second = start(), Echo(rows)
    assert numbers(again.prepare_batch(loader_at(), second)) == [1, 3, 4, 5]
    assert second.started == []
    assert again.counts().rejected == 2


def test_what_failed_is_tried_again(start, rows, replay) -> None:
    rollout = start()
    broken = replay([ConnectionError("down"), rows(1.0), rows(2.0), rows(3.0), rows(4.0)])
    rollout.prepare_batch(loader_at(), broken)
    rollout.close()
    again, second = start(), Echo(rows)
    assert numbers(again.prepare_batch(loader_at(), second)) == [0, 1, 2, 3]
    assert second.started == [0]


def test_another_dataset_is_noticed(start, rows, caplog) -> None:
    rollout = start()
    rollout.prepare_batch(loader_at(), Echo(rows))
    rollout.close()
    again, second = start(), Echo(rows)
    loader = DataLoader([{"i": i, "new": True} for i in range(8)], 4, shuffle=False)
    with caplog.at_level(logging.WARNING):
        assert numbers(again.prepare_batch(loader, second)) == [0, 1, 2, 3]
    assert sorted(second.started) == [0, 1, 2, 3]
    assert "group number 0 is of another datum" in caplog.text


def test_submitted_data_are_found_by_their_order(start, rows) -> None:
    rollout, first = start(), Echo(rows)
    for row in data(3):
        rollout.submit(row, first)
    assert numbers(rollout.wait(3, timeout=30)) == [0, 1, 2]
    rollout.close()
    again, second = start(), Echo(rows)
    for row in data(4):
        again.submit(row, second)
    assert numbers(again.wait(4, timeout=30)) == [0, 1, 2, 3]
    assert second.started == [3]


def test_evaluation_and_one_shot_batches_stay_out_of_the_journal(start, rows, tmp_path) -> None:
    rollout = start()
    rollout.rollout_batch(data(3), Echo(rows))
    rollout.rollout_batch(data(3), Echo(rows), is_eval=True)
    rollout.submit({"i": 1}, Echo(rows), is_eval=True)
    rollout.wait(1, timeout=30, is_eval=True)
    assert list(Journal.read(tmp_path / "rollout.journal")) == []


def test_compaction_keeps_what_the_last_state_had_not_trained(start, rows, tmp_path) -> None:
    rollout, loader, workflow = start(max_head_offpolicyness=1), loader_at(), Echo(rows)
    trained = numbers(rollout.prepare_batch(loader, workflow))
    rollout.state_dict()
    rollout.set_version(1)
    rollout.prepare_batch(loader, workflow)  # after the state: a crash would take it back
    settle(rollout)
    rollout.mark_trained(1)
    first, *kept = Journal.read(tmp_path / "rollout.journal")
    assert first == {"trained_steps": 1}
    assert sorted(e["draw"] for e in kept) == sorted(set(workflow.started) - set(trained))


def test_a_failing_disk_stops_the_run(start, rows) -> None:
    rollout = start()
    rollout._draws.close()
    with pytest.raises(JournalError, match="is closed"):
        rollout.prepare_batch(loader_at(), Echo(rows))


def test_rows_that_are_not_json_are_refused_by_name(start, rows) -> None:
    class Odd(RolloutWorkflow):
        async def arun_episode(self, engine: Any, data: Any) -> Any:
            return rows(1.0, extra=[object()])

    with pytest.raises(JournalError, match="trajectory: extra cannot be written"):
        start().prepare_batch(loader_at(), Odd())


def test_the_journal_needs_a_folder_and_is_for_one_process(start, engine) -> None:
    with pytest.raises(ConfigError, match=r"rollout.journal=true needs a folder"):
        RolloutEngine(engine, RolloutConfig(journal=True))
    start()
    with pytest.raises(JournalError, match="another writer"):
        start()


def test_a_foreign_journal_is_refused(start, tmp_path) -> None:
    with Journal(tmp_path / "rollout.journal") as journal:
        journal.append({"session": 1})
    with pytest.raises(JournalError, match=r"entry with \['session'\]: not of a rollout"):
        start()
