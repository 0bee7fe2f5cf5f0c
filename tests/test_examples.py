"""The examples run; training ones on a tiny model and for one step."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(name: str, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")


def test_quickstart(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run("quickstart.py", monkeypatch)
    printed = capsys.readouterr().out
    assert "user: And of Italy?\nassistant: The capital of Italy is Rome.\n" in printed
    assert "log-probs" in printed and "concat: row chatcmpl-" in printed


def test_ppo(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    tiny_model_dir: Path,
) -> None:
    overrides = ["total_train_steps=1", f"fileroot={tmp_path}", f"tokenizer_path={tiny_model_dir}"]
    run("ppo.py", monkeypatch, *overrides)
    printed = capsys.readouterr().out
    assert "step 1: reward" in printed and "held-out after: " in printed
