"""Examples train the real small model: its own calls, rows and gradients."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent.parent / "examples" / "frameworks"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "needs"), [("langchain", "langchain_core"), ("openai_agents", "agents")]
)
def test_two_steps(name: str, needs: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip(needs)
    script = str(EXAMPLES / f"{name}_agent.py")
    monkeypatch.setattr(sys, "argv", [script, f"fileroot={tmp_path}"])
    runpy.run_path(script, run_name="__main__")
    (log,) = tmp_path.rglob("metrics.jsonl")
    steps = [json.loads(line) for line in log.read_text().splitlines()]
    assert [step["step"] for step in steps] == [0, 1]
    for step in steps:
        assert step["rollout/num_turns"] >= 2.0
        assert step["rollout/failed"] == 0.0
