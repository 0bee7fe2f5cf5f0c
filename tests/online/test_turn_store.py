"""Stored turns: redacted, bounded in age and number, deleted on request, never half a file."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from agent_rl.config import PrivacyConfig
from agent_rl.online import disk_thread
from agent_rl.online.turn_store import TurnStore
from agent_rl.record.jsonl import append_lines, json_line, read_lines

DAY_S = 86_400.0


def row(number: int, *, age_days: float = 0.0, **fields: object) -> dict:
    owner = {"session_id": f"s{number}", "user_ids": [f"u{number % 2}"]}
    return {"time": time.time() - age_days * DAY_S, "turn": number, **owner, **fields}


def turns(path: Path) -> list[int]:
    return [stored["turn"] for _, stored in read_lines(path)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "turns.jsonl"


def test_rows_are_redacted_before_they_are_written(path: Path) -> None:
    store = TurnStore(path, PrivacyConfig())
    store.append(row(1, answer="mail ann@x.org", votes=[1, None]))
    store.close()
    (stored,) = [stored for _, stored in read_lines(path)]
    assert (stored["answer"], stored["votes"]) == ("mail [email]", [1, None])
    assert path.stat().st_mode & 0o777 == 0o600


def test_redaction_can_be_off_or_the_users_own(path: Path, tmp_path: Path) -> None:
    plain = TurnStore(path, PrivacyConfig(redact=False))
    plain.append(row(1, answer="ann@x.org"))
    plain.close()
    assert "ann@x.org" in path.read_text(encoding="utf-8")
    own = TurnStore(tmp_path / "own.jsonl", PrivacyConfig(), redactor=lambda text: text.upper())
    own.append(row(1, answer="hello"))
    own.close()
    assert '"HELLO"' in (tmp_path / "own.jsonl").read_text(encoding="utf-8")


def test_so_many_rows_are_kept(path: Path) -> None:
    store = TurnStore(path, PrivacyConfig(keep_rows=3))
    for number in range(600):
        store.append(row(number))
    store.close()
    assert turns(path) == [597, 598, 599]


def test_old_rows_are_gone_when_the_store_opens_and_when_it_closes(path: Path) -> None:
    old = [row(number, age_days=10.0 - number) for number in range(5)]  # 10, 9, 8, 7, 6 days
    append_lines(path, [json_line(stored) for stored in old])
    store = TurnStore(path, PrivacyConfig(keep_days=7.5))
    store.append(row(9))
    store.close()
    assert turns(path) == [3, 4, 9]


def test_old_rows_are_gone_while_nobody_writes(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_thread, "_TIDY_EVERY_S", 0.01)
    store = TurnStore(path, PrivacyConfig(keep_days=7))
    store.append(row(1, age_days=8))
    store.append(row(2))
    while 1 in (turns(path) if path.exists() else [1]):
        time.sleep(0.01)
    store.close()
    assert turns(path) == [2]


def test_delete_by_session_and_by_user(path: Path) -> None:
    store = TurnStore(path, PrivacyConfig())
    for number in range(6):
        store.append(row(number))
    assert store.delete(session_id="s3") == 1
    assert store.delete(user_id="u0") == 3
    assert store.delete(user_id="nobody") == 0
    store.close()
    assert turns(path) == [1, 5]
    for ids in ({}, {"session_id": "s1", "user_id": "u1"}):
        with pytest.raises(ValueError, match="one of both"):
            store.delete(**ids)


def test_an_id_that_is_personal_data_is_not_written_and_still_found(path: Path) -> None:
    store = TurnStore(path, PrivacyConfig())
    names = ["ann@x.org", "bob@y.org", "plain"]
    for number, name in enumerate(names):
        store.append({**row(number), "user_ids": [name, "other"]})
    assert store.delete(user_id="ann@x.org") == 1
    assert "@" not in path.read_text(encoding="utf-8")
    assert store.delete(user_id="plain") == 1
    store.close()
    assert turns(path) == [1]


def test_ids_are_data_and_never_a_path(path: Path) -> None:
    """Case B175: whatever a session is called, there is one file."""
    store = TurnStore(path, PrivacyConfig())
    names = ["../../tmp/x", "/etc/x", "a\\..\\b", "%2e%2e%2f", "", "\0", "x" * 5000, "CON"]
    for number, name in enumerate(names):
        store.append({**row(number), "session_id": name})
    assert [store.delete(session_id=name) for name in names[:-1]] == [1] * 7
    store.close()
    assert [file.name for file in path.parent.iterdir()] == ["turns.jsonl"]
    assert turns(path) == [7]


def test_a_disk_that_fails_is_reported_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way", encoding="utf-8")
    store = TurnStore(tmp_path / "file" / "turns.jsonl", PrivacyConfig())
    store.append(row(1))
    store.append(row(2))
    store.close()
    assert caplog.text.count("not everything is written") == 1


def test_a_line_that_is_none_of_ours_is_left_out_when_rows_are_dropped(path: Path) -> None:
    append_lines(path, ["not json\n", '{"turn": 0}\n', json_line(row(1)), json_line(row(2))])
    store = TurnStore(path, PrivacyConfig(keep_rows=1, keep_days=1.0))
    store.close()
    assert turns(path) == [2]
