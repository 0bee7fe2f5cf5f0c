"""``agent-rl serve``: what it prints, that it answers, learns, and ends."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from io import StringIO
from pathlib import Path

import httpx
import openai
import pytest
from rich.console import Console
from transformers import AutoTokenizer

from agent_rl import ScriptedEngine, small_model
from agent_rl.config import GatewayConfig
from agent_rl.errors import ConfigError, ModelLoadError
from agent_rl.gateway.server import Gateway
from agent_rl.record.journal import Journal
from agent_rl.serve import announce, gateway_line, keep_heap, serve, serve_config

COMMAND = [sys.executable, "-m", "agent_rl.cli", "serve", "--port", "0"]


@contextmanager
def serving(folder: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], str, str]]:
    """The process, and the URL and key that it prints. Its errors go to ``errors.txt``."""
    with (folder / "errors.txt").open("w", encoding="utf-8") as errors:
        process = subprocess.Popen(
            [*COMMAND, *arguments],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    try:
        lines = []
        while not lines or "Ctrl-C" not in lines[-1]:
            line = process.stdout.readline()
            assert line, (folder / "errors.txt").read_text(encoding="utf-8")
            lines.append(line)
        values = {line[:12].strip(): line[12:].strip() for line in lines}
        yield process, values["serving at"], values["api key"]
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def rest_of(process: subprocess.Popen[str], folder: Path) -> tuple[str, str]:
    """What it printed after its address, and its errors. ``communicate`` would lose lines here."""
    output = process.stdout.read()
    process.wait()
    return output, (folder / "errors.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_serving_until_interrupted(
    tiny_model_dir: Path, tmp_path: Path, number: signal.Signals
) -> None:
    with serving(tmp_path, "--model", str(tiny_model_dir)) as (process, url, key):
        assert httpx.post(f"{url}/chat/completions", json={}).status_code == 401
        with openai.OpenAI(base_url=url, api_key=key) as client:
            completion = client.chat.completions.create(
                model="any", messages=[{"role": "user", "content": "hi"}], max_tokens=3
            )
        assert completion.usage.completion_tokens >= 1
        process.send_signal(number)
        _, errors = rest_of(process, tmp_path)
        assert (process.returncode, errors.strip()) == (0, "stopped")


def learn(
    folder: Path, model: Path, *settings: str, stops: bool = True, is_killed: bool = False
) -> str:
    """What a server printed that learnt from one conversation of two turns.

    It ends by itself, or is interrupted once it has learnt, or killed once both are on disk.
    """
    options = [
        *("--model", str(model), "--learn", "binary", "rollout.consumer_batch_size=2"),
        *("online.judge.votes=1", "online.judge.max_tokens=4", "engine.max_seq_len=1024"),
    ]
    with serving(folder, *options, "fileroot=out", *settings) as (process, url, key):
        headers = {"X-Session-Id": "ann"}
        with openai.OpenAI(base_url=url, api_key=key, default_headers=headers) as client:
            messages = []
            for number in range(2):
                messages.append({"role": "user", "content": f"hi {number}"})
                completion = client.chat.completions.create(
                    model="any",
                    messages=messages,
                    max_tokens=3,
                    extra_headers={"X-Session-Done": str(number == 1).lower()},
                )
                message = completion.choices[0].message
                messages.append({"role": "assistant", "content": message.content})
        while is_killed and num_samples(folder) < 2:
            time.sleep(0.01)
        if is_killed:
            return ""
        learnt = ""
        while not stops and "version" not in learnt:
            learnt = process.stdout.readline()
        if not stops:
            process.send_signal(signal.SIGINT)
        output, errors = rest_of(process, folder)
    assert process.returncode == 0, errors
    return learnt + output


def num_samples(folder: Path) -> int:
    path = folder / "out" / "serve" / "trial" / "samples.journal"
    return sum("sample" in entry for entry in Journal.read(path))


def test_learning_from_a_conversation(tiny_model_dir: Path, tmp_path: Path) -> None:
    """One step of two turns: a line with the step's figures, checkpoint, metrics and turns."""
    output = learn(tmp_path, tiny_model_dir, "total_train_steps=1")
    assert "learning from conversations: binary, 2 turns a step -> out/serve/trial/" in output
    assert "turns 2 (0 being judged)" in output
    assert "votes 1 (0 failed)" in output
    assert "version 1" in output
    assert "finished: 1 steps; checkpoint in out/serve/trial/checkpoints/step1/; " in output
    run = tmp_path / "out" / "serve" / "trial"
    assert (run / "checkpoints" / "step1" / "model.safetensors").exists()
    assert "online/score" in (run / "metrics.jsonl").read_text(encoding="utf-8")
    assert len((run / "turns.jsonl").read_text(encoding="utf-8").splitlines()) == 2


@pytest.mark.slow
def test_served_again_it_goes_on_from_what_it_learnt(tiny_model_dir: Path, tmp_path: Path) -> None:
    """Ctrl-C after step 1: the second process starts at version 1 and makes step 2."""
    assert "version 1" in learn(tmp_path, tiny_model_dir, stops=False)
    run = tmp_path / "out" / "serve" / "trial"
    learnt = run / "checkpoints" / "interrupted" / "model.safetensors"
    assert learnt.read_bytes() != (tiny_model_dir / "model.safetensors").read_bytes()
    assert "version 2" in learn(tmp_path, tiny_model_dir, "total_train_steps=2")
    checkpoints = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert checkpoints == ["interrupted", "step2"]
    assert [path.name for path in run.parent.iterdir()] == ["trial"]
    assert (run / "metrics.jsonl").read_text(encoding="utf-8").count('"step": ') == 2


def test_the_line_of_a_server_that_learns_nothing() -> None:
    tokenizer = AutoTokenizer.from_pretrained(small_model())
    engine = ScriptedEngine(["four"], tokenizer=tokenizer, repeat=True)
    with Gateway(engine, tokenizer).run_in_thread() as gateway:
        assert gateway_line(gateway) == "sessions 0  requests 0 (0 running)"
        headers = {"x-api-key": gateway.api_key, "x-session-id": "ann"}
        for messages in ([], [{"role": "user", "content": "hi"}]):
            url, body = f"{gateway.base_url}/chat/completions", {"messages": messages}
            httpx.post(url, json=body, headers=headers)
        while gateway.num_answered < 2:
            time.sleep(0.001)
        assert gateway_line(gateway) == "sessions 1  requests 2 (0 running)"


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"learn": None}, "there is no folder nowhere"),
        ({"learn": "binary"}, "there is no folder nowhere"),
        ({"learn": None, "overrides": ["onlin.method=opd"]}, "did you mean 'online'"),
        ({"learn": "magic"}, "'online.method' = 'magic'"),
        (
            {"learn": None, "overrides": ["gateway.model=x", "online.judge.votes=3"]},
            "online.judge.votes has no effect where nothing is learnt: give --learn",
        ),
        ({"learn": None, "overrides": ["engine={backend: local}"]}, "engine has no effect"),
    ],
)
def test_wrong_input_is_a_typed_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict, complaint: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises((ConfigError, ModelLoadError), match=complaint):
        serve(serve_config("nowhere", **options))


def test_an_address_that_others_can_reach_needs_a_key(tiny_model_dir: Path) -> None:
    """Case B173."""
    with pytest.raises(ConfigError, match=r"gateway\.admin_key or gateway\.api_key"):
        serve(serve_config(str(tiny_model_dir), learn=None, host="0.0.0.0"))


def test_each_method_has_settings_that_can_teach() -> None:
    for learn, weight in [("binary", 0.0), ("opd", 1.0), ("combine", 1.0)]:
        config = serve_config("x", learn=learn)
        assert config.online.method == learn
        assert config.actor.distillation.weight == weight
        assert not config.actor.reward_norm.uses_group_statistics
    assert serve_config("x", learn=None).rollout.agent.mode == "inline"
    assert serve_config("x", learn="opd", overrides=["seed=7"]).seed == 7
    assert serve_config("x", learn=None, overrides=["gateway={model: y}"]).gateway.model == "y"
    with pytest.raises(ConfigError, match="unknown config key"):
        serve_config("x", learn=None, overrides=["port=1"])


@pytest.mark.slow
def test_killed_before_it_learnt_it_finds_what_was_judged(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    """kill -9 with two judged turns of four: served again, two more are a step."""
    settings = ("rollout.consumer_batch_size=4", "total_train_steps=1")
    learn(tmp_path, tiny_model_dir, *settings, is_killed=True)
    output = learn(tmp_path, tiny_model_dir, *settings)
    assert "version 1" in output
    errors = (tmp_path / "errors.txt").read_text(encoding="utf-8")
    assert "2 judged samples of an earlier process wait" in errors
    assert [path.name for path in (tmp_path / "out" / "serve").iterdir()] == ["trial"]
    assert num_samples(tmp_path) == 0


def test_what_is_loaded_is_not_looked_at_by_every_collection() -> None:
    """A full collection of a server's heap held up every user for a quarter of a second."""
    before = gc.get_freeze_count()
    try:
        keep_heap()
        assert gc.get_freeze_count() > before + 10_000
        assert len(gc.get_objects()) < 10_000
    finally:
        gc.unfreeze()


def test_keys_that_somebody_chose_are_not_printed() -> None:
    """What is printed ends up in logs."""
    tokenizer = AutoTokenizer.from_pretrained(small_model())
    engine = ScriptedEngine([], tokenizer=tokenizer)
    for config in (GatewayConfig(api_key="chosen-one"), GatewayConfig(admin_key="chosen-two")):
        out = StringIO()
        with Gateway(engine, tokenizer, config).run_in_thread() as gateway:
            announce(Console(file=out), gateway)
        shown = [key for key in (gateway.api_key, gateway.admin_key) if key in out.getvalue()]
        assert len(shown) == 1 and "chosen" not in shown[0]
