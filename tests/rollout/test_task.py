"""The dump of a collected group: rows, orphans and errors, before the filter decides."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from agent_rl.config import RolloutConfig
from agent_rl.record.dump import TrajectoryDump, TrajectoryRecord, read_dump
from agent_rl.rollout.dataloader import DataLoader
from agent_rl.rollout.episode import Exported
from agent_rl.rollout.executor import RolloutEngine


def decode(ids: Sequence[int]) -> str:
    return " ".join(map(str, ids))


@pytest.fixture
def run(engine, tmp_path):
    """Run one group whose slots are these; the records that were dumped."""

    def collect(workflow, group_size: int, **submission) -> list[TrajectoryRecord]:
        dump = TrajectoryDump(tmp_path, decode)
        with RolloutEngine(engine, RolloutConfig(), dump=dump) as rollout:
            rollout.rollout_batch([{}], workflow, group_size=group_size, **submission)
        return read_dump(tmp_path)

    return collect


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*.jsonl"))


def test_a_group_of_three_is_three_lines(run, replay, rows, tmp_path) -> None:
    records = run(replay([rows(float(i)) for i in range(3)]), 3)
    assert files(tmp_path) == ["rollout/0/0.jsonl"]
    assert [(record.task_id, record.sample_idx) for record in records] == [
        ("0", 0),
        ("0", 1),
        ("0", 2),
    ]
    assert [record.reward for record in records] == [0.0, 1.0, 2.0]
    assert (records[0].prompt, records[0].completion) == ("1", "2 3")


def test_evaluation_has_its_own_folder(run, replay, rows, tmp_path) -> None:
    run(replay([rows(1.0)]), 1, is_eval=True)
    assert files(tmp_path) == ["eval-rollout/0/0.jsonl"]


def test_rejected_rows_and_failures_are_dumped(run, replay, rows) -> None:
    records = run(
        replay([rows(1.0), ConnectionError("the tool refused"), None]),
        3,
        should_accept_fn=lambda group: False,
    )
    assert [record.reward for record in records] == [1.0, None]
    assert records[1].error is not None
    assert "agent raised ConnectionError: the tool refused" in records[1].error
    assert "Traceback" in records[1].error and "arun_episode" in records[1].error


def test_orphans_are_dumped_but_no_rows(run, replay, interaction) -> None:
    exported = Exported({"b": interaction("b", 1.0)}, [interaction("a", 0.0)])
    records = run(replay([exported]), 1)
    assert [(record.orphan, record.reward) for record in records] == [(False, 1.0), (True, None)]


def test_second_run_of_a_task_appends(run, replay, rows) -> None:
    run(replay([rows(1.0)]), 1)
    assert len(run(replay([rows(2.0)]), 1)) == 2


def test_without_a_folder_a_warning_says_so(engine, caplog) -> None:
    RolloutEngine(engine, RolloutConfig(dump_to_file=True)).close()
    assert "rollout.fileroot is not set" in caplog.text


def test_folder_from_the_config(engine, tmp_path, replay, rows) -> None:
    class Words:
        def decode(self, ids: Sequence[int]) -> str:
            return decode(ids)

    config = RolloutConfig(dump_to_file=True, fileroot=str(tmp_path))
    with RolloutEngine(engine, config, tokenizer=Words()) as rollout:
        rollout.submit({}, replay([rows(1.0)]), task_id="../x")
        rollout.wait(1, timeout=30)
    [record] = read_dump(tmp_path)
    assert record.task_id == "../x"
    assert all(path.is_relative_to(tmp_path) for path in tmp_path.rglob("*"))


def test_groups_of_odd_task_ids_are_dumped_whole(engine, rows, replay, tmp_path) -> None:
    """case B170: groups of four, two of them of the same id: every member, each in its own line."""
    task_ids = ["a/b", "a_b", "..", "x" * 300, "same", "same", 0]
    dump = TrajectoryDump(tmp_path, decode)
    with RolloutEngine(engine, RolloutConfig(consumer_batch_size=7), dump=dump) as rollout:
        for number, task_id in enumerate(task_ids):
            members = [rows(number + member / 4) for member in range(4)]
            rollout.submit({}, replay(members), group_size=4, task_id=task_id)
        rollout.wait(7, timeout=30)
    records = read_dump(tmp_path / "rollout" / "0")
    assert sorted(str(record.task_id) for record in records) == sorted(map(str, task_ids * 4))
    assert sorted(record.reward for record in records) == [n / 4 for n in range(28)]
    assert all(record.sample_idx == record.reward * 4 % 4 for record in records)
    assert len(list((tmp_path / "rollout" / "0").iterdir())) == 6, "a file for each id"


def test_a_dump_that_cannot_be_written_fails_no_episode(
    engine, rows, replay, tmp_path, caplog
) -> None:
    """case B167: a full disk, say; here its folder is a file."""
    blocker = tmp_path / "file"
    blocker.touch()
    with RolloutEngine(engine, dump=TrajectoryDump(blocker / "dump", decode)) as rollout:
        assert rollout.rollout_batch([{}], replay([rows(1.0)])) != [None]
    assert "is not dumped" in caplog.text


def test_numpy_in_the_datum_reaches_agents_as_python(engine, rows, replay) -> None:
    """case B154: by every way in; see also test_dataloader."""
    datum, seen = {"level": np.int64(3), "tools": np.array([])}, []
    loader = DataLoader([datum], 1)
    workflow = replay([lambda data: seen.append(data) or rows(1.0)] * 5)
    with RolloutEngine(engine, RolloutConfig(consumer_batch_size=1)) as rollout:
        rollout.prepare_batch(loader, workflow)
        rollout.set_version(1)
        rollout.rollout_batch([datum], workflow)
        for is_eval in (False, True):
            rollout.submit(datum, workflow, is_eval=is_eval)
            rollout.wait(1, timeout=30, is_eval=is_eval)
    assert seen == [{"level": 3, "tools": []}] * 4
    assert json.loads(json.dumps(seen)) == seen
