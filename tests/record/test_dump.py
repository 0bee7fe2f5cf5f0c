from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from fix_format import Talk, assistant, user

from agent_rl.errors import DatasetError
from agent_rl.record import Segment, TrajectoryRecord, read_dump
from agent_rl.record.dump import TrajectoryDump, safe_name, trajectory_record
from agent_rl.record.export import export_interactions
from agent_rl.record.rows import pad_concat


def words(ids: Sequence[int]) -> str:
    return " ".join(map(str, ids))


def record(mask: list[int], versions: list[int], ids: list[int] | None = None) -> TrajectoryRecord:
    return trajectory_record(
        ids or list(range(len(mask))),
        mask,
        versions,
        decode=words,
        task_id=42,
        sample_idx=0,
        reward=1.0,
    )


def table(*masks: list[int], **columns: Any) -> dict[str, Any]:
    """Rows of ids 10, 11, ... with these masks, padded to the widest."""
    width = max(map(len, masks))
    rows = {
        "input_ids": [[10 + i if i < len(m) else 0 for i in range(width)] for m in masks],
        "attention_mask": [[i < len(m) for i in range(width)] for m in masks],
        "loss_mask": [[*m, *[0] * (width - len(m))] for m in masks],
        "rewards": [1.0] * len(masks),
    }
    return {key: torch.tensor(value) for key, value in {**rows, **columns}.items()}


def test_multi_turn_row() -> None:
    """The worked case of two turns: context does not break a run of versions."""
    one = record([0, 0, 1, 1, 0, 0, 1, 1], [-1, -1, 5, 5, -1, -1, 6, 6])
    assert (one.head_version, one.tail_version, one.prompt_len, one.seqlen) == (5, 6, 2, 8)
    assert one.version_rle == ((5, 2), (6, 2))
    assert one.segments == (
        Segment(role="prompt", len=2, text="0 1"),
        Segment(role="gen", len=2, text="2 3"),
        Segment(role="context", len=2, text="4 5"),
        Segment(role="gen", len=2, text="6 7"),
    )
    assert (one.prompt, one.completion) == ("0 1", "2 3 4 5 6 7")
    same = record([1, 0, 1], [5, -1, 5])
    assert same.version_rle == ((5, 2),)
    assert same.segments is not None
    assert [part.role for part in same.segments] == ["gen", "context", "gen"]


def test_versions_and_prompt_of_interleaved_turns() -> None:
    """case B64: the filler -1 is no version, the prompt ends at the first sampled token."""
    one = record([0, 0, 1, 1, 0, 0, 1], [-1, -1, 3, 3, -1, -1, 4])
    assert (one.head_version, one.tail_version, one.prompt_len) == (3, 4, 2)


def test_completion_includes_the_context_in_between() -> None:
    one = record([0, 1, 0, 1], [-1, 0, -1, 0], ids=[10, 11, 12, 13])
    assert (one.prompt, one.completion) == ("10", "11 12 13")


def test_rows_with_one_kind_of_tokens() -> None:
    nothing = record([0, 0, 0], [-1, -1, -1])
    assert (nothing.prompt_len, nothing.completion, nothing.segments) == (3, "", None)
    assert (nothing.head_version, nothing.tail_version, nothing.version_rle) == (-1, -1, ())
    everything = record([1, 1], [7, 7])
    assert (everything.prompt_len, everything.prompt, everything.segments) == (0, "", None)
    empty = record([], [])
    assert (empty.seqlen, empty.prompt_len) == (0, 0)


def test_lengths_must_agree() -> None:
    with pytest.raises(ValueError, match="3 token ids, 2 loss_mask"):
        record([0, 1], [-1, 0], ids=[1, 2, 3])


KEYS = {
    *("task_id", "sample_idx", "seqlen", "prompt_len", "head_version", "tail_version"),
    *("version_rle", "reward", "prompt", "completion"),
}


def test_file_and_keys(tmp_path: Path) -> None:
    """The folder is the greatest version of the whole batch; rows keep their own."""
    dump = TrajectoryDump(tmp_path / "exp" / "trial", words)
    rows = table([0, 1, 0, 1], [0, 1], versions=[[-1, 5, -1, 4], [-1, 3, -1, -1]])
    path = dump.write(42, rows, version=9)
    assert path == tmp_path / "exp" / "trial" / "rollout" / "5" / "42.jsonl"
    first, second = map(json.loads, path.read_text().splitlines())
    assert set(first) == KEYS | {"segments"} and set(second) == KEYS
    assert first["version_rle"] == [[5, 1], [4, 1]]
    assert first["segments"][0] == {"role": "prompt", "len": 1, "text": "10"}
    assert (second["sample_idx"], second["seqlen"], second["tail_version"]) == (1, 2, 3)
    assert second["completion"] == "11"
    again = read_dump(path)
    assert [one.sample_idx for one in again] == [0, 1]
    assert again[0].segments is not None and again[0].segments[1].role == "gen"


def test_no_versions_is_the_version_of_the_engine(tmp_path: Path) -> None:
    path = TrajectoryDump(tmp_path, words).write("t", table([0, 1, 1]), version=7, scope="eval")
    assert path == tmp_path / "eval" / "7" / "t.jsonl"
    assert read_dump(path)[0].version_rle == ((7, 2),)


def test_normalised_rewards_and_nan(tmp_path: Path) -> None:
    """case B167: a reward that is not finite is null."""
    rows = table([0, 1], [0, 1], rewards=[-1.0, float("nan")], original_rewards=[0.5, 0.0])
    path = TrajectoryDump(tmp_path, words).write(0, rows, version=0)
    assert path is not None
    first, second = read_dump(path)
    assert (first.reward, first.original_reward) == (-1.0, 0.5)
    assert second.reward is None


def test_orphans_and_errors_are_in_the_file(tmp_path: Path) -> None:
    dump = TrajectoryDump(tmp_path, words)
    path = dump.write(
        3, table([0, 1]), version=1, orphans=table([0, 1, 1]), errors=["agent raised KeyError"]
    )
    row, orphan, failed = read_dump(tmp_path)
    assert (row.orphan, orphan.orphan, failed.orphan) == (False, True, False)
    assert (row.reward, orphan.reward, failed.reward) == (1.0, None, None)
    assert (failed.error, failed.seqlen, failed.sample_idx) == ("agent raised KeyError", 0, 2)
    assert dump.write(3, None, version=1, errors=["again"]) == path


def test_exported_rows_are_read_back(tmp_path: Path) -> None:
    talk = Talk()
    talk.say("c1", [user("hi")], [20, 2], output_versions=[3, 3])
    talk.say("c2", [user("hi"), assistant("a"), user("yo")], [24, 2], output_versions=[3, 4])
    talk.cache.set_last_reward(1.0)
    rows = export_interactions(talk.cache, "concat")
    tensors: Any = pad_concat([row.to_tensor_dict() for row in rows.values()])  # type: ignore[misc]
    path = TrajectoryDump(tmp_path, talk.fmt.decode).write("t", tensors, version=4)
    assert path is not None
    (one,) = read_dump(path)
    assert one.version_rle == ((3, 3), (4, 1)) and one.reward == 1.0
    assert one.prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert one.segments is not None
    assert "".join(part.text for part in one.segments) == one.prompt + one.completion
    assert [part.len for part in one.segments] == [9, 2, 10, 2]


def broken(ids: Sequence[int]) -> str:
    raise RuntimeError("no such token")


@pytest.mark.parametrize(
    ("rows", "decode", "reason"),
    [
        (None, words, "there is no trajectory"),
        ({"input_ids": torch.ones(1, 2)}, words, "no attention_mask"),
        (table([0, 1]), broken, "no such token"),
        (
            {**table([0, 1]), "loss_mask": torch.ones(1, 1)},
            words,
            "row 0: ids, masks and versions have different lengths",
        ),
    ],
)
def test_failing_dump_is_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, rows: Any, decode: Any, reason: str
) -> None:
    dump = TrajectoryDump(tmp_path, decode)
    with caplog.at_level(logging.WARNING):
        assert dump.write("t", rows, version=0) is None
    assert len(caplog.records) == 1 and reason in caplog.text
    assert list(tmp_path.rglob("*.jsonl")) == []


def test_folder_that_cannot_be_made(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "rollout").write_text("a file")
    assert TrajectoryDump(tmp_path, words).write("t", table([0, 1]), version=0) is None
    assert "not dumped" in caplog.text


def test_without_tokenizer_nothing_is_dumped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dump = TrajectoryDump(tmp_path, None)
    for _ in range(3):
        assert dump.write("t", table([0, 1]), version=0) is None
    assert len(caplog.records) == 1 and "no tokenizer" in caplog.text


@pytest.mark.parametrize(
    "task_id",
    [
        *("../../tmp/x", "/etc/x", "a\\..\\b", "%2e%2e%2f", "", ".", "..", "a\x00b", "x" * 5000),
        *("CON", "con.txt", "-rf", ".hidden", "a b", "ä", "a/b", "a:b", "trailing.", "\ud800"),
    ],
)
def test_no_id_leaves_the_folder(tmp_path: Path, task_id: str) -> None:
    """case B175: a safe name whatever the id; the record keeps the id itself."""
    path = TrajectoryDump(tmp_path, words).write(task_id, table([0, 1]), version=0)
    assert path is not None and path.parent == tmp_path / "rollout" / "0"
    assert path.resolve().is_relative_to(tmp_path.resolve()) and path.is_file()
    assert len(path.name) < 100 and path.name != "CON.jsonl"


def test_two_ids_never_share_a_file() -> None:
    """case B175: ids that would be cleaned to the same name."""
    ids = ["a/b", "a_b", "a\\b", "a:b", "..", ".", "", "_", "x" * 300, "x" * 301, "0", "a_b.c"]
    assert len({safe_name(one) for one in ids}) == len(ids)
    forged = safe_name("a/b")
    assert safe_name(forged) != forged
    assert [safe_name(one) for one in (42, "42", "task-1_x.y")] == ["42", "42", "task-1_x.y"]


TASK_IDS = ["a/b", "..", "y" * 300, 0]
WRITER = f"""
import numpy as np, sys
from agent_rl.record.dump import TrajectoryDump
dump = TrajectoryDump(sys.argv[1], lambda ids: " ".join(map(str, ids)))
rows = {{
    "input_ids": np.arange(16).reshape(4, 4),
    "attention_mask": np.ones((4, 4), bool),
    "loss_mask": np.tile([0, 1, 0, 1], (4, 1)),
    "rewards": np.ones(4),
}}
for step in range(3):
    for task_id in {TASK_IDS!r}:
        dump.write(task_id, rows, version=step)
"""


def test_processes_share_a_dump(tmp_path: Path) -> None:
    """case B170: 2 processes x 4 tasks x group of 4, three steps: 96 whole records."""
    workers = [subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)]) for _ in range(2)]
    assert [worker.wait() for worker in workers] == [0, 0]
    for step in range(3):
        records = read_dump(tmp_path / "rollout" / str(step))
        assert len(records) == 32
        assert {one.task_id for one in records} == set(TASK_IDS)
        assert sorted(one.sample_idx for one in records) == sorted([0, 1, 2, 3] * 8)
        assert all(one.segments and one.head_version == step for one in records)
    assert len(read_dump(tmp_path)) == 96


def test_reading_what_is_no_dump(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="no dump"):
        read_dump(tmp_path / "nothing")
    (tmp_path / "x.jsonl").write_text('{"task_id": 1}\n')
    with pytest.raises(DatasetError, match=r"x\.jsonl:1 is not a trajectory record"):
        read_dump(tmp_path)
