"""The whole demo on a tiny random model: everything but the learning."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agent_rl.demo.runner import run_demo
from agent_rl.errors import ConfigError
from agent_rl.record import read_dump
from agent_rl.stats.jsonl import read_metrics


def test_a_wrong_override_leaves_the_earlier_run_alone(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("seed: 1\n")
    (tmp_path / "summary.json").write_text("{}")
    with pytest.raises(ConfigError, match="no_such_key"):
        run_demo(seed=1, out=tmp_path, overrides=["no_such_key=1"])
    assert (tmp_path / "summary.json").exists()


def test_the_demo_writes_what_it_promises(
    tmp_path: Path, tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "demo"
    summary = run_demo(
        seed=3,
        out=out,
        overrides=[
            f"tokenizer_path={tiny_model_dir}",
            "total_train_steps=2",
            "rollout.consumer_batch_size=2",
            "rollout.group_size=2",
            "gconfig.max_new_tokens=3",
        ],
    )
    printed = capsys.readouterr().out
    assert "step 2/2: reward 0; " in printed
    assert printed.count("held-out task 1") == 2, "one conversation before, one after"

    written = json.loads((out / "summary.json").read_text())
    names = {"reward_before", "reward_after", "heldout_before", "heldout_after"}
    assert names | {"steps", "wall_s", "tokens_trained", "seed"} <= written.keys()
    assert (written["steps"], written["seed"]) == (2, 3)
    assert written["tokens_trained"] == summary.tokens_trained > 0
    assert [row["step"] for row in read_metrics(out / "metrics.jsonl")] == [0, 1]
    assert (out / "config.yaml").is_file() and (out / "checkpoints" / "step2").is_dir()
    assert (out / "reward.png").read_bytes().startswith(b"\x89PNG")
    records = [r for file in (out / "rollout").rglob("*.jsonl") for r in read_dump(file)]
    assert len(records) == 8
