"""A restarted run goes on where it stopped, to the last bit; what it cannot use is an error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from agent_rl import PPOConfig, PPOTrainer, load_config
from agent_rl.stats import tracker as stats_tracker
from agent_rl.stats.jsonl import read_metrics
from agent_rl.train.trainer import StepReport

ROWS = [{"question": f"say {index}"} for index in range(6)]
QUESTIONS: list[str] = []


class LengthAgent:
    """Two turns; rewards short answers: something a random model can be scored by."""

    async def run(self, data: dict[str, Any], client: Any) -> float:
        QUESTIONS.append(data["question"])
        messages = [{"role": "user", "content": data["question"]}]
        first = await client.chat.completions.create(model="m", messages=messages)
        messages += [first.choices[0].message, {"role": "user", "content": "again"}]
        second = await client.chat.completions.create(model="m", messages=messages)
        return 1.0 / (first.usage.completion_tokens + second.usage.completion_tokens)


class Crash(Exception):
    pass


@pytest.fixture(autouse=True)
def fresh_metrics() -> Iterator[None]:
    QUESTIONS.clear()
    yield
    stats_tracker.export_all()


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
    """Cases B128, B149: rewards, log-probs and weights of an uninterrupted run; data in order.

    The crash is in step 3 (counted from 0); 6 rows in batches of 2, so it is past an epoch's end.
    """
    whole = config_of(tiny_model_dir, tmp_path / "whole")
    with PPOTrainer(whole, ROWS) as trainer:
        trainer.train(LengthAgent)
        expected, rows = weights(trainer), read_metrics(trainer.run_dir / "metrics.jsonl")
    questions = QUESTIONS.copy()
    QUESTIONS.clear()

    parts = config_of(tiny_model_dir, tmp_path / "parts")
    with PPOTrainer(parts, ROWS) as trainer, pytest.raises(Crash):
        trainer.train(LengthAgent, on_step=crash_in(3))
    torch.manual_seed(99)
    reports: list[StepReport] = []
    with PPOTrainer(parts, ROWS) as trainer:
        assert trainer.engine.get_version() == 3
        trainer.train(LengthAgent, on_step=reports.append)
        assert_equal(expected, weights(trainer))
        resumed = read_metrics(trainer.run_dir / "metrics.jsonl")
    assert [report.step for report in reports] == [3, 4]
    assert questions == QUESTIONS[:12] + QUESTIONS[16:]  # 4 episodes were of the lost step
    same = ("step", "rollout/reward", "ppo_actor/update/new_logp/avg", "ppo_actor/update/grad_norm")
    assert [[row[key] for key in same] for row in resumed] == [
        [row[key] for key in same] for row in rows
    ]
