"""The examples as scripts: a step on a tiny model, and two of the real small one."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parent.parent.parent / "examples" / "frameworks"
NEEDS = {
    "anthropic": "anthropic",
    "langchain": "langchain_core",
    "langgraph": "langgraph",
    "mcp": "mcp.server.mcpserver",
    "openai_agents": "agents",
    "pydantic_ai": "pydantic_ai",
}


def run(name: str, monkeypatch: pytest.MonkeyPatch, folder: Path, *overrides: str) -> list[Any]:
    """The metrics of each step."""
    pytest.importorskip(NEEDS[name])
    script = str(EXAMPLES / f"{name}_agent.py")
    monkeypatch.setattr(sys, "argv", [script, f"fileroot={folder}", *overrides])
    runpy.run_path(script, run_name="__main__")
    (log,) = folder.rglob("metrics.jsonl")
    return [json.loads(line) for line in log.read_text().splitlines()]


@pytest.mark.parametrize("name", sorted(NEEDS))
def test_a_step_of_a_tiny_model(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_model_dir: Path
) -> None:
    tiny = (f"tokenizer_path={tiny_model_dir}", "rollout.group_size=2", "gconfig.max_new_tokens=4")
    (step,) = run(name, monkeypatch, tmp_path, *tiny, "total_train_steps=1")
    assert step["rollout/num_turns"] == 2.0  # a question each, no tool call out of noise
    assert step["rollout/failed"] == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["langchain", "openai_agents"])
def test_two_steps_of_the_small_model(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    steps = run(name, monkeypatch, tmp_path)
    assert [step["step"] for step in steps] == [0, 1]
    for step in steps:
        assert step["rollout/num_turns"] >= 2.0
        assert step["rollout/failed"] == 0.0
