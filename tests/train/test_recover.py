"""A restarted run goes on where it stopped, to the last bit; what it cannot use is an error."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from agent_rl import PPOConfig, PPOTrainer, load_config
from agent_rl.engine.scripted import ScriptedEngine
from agent_rl.errors import CheckpointError
from agent_rl.stats.jsonl import read_metrics
from agent_rl.train.trainer import StepReport

ROWS = [{"question": f"say {index}"} for index in range(6)]
QUESTIONS: list[str] = []


class ConcurrentAgent:
    """Two turns, scored by what a random model writes."""

    async def begin(self, question: str) -> None:
        QUESTIONS.append(question)

    async def run(self, data: dict[str, Any], client: Any) -> float:
        await self.begin(data["question"])
        messages = [{"role": "user", "content": data["question"]}]
        first = await client.chat.completions.create(model="m", messages=messages)
        messages += [first.choices[0].message, {"role": "user", "content": "again"}]
        second = await client.chat.completions.create(model="m", messages=messages)
        return len(second.choices[0].message.content) / 100.0


class LetterAgent(ConcurrentAgent):
    """One episode at a time: what the engine finds in its caches is the same in every run."""

    def __init__(self) -> None:
        self.one_at_a_time = asyncio.Lock()

    async def run(self, data: dict[str, Any], client: Any) -> float:
        async with self.one_at_a_time:
            return await super().run(data, client)


class Crash(Exception):
    pass


@pytest.fixture(autouse=True)
def no_questions() -> None:
    QUESTIONS.clear()


def config_of(model: Path, root: Path, *overrides: str) -> PPOConfig:
    return load_config(
        None,
        [
            f"tokenizer_path={model}",
            f"fileroot={root}",
            "experiment_name=exp",
            "trial_name=one",
            "total_train_steps=5",
            "rollout={consumer_batch_size: 2, group_size: 2, agent: {export_style: concat, "
            "chat_template_type: concat}}",
            "gconfig.max_new_tokens=4",
            # One sequence at a time: what a batch holds must not move the last bit.
            "engine.max_batch_size=1",
            "actor={device: cpu, optimizer: {lr: 0.01, lr_scheduler_type: cosine}}",
            "recover={mode: auto, freq_steps: 1}",
            "stats_logger.console=false",
            *overrides,
        ],
    )


def weights(trainer: PPOTrainer) -> list[torch.Tensor]:
    return [p.detach().clone() for p in trainer.actor.model.parameters()]


def assert_equal(first: list[torch.Tensor], second: list[torch.Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def crash_in(step: int) -> Callable[[StepReport], None]:
    def on_step(report: StepReport) -> None:
        if report.step == step:
            raise Crash

    return on_step


def test_the_next_steps_are_bit_equal(tiny_model_dir: Path, tmp_path: Path) -> None:
    """Case B149: rewards, log-probs and weights of an uninterrupted run; data in order.

    The crash is in step 3 (counted from 0); 6 rows in batches of 2, so it is past an epoch's end.
    """
    whole = config_of(tiny_model_dir, tmp_path / "whole")
    with PPOTrainer(whole, ROWS) as trainer:
        trainer.train(LetterAgent())
        expected, rows = weights(trainer), read_metrics(trainer.run_dir / "metrics.jsonl")
        drawn = torch.rand(())
    questions = QUESTIONS.copy()
    QUESTIONS.clear()

    parts = config_of(tiny_model_dir, tmp_path / "parts")
    with PPOTrainer(parts, ROWS) as trainer, pytest.raises(Crash):
        trainer.train(LetterAgent(), on_step=crash_in(3))
    torch.manual_seed(99)
    reports: list[StepReport] = []
    with PPOTrainer(parts, ROWS) as trainer:
        assert trainer.engine.get_version() == 3
        trainer.train(LetterAgent(), on_step=reports.append)
        assert_equal(expected, weights(trainer))
        assert torch.equal(torch.rand(()), drawn), "what agents draw goes on as well"
        resumed = read_metrics(trainer.run_dir / "metrics.jsonl")
    assert [report.step for report in reports] == [3, 4]
    assert questions == QUESTIONS[:12] + QUESTIONS[16:]  # 4 episodes were of the lost step
    assert sum(row["ppo_actor/update/grad_norm"] > 0.0 for row in rows) >= 4
    same = ("step", "rollout/reward", "ppo_actor/update/new_logp/avg", "ppo_actor/update/grad_norm")
    assert [[row[key] for key in same] for row in resumed] == [
        [row[key] for key in same] for row in rows
    ]


def test_concurrent_episodes_sample_the_same_after_a_restart(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    """Whatever order their requests come in; what a batch holds moves the last bits only."""
    batched = ("engine.max_batch_size=4", "actor.optimizer.eps=1.0", "actor.optimizer.lr=1.0")
    whole = config_of(tiny_model_dir, tmp_path / "whole", *batched)
    with PPOTrainer(whole, ROWS) as trainer:
        trainer.train(ConcurrentAgent())
        expected, rows = weights(trainer), read_metrics(trainer.run_dir / "metrics.jsonl")
    parts = config_of(tiny_model_dir, tmp_path / "parts", *batched)
    with PPOTrainer(parts, ROWS) as trainer, pytest.raises(Crash):
        trainer.train(ConcurrentAgent(), on_step=crash_in(2))
    with PPOTrainer(parts, ROWS, ROWS) as trainer:
        trainer.evaluate(ConcurrentAgent())
        trainer.train(ConcurrentAgent())
        for a, b in zip(expected, weights(trainer), strict=True):
            assert torch.allclose(a, b, rtol=0.0, atol=1e-5)
        resumed = read_metrics(trainer.run_dir / "metrics.jsonl")
    rewards = pytest.approx([row["rollout/reward"] for row in rows])  # summed in any order
    assert [row["rollout/reward"] for row in resumed] == rewards


def test_finished_episodes_are_not_run_again(tiny_model_dir: Path, tmp_path: Path) -> None:
    """Case B149, with the journal: the state is of step 2, the crash in step 3, in flight nothing.

    Steps 2 and 3 are trained again on the groups that are on disk.
    """
    journal = ("rollout.journal=true", "recover={mode: auto, freq_steps: 2}", "total_train_steps=4")
    whole = config_of(tiny_model_dir, tmp_path / "whole", *journal)
    with PPOTrainer(whole, ROWS) as trainer:
        trainer.train(LetterAgent())
        expected = weights(trainer)
    parts = config_of(tiny_model_dir, tmp_path / "parts", *journal)
    with PPOTrainer(parts, ROWS) as trainer, pytest.raises(Crash):
        trainer.train(LetterAgent(), on_step=crash_in(3))
    QUESTIONS.clear()
    with PPOTrainer(parts, ROWS) as trainer:
        assert trainer.engine.get_version() == 2
        trainer.train(LetterAgent())
        assert_equal(expected, weights(trainer))
    assert QUESTIONS == []


@pytest.mark.parametrize("stop", [1, 2, 3])
def test_a_state_around_the_end_of_an_epoch(
    tiny_model_dir: Path, tmp_path: Path, stop: int
) -> None:
    """Case B148: an epoch is 2 steps; stopped before, at and after its end, none is cut short."""
    rows = ROWS[:4]
    engine = ScriptedEngine([[20, 2], [20, 21, 2]], repeat=True)
    config = config_of(tiny_model_dir, tmp_path, f"total_train_steps={stop}")
    for steps in (stop, 4):
        config = load_config(None, [f"total_train_steps={steps}"], base=config)
        with PPOTrainer(config, rows, engine=engine) as trainer:
            trainer.train(LetterAgent())
    questions = [row["question"] for row in rows]
    assert sorted(QUESTIONS[:8]) == sorted(QUESTIONS[8:]) == sorted(2 * questions)


def test_another_engine_gets_the_weights_of_the_state(tiny_model_dir: Path, tmp_path: Path) -> None:
    """Collection runs ahead here; what was in flight at the crash is given out again.

    Case B128: the room to run ahead is not counted from zero after the restart.
    """
    ahead = "rollout={consumer_batch_size: 2, group_size: 2, max_head_offpolicyness: 1}"
    config = config_of(tiny_model_dir, tmp_path, ahead, "total_train_steps=3")

    def scripted(reports: list[StepReport], fails_in: int) -> ScriptedEngine:
        engine = ScriptedEngine([[20, 2], [20, 21, 2]], repeat=True)
        with PPOTrainer(config, ROWS, engine=engine) as trainer:
            trainer.train(LetterAgent(), on_step=chain(reports.append, crash_in(fails_in)))
        return engine

    reports: list[StepReport] = []
    with pytest.raises(Crash):
        scripted(reports, fails_in=1)
    given_out = set(QUESTIONS)
    QUESTIONS.clear()
    engine = scripted(reports, fails_in=9)
    assert [report.step for report in reports] == [0, 1, 1, 2]
    assert max(r.stats["ppo_actor/version_stats/staleness/max"] for r in reports) <= 1.0
    assert engine.get_version() == 3
    assert {*given_out, *QUESTIONS} == {row["question"] for row in ROWS}


def chain(*functions: Callable[[StepReport], None]) -> Callable[[StepReport], None]:
    def on_step(report: StepReport) -> None:
        for function in functions:
            function(report)

    return on_step


def test_sigterm_keeps_the_last_whole_step_and_exits_with_0(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    """The signal comes within an episode of step 2: that step begins again after the restart."""
    seldom = "recover={mode: auto, freq_steps: 99}"
    whole = config_of(tiny_model_dir, tmp_path / "whole", seldom)
    with PPOTrainer(whole, ROWS) as trainer:
        trainer.train(LetterAgent())
        expected = weights(trainer)
    QUESTIONS.clear()

    class Terminated(LetterAgent):
        async def begin(self, question: str) -> None:
            await super().begin(question)
            if len(QUESTIONS) == 10:
                signal.pthread_kill(threading.main_thread().ident, signal.SIGTERM)
                await asyncio.Event().wait()

    parts = config_of(tiny_model_dir, tmp_path / "parts", seldom)
    with PPOTrainer(parts, ROWS) as trainer, pytest.raises(SystemExit) as stopped:
        trainer.train(Terminated())
    assert stopped.value.code == 0
    assert [path.name for path in (trainer.run_dir / "recover").iterdir()] == ["step2"]
    with PPOTrainer(parts, ROWS) as trainer:
        trainer.train(LetterAgent())
        assert_equal(expected, weights(trainer))


def test_a_signal_after_the_update_keeps_that_step(tiny_model_dir: Path, tmp_path: Path) -> None:
    config = config_of(tiny_model_dir, tmp_path, "recover={mode: auto, freq_steps: 99}")

    def interrupt(report: StepReport) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    with PPOTrainer(config, ROWS) as trainer, pytest.raises(KeyboardInterrupt):
        trainer.train(LetterAgent(), on_step=interrupt)
    with PPOTrainer(config, ROWS) as trainer:
        assert trainer.engine.get_version() == 1


def test_a_run_that_is_done_trains_nothing(
    tiny_model_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The second time, and where fewer steps are asked for than are done."""
    said = []
    for total in (2, 2, 1):
        caplog.clear()
        config = config_of(tiny_model_dir, tmp_path, f"total_train_steps={total}")
        with PPOTrainer(config, ROWS) as trainer:
            trainer.train(LetterAgent())
        said.append("all 2 steps are done" in caplog.text)
    assert said == [False, True, True]
    assert len(QUESTIONS) == 8
    assert [row["step"] for row in read_metrics(trainer.run_dir / "metrics.jsonl")] == [0, 1]


@pytest.fixture
def one_step(tiny_model_dir: Path, tmp_path: Path) -> PPOConfig:
    """The config of a run that has done one step and may do more."""
    config = config_of(tiny_model_dir, tmp_path, "total_train_steps=1")
    with PPOTrainer(config, ROWS) as trainer:
        trainer.train(LetterAgent())
    return load_config(None, ["total_train_steps=2"], base=config)


def state_folder(config: PPOConfig) -> Path:
    return Path(config.fileroot) / "exp" / "one" / "recover" / "step1"


@pytest.mark.parametrize(
    ("name", "damage", "reason"),
    [
        ("run.json", lambda content: content[:-9], "run.json cannot be read"),
        ("run.json", lambda content: b"[]", "run.json holds a list"),
        ("run.json", lambda content: b"{}", "'format' is missing"),
        ("run.json", lambda content: content.replace(b'"rollout"', b'"x"'), "run.json is damaged"),
        ("actor/tree.json", lambda content: content[:-9], "tree.json is damaged"),
        ("actor/shard*", lambda content: content[:-9], "shard.* is damaged"),
        ("actor/shard*", lambda content: content[:-1] + b"\x01", "shard.* is damaged"),
        ("SHA256SUMS", lambda content: content[:9], "SHA256SUMS cannot be compared"),
    ],
)
def test_a_damaged_state_is_an_error_and_not_a_fresh_start(
    one_step: PPOConfig, name: str, damage: Callable[[bytes], bytes], reason: str
) -> None:
    """Case B155."""
    (path,) = state_folder(one_step).glob(name)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(CheckpointError, match=reason) as raised:
        PPOTrainer(one_step, ROWS)
    assert "to start anew, remove" in str(raised.value)


def test_the_state_of_another_run_is_refused(one_step: PPOConfig) -> None:
    other = load_config(None, ["seed=2", "rollout.journal=true"], base=one_step)
    for _ in range(2):  # the first one let go of the journal
        with pytest.raises(CheckpointError, match="seed=1, not 2"):
            PPOTrainer(other, ROWS)
    copy = Path(one_step.fileroot) / "copy"
    shutil.copytree(one_step.tokenizer_path, copy)
    other = load_config(None, [f"tokenizer_path={copy}"], base=one_step)
    with pytest.raises(CheckpointError, match=f"it began with the model .*, not {copy}; to start"):
        PPOTrainer(other, ROWS)
    with pytest.raises(CheckpointError, match="6 rows and this dataset has 7"):
        PPOTrainer(one_step, [*ROWS, {"question": "say 7"}])


def test_what_a_killed_save_leaves_is_no_state(one_step: PPOConfig, tmp_path: Path) -> None:
    half = state_folder(one_step).with_name(".step2-abc")
    half.mkdir()
    (half / "run.json").write_text("{")
    with PPOTrainer(one_step, ROWS) as trainer:
        trainer.train(LetterAgent())
    assert [path.name for path in half.parent.iterdir()] == ["step2"]


def test_rows_that_are_no_json_are_named(tiny_model_dir: Path, tmp_path: Path) -> None:
    rows = [{"question": f"say {index}", "path": Path("x")} for index in range(6)]
    ahead = "rollout={consumer_batch_size: 2, group_size: 2, max_head_offpolicyness: 1}"
    config = config_of(tiny_model_dir, tmp_path, ahead)
    with (
        PPOTrainer(config, rows) as trainer,
        pytest.raises(CheckpointError, match="plain JSON values"),
    ):
        trainer.train(LetterAgent())


async def test_a_trainer_closes_inside_a_running_loop(tiny_model_dir: Path, tmp_path: Path) -> None:
    """As in a notebook."""
    with PPOTrainer(config_of(tiny_model_dir, tmp_path, "total_train_steps=1"), ROWS) as trainer:
        trainer.train(LetterAgent())
    assert not await trainer.engine.health()


RUN = """
import sys
from pathlib import Path
from agent_rl import PPOTrainer
from tests_recover import ROWS, LetterAgent, config_of

with PPOTrainer(config_of(Path(sys.argv[1]), Path(sys.argv[2])), ROWS) as trainer:
    trainer.train(LetterAgent(), on_step=lambda report: print(report.step, flush=True))
"""


@pytest.mark.slow
def test_kill_9_costs_the_step_under_way_only(tiny_model_dir: Path, tmp_path: Path) -> None:
    """Case B149: three processes, two of them killed, end with the weights of one whole run."""
    whole = config_of(tiny_model_dir, tmp_path / "whole")
    with PPOTrainer(whole, ROWS) as trainer:
        trainer.train(LetterAgent())
        expected = weights(trainer)
    (tmp_path / "tests_recover.py").write_text(Path(__file__).read_text())
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", RUN, str(tiny_model_dir), str(tmp_path / "parts")]
    for last_step in ("1", "3"):
        with subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if line.strip() == last_step:
                    process.kill()
                    break
        assert process.returncode == -signal.SIGKILL
    with PPOTrainer(config_of(tiny_model_dir, tmp_path / "parts"), ROWS) as trainer:
        trainer.train(LetterAgent())
        assert_equal(expected, weights(trainer))
        rows = read_metrics(trainer.run_dir / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
