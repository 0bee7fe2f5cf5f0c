"""What a user sees: one line for each fault, exit codes, and what Ctrl-C leaves behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from agent_rl.cli import main

AGENT = """
class Echo:
    async def run(self, data, client):
        completion = await client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": data["q"]}]
        )
        return float(len(completion.choices[0].message.content or "") % 2)


class Broken:
    async def run(self, data, client):
        raise LookupError("the database is gone")


class Silent(Echo):
    async def run(self, data, client):
        await super().run(data, client)
"""


@pytest.fixture
def project(tmp_path: Path, tiny_model_dir: Path) -> Path:
    """A user's folder: an agent, a dataset, a config."""
    (tmp_path / "my_agents.py").write_text(AGENT)
    rows = "".join(json.dumps({"q": f"say {i}"}) + "\n" for i in range(8))
    (tmp_path / "train.jsonl").write_text(rows)
    (tmp_path / "ppo.yaml").write_text(
        f"tokenizer_path: {tiny_model_dir}\n"
        "train_dataset: train.jsonl\n"
        "total_train_steps: 1\n"
        "gconfig: {max_new_tokens: 4}\n"
        "rollout: {group_size: 2, consumer_batch_size: 2}\n"
    )
    return tmp_path


@pytest.fixture
def run(project: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """The command in this process, in the user's folder; returns the exit code."""
    monkeypatch.chdir(project)
    monkeypatch.setattr(sys, "path", [*sys.path])

    def run_main(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["agent-rl", *arguments])
        with pytest.raises(SystemExit) as caught:
            main()
        assert isinstance(caught.value.code, int)
        return caught.value.code

    return run_main


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["nowhere.yaml"], 2, "cannot read the config nowhere.yaml"),
        (["ppo.yaml", "rollout.groupsize=3"], 2, "did you mean 'group_size'"),
        (["ppo.yaml", "tokenizer_path=/nowhere"], 2, "tokenizer_path=/nowhere: there is no folder"),
        (["ppo.yaml", "actor.path=gone"], 2, "actor.path=gone: there is no folder gone; give"),
        (["ppo.yaml", "train_dataset=gone.jsonl"], 2, "gone.jsonl does not exist"),
        (["ppo.yaml", "--workflow", "my_agents.Nobody"], 2, "--workflow='my_agents.Nobody': "),
        (["ppo.yaml", "--eval-workflow", "nothing.Here"], 2, "--eval-workflow='nothing.Here': "),
        (["ppo.yaml", "--workflow", "my_agents.Broken"], 1, "the database is gone"),
        (["ppo.yaml", "--workflow", "my_agents.Silent"], 1, "no_reward"),
        (["ppo.yaml", "fileroot=train.jsonl"], 1, "cannot write the run's folder"),
    ],
)
def test_a_fault_is_one_line(
    run: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    code: int,
    message: str,
) -> None:
    assert run("train", "--workflow", "my_agents.Echo", *arguments) == code
    errors = capsys.readouterr().err
    assert errors.count("\n") == 1, errors
    assert message in errors


def test_slips_of_the_pen_are_found_before_torch_is_loaded(project: Path) -> None:
    """And they leave no run behind."""
    program = (
        "import sys\nimport agent_rl.cli as cli\n"
        "try:\n    cli.main()\n"
        "finally:\n    print([name for name in ('torch', 'transformers') if name in sys.modules])\n"
    )
    command = ["train", "ppo.yaml", "--workflow", "my_agents.Echo"]
    for slip in (
        ["--workflow", "my_agents.Eco"],
        ["actor.path=gone"],
        ["train_dataset=gone.jsonl"],
    ):
        done = subprocess.run(
            [sys.executable, "-c", program, *command, *slip],
            cwd=project,
            capture_output=True,
            text=True,
        )
        assert (done.returncode, done.stdout) == (2, "[]\n"), done.stderr
    assert not (project / "runs").exists()


def test_the_small_model_has_a_name_everywhere(
    run: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    """``small`` is accepted as a model by each command; what fails here is something else."""
    assert run("certify", "small") == 0
    assert run("plan", "small") == 0
    workflow = ["--workflow", "my_agents.Echo"]
    capsys.readouterr()
    assert run("train", "ppo.yaml", *workflow, "tokenizer_path=small", "ref.path=small") == 2
    assert "ref has no effect" in capsys.readouterr().err


def test_an_agent_is_needed_unless_users_are_served(
    run: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("train", "ppo.yaml") == 2
    assert "--workflow PKG.MOD.NAME is missing" in capsys.readouterr().err
    online = ["rollout.agent.mode=online", "tokenizer_path=/nowhere"]
    assert run("train", "ppo.yaml", *online) == 2
    assert "there is no folder /nowhere" in capsys.readouterr().err


def test_help_shows_examples(run: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("demo", "train", "serve", "plan", "certify"):
        assert run(command, "--help") == 0
        assert f"Example: agent-rl {command}" in capsys.readouterr().out


def test_wrong_usage_is_the_users_input(run: Callable[..., int]) -> None:
    assert run("train", "ppo.yaml") == 2
    assert run("nonsense") == 2
    assert run() == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_keeps_a_checkpoint_and_ends_the_process(
    project: Path, number: signal.Signals
) -> None:
    command = [sys.executable, "-m", "agent_rl.cli", "train", "ppo.yaml"]
    process = subprocess.Popen(
        [*command, "--workflow", "my_agents.Echo", "total_train_steps=1000"],
        cwd=project,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step 2/"):
            process.send_signal(number)
            break
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert "the checkpoint is in" in errors
    assert (project / "runs/agent_rl/trial/checkpoints/interrupted/model.safetensors").exists()


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--steps", "this one is total_train_steps."),
        ("--num-generations", "this one is rollout.group_size."),
        ("--rollout.group-size", "this one is rollout.group_size."),
        ("--sed", "Did you mean '--seed'?"),
        ("--workers", "No such option '--workers'.\n"),
    ],
)
def test_an_option_that_is_none_is_answered_with_what_was_meant(
    run: Callable[..., int], capsys: pytest.CaptureFixture[str], option: str, said: str
) -> None:
    assert run("demo", option, "3") == 2
    shown = capsys.readouterr().err
    assert said in shown and "--help'?" not in shown
