"""One thread for one file: in order, and what goes wrong is told once."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent_rl.config import PrivacyConfig
from agent_rl.online.disk_thread import DiskThread
from agent_rl.online.turn_store import TurnStore


def test_in_order_and_tidied_at_both_ends() -> None:
    done: list[object] = []
    disk = DiskThread("t", Path("x"), tidy=lambda: done.append("tidy"), is_timed=False)
    for number in range(3):
        disk.soon(lambda number=number: done.append(number))
    assert disk.now(lambda: list(done)) == ["tidy", 0, 1, 2]
    disk.close()
    assert done == ["tidy", 0, 1, 2, "tidy"]


def test_what_is_asked_for_at_once_is_raised_and_not_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    disk = DiskThread("t", Path("x"), tidy=lambda: None, is_timed=True)
    with pytest.raises(ZeroDivisionError):
        disk.now(lambda: 1 // 0)
    disk.close()
    assert caplog.text == ""


def test_a_redactor_that_fails_is_not_ignored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Turns went missing without a word where a redactor of the user's own raised."""

    def broken(text: str) -> str:
        raise KeyError(f"no rule for {len(text)}")

    store = TurnStore(tmp_path / "turns.jsonl", PrivacyConfig(), redactor=broken)
    for _ in range(2):
        store.append({"session_id": "s", "user_ids": [], "answer": "hi"})
    store.close()
    assert caplog.text.count("not everything is written to") == 1
    assert "no rule for" in caplog.text and "Traceback" in caplog.text
    assert not (tmp_path / "turns.jsonl").exists()
