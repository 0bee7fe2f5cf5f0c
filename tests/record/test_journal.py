from __future__ import annotations

import logging
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent_rl.errors import JournalError
from agent_rl.record.journal import Journal


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    with Journal(tmp_path / "run" / "rollout.journal") as opened:
        yield opened


def read(journal: Journal) -> list[object]:
    return list(Journal.read(journal.path))


def test_entries_come_back_in_order(journal: Journal) -> None:
    entries = [{"n": 1, "x": 0.1}, {"text": "a\u2028b\n\x85 \ud800"}, {"ids": [1, 2], "no": None}]
    for entry in entries:
        journal.append(entry)
    assert read(journal) == entries


def test_there_is_nothing_in_a_file_that_is_not_there(tmp_path: Path) -> None:
    assert list(Journal.read(tmp_path / "none")) == []


def test_an_entry_is_in_the_file_when_append_returns(journal: Journal) -> None:
    journal.append({"n": 1})
    assert journal.path.read_bytes() == b'd44b3b7e {"n":1}\n'


def test_a_new_writer_goes_on(journal: Journal) -> None:
    journal.append({"n": 1})
    journal.close()
    with Journal(journal.path, fsync="never") as again:
        again.append({"n": 2})
    assert read(journal) == [{"n": 1}, {"n": 2}]


@pytest.mark.parametrize("num_left", range(1, 30))
def test_a_torn_last_entry_is_dropped(
    journal: Journal, num_left: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Case B168: a half-written last line after a crash is skipped with a warning."""
    journal.append({"n": 1})
    size = journal.path.stat().st_size
    journal.append({"torn": "x" * 20})
    journal.close()
    data = journal.path.read_bytes()
    journal.path.write_bytes(data[: size + num_left])
    with caplog.at_level(logging.WARNING):
        assert read(journal) == [{"n": 1}]
    assert f"{num_left} bytes of a torn entry" in caplog.text
    with Journal(journal.path) as again:
        again.append({"n": 2})
    assert read(journal) == [{"n": 1}, {"n": 2}]


def test_a_last_entry_with_a_hole_is_torn_too(journal: Journal) -> None:
    """A power failure may keep the last page of an entry and lose the one before it."""
    journal.append({"n": 1})
    size = journal.path.stat().st_size
    journal.append({"n": 2})
    data = bytearray(journal.path.read_bytes())
    data[size + 3] ^= 1
    journal.path.write_bytes(data)
    assert read(journal) == [{"n": 1}]


def test_damage_before_the_end_is_an_error_that_names_file_and_offset(journal: Journal) -> None:
    journal.append({"n": 1})
    size = journal.path.stat().st_size
    journal.append({"n": 2})
    journal.append({"n": 3})
    journal.close()
    data = bytearray(journal.path.read_bytes())
    data[size + 12] ^= 1
    journal.path.write_bytes(data)
    with pytest.raises(JournalError, match=rf"rollout.journal is damaged at byte {size}, before"):
        list(Journal.read(journal.path))
    with pytest.raises(JournalError, match="is damaged at byte"):
        Journal(journal.path)
    assert journal.path.read_bytes() == data, "nothing was cut off"


def test_rewrite_replaces_everything(journal: Journal) -> None:
    for number in range(5):
        journal.append({"n": number})
    journal.rewrite(entry for entry in Journal.read(journal.path) if entry["n"] >= 3)
    journal.append({"n": 5})
    assert read(journal) == [{"n": 3}, {"n": 4}, {"n": 5}]
    assert sorted(path.name for path in journal.path.parent.iterdir()) == [
        "rollout.journal",
        "rollout.journal.lock",
    ]


def test_a_failed_rewrite_keeps_the_old_entries(journal: Journal) -> None:
    journal.append({"n": 1})
    with pytest.raises(JournalError, match="cannot be written as JSON"):
        journal.rewrite([{"n": 2}, {"x": object()}])
    journal.append({"n": 3})
    assert read(journal) == [{"n": 1}, {"n": 3}]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), object(), b"bytes"])
def test_what_is_not_json_is_refused_and_nothing_is_appended(
    journal: Journal, value: object
) -> None:
    journal.append({"n": 1})
    with pytest.raises(JournalError, match="cannot be written as JSON"):
        journal.append({"value": value})
    assert read(journal) == [{"n": 1}]


def test_there_is_one_writer(journal: Journal) -> None:
    with pytest.raises(JournalError, match=r"another writer has the journal .*rollout.journal"):
        Journal(journal.path)
    journal.append({"n": 1})
    journal.close()
    journal.close()
    Journal(journal.path).close()


def test_a_killed_writer_leaves_no_lock(tmp_path: Path) -> None:
    path = tmp_path / "j"
    code = (
        "import os, signal, sys; from agent_rl.record.journal import Journal\n"
        "j = Journal(sys.argv[1]); j.append({'n': 1}); os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], check=False)
    assert done.returncode == -9
    with Journal(path) as journal:
        assert read(journal) == [{"n": 1}]


def test_a_closed_journal_says_so(journal: Journal) -> None:
    journal.close()
    with pytest.raises(JournalError, match="is closed"):
        journal.append({"n": 1})
    with pytest.raises(JournalError, match="is closed"):
        journal.rewrite([])


def test_what_the_system_refuses_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(JournalError, match=r"the journal .*file/j cannot be written"):
        Journal(tmp_path / "file" / "j")


def test_threads_do_not_tear_entries(journal: Journal) -> None:
    def write(name: int) -> None:
        for number in range(50):
            journal.append({"thread": name, "n": number, "x": "y" * 1000})

    threads = [threading.Thread(target=write, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    entries = list(Journal.read(journal.path))
    for name in range(4):
        assert [e["n"] for e in entries if e["thread"] == name] == list(range(50))


def test_fsync_is_always_or_never(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="fsync is 'sometimes'; use 'always' or 'never'"):
        Journal(tmp_path / "j", fsync="sometimes")  # type: ignore[arg-type]
