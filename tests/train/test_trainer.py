from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tiny_batches import trajectory

from agent_rl import LocalEngine, PPOConfig, PPOTrainer, ScriptedEngine, load_config
from agent_rl.engine.loading import load_model, load_tokenizer
from agent_rl.errors import (
    CheckpointError,
    CollectorError,
    ConfigError,
    DatasetError,
    ModelLoadError,
    RequestError,
)
from agent_rl.stats import tracker as stats_tracker
from agent_rl.train import setup
from agent_rl.train.batch import Batch
from agent_rl.train.setup import min_usable_group_size
from agent_rl.train.team import Team
from agent_rl.train.trainer import StepReport

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ROWS = [{"question": f"say {index}"} for index in range(8)]


class LengthAgent:
    """Rewards short answers: something a random model can be scored by."""

    async def run(self, data: dict[str, Any], client: Any) -> float:
        messages = [{"role": "user", "content": data["question"]}]
        completion = await client.chat.completions.create(model="m", messages=messages)
        return 1.0 / completion.usage.completion_tokens


class Failing:
    async def run(self, data: dict[str, Any], client: Any) -> float:
        raise LookupError("the database is gone")


class Silent:
    async def run(self, data: dict[str, Any], client: Any) -> None:
        messages = [{"role": "user", "content": data["question"]}]
        await client.chat.completions.create(model="m", messages=messages)


@pytest.fixture
def config(tiny_run: list[str]) -> PPOConfig:
    return load_config(None, tiny_run)


def changed(config: PPOConfig, *overrides: str) -> PPOConfig:
    return load_config(None, overrides, base=config)


def test_a_run_trains_logs_and_leaves_a_loadable_checkpoint(config: PPOConfig) -> None:
    reports: list[StepReport] = []
    with PPOTrainer(config, ROWS, ROWS[:3]) as trainer:
        before = trainer.evaluate(LengthAgent)
        weights = trainer.actor.model.get_input_embeddings().weight.detach().clone()
        trainer.train(LengthAgent, on_step=reports.append)
        assert trainer.engine.get_version() == 2
        assert not weights.equal(trainer.actor.model.get_input_embeddings().weight)
    assert before["eval-rollout/reward__count"] == 3
    assert [(report.step, report.total_steps) for report in reports] == [(0, 2), (1, 2)]
    assert all(report.stats["ppo_actor/n_seqs"] == 4 for report in reports)

    run_dir = Path(config.fileroot) / "exp" / "one"
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1]
    assert lines[1]["rollout/reward"] == pytest.approx(reports[1].stats["rollout/reward"])
    again = changed(config, f"tokenizer_path={run_dir / 'checkpoints' / 'step2'}", "trial_name=two")
    with PPOTrainer(again, ROWS) as trainer:
        assert trainer.actor.model.num_parameters() > 0


class TwoRight:
    """Calls the model and is right about the first two data only."""

    async def run(self, data: dict[str, Any], client: Any) -> float:
        messages = [{"role": "user", "content": data["question"]}]
        await client.chat.completions.create(model="m", messages=messages)
        return float(data["question"] in ("say 0", "say 1"))


def test_evaluation_is_of_each_datum_once(config: PPOConfig) -> None:
    """Case B151: 2 of 10 are right; no multiple of the batch, nothing dropped or padded."""
    ten = [{"question": f"say {index}"} for index in range(10)]
    with PPOTrainer(changed(config, "rollout.consumer_batch_size=3"), ROWS, ten) as trainer:
        stats = trainer.evaluate(TwoRight)
    assert stats["eval-rollout/reward"] == pytest.approx(0.2)
    assert stats["eval-rollout/reward__count"] == 10


class Temperatures:
    """A turn at the run's temperature, one at its own, and a greedy one."""

    async def run(self, data: dict[str, Any], client: Any) -> float:
        messages = [{"role": "user", "content": data["question"]}]
        for own in ({}, {"temperature": 1.5}, {"temperature": 0}):
            await client.chat.completions.create(model="m", messages=messages, **own)
        return float(data["question"] > "say 3")


def test_ratios_are_one_at_any_temperature(config: PPOConfig) -> None:
    """Cases B56, B57: the trainer's log-probs are the engine's, whatever each turn was sampled at.

    Case B77: what is counted as trained was sampled.
    """
    warm = changed(config, "gconfig.temperature=0.5", "total_train_steps=1")
    reports: list[StepReport] = []
    with PPOTrainer(warm, ROWS) as trainer:
        trainer.train(Temperatures, on_step=reports.append)
    stats = reports[0].stats
    for key in ("min", "avg", "max"):
        ratio = stats[f"ppo_actor/update/importance_weight/{key}"]
        assert ratio == pytest.approx(1.0, abs=1e-4)
    assert stats["ppo_actor/update/behave_logp_error/max"] < 1e-4
    num_sampled = stats["rollout/num_sampled_tokens"] * stats["rollout/num_sampled_tokens__count"]
    assert stats["ppo_actor/n_valid_tokens"] == num_sampled


def test_an_empty_answer_in_a_batch(config: PPOConfig) -> None:
    """Case B45: one of four answers has no token: it trains nothing, and every metric is finite."""
    tokenizer = load_tokenizer(config.tokenizer_path)
    answers = [[20, 21, 2], [], [22, 2], [23, 2]]
    engine = ScriptedEngine(answers, tokenizer=tokenizer)
    reports: list[StepReport] = []
    once = changed(config, "total_train_steps=1", "rollout.max_head_offpolicyness=0")
    with PPOTrainer(once, ROWS, tokenizer=tokenizer, engine=engine) as trainer:
        trainer.train(TwoRight, on_step=reports.append)
    stats = reports[0].stats
    assert (stats["ppo_actor/n_seqs"], stats["ppo_actor/n_valid_tokens"]) == (4, 7)
    assert stats["rollout/num_sampled_tokens"] == 7 / 4
    assert [key for key, value in stats.items() if not math.isfinite(value)] == []


@pytest.mark.parametrize(
    ("rows", "fault"),
    [(ROWS[:1], "has 1 rows but one batch needs 2"), ([], "the dataset list has no rows")],
)
def test_a_dataset_without_one_batch_is_refused_at_the_start(
    config: PPOConfig, rows: list[dict[str, str]], fault: str
) -> None:
    """Case B152: neither a run of no steps nor one without end."""
    with pytest.raises(DatasetError, match=fault):
        PPOTrainer(config, rows)


def test_evaluation_before_training_shares_the_first_step(config: PPOConfig) -> None:
    """Case B158: step 0 is 0, and train and eval of one step share it.

    Cases B147, B151: each of three rows is evaluated once, whatever the sizes of batch and group.
    """
    once = changed(config, "evaluator.eval_before_train=true", "total_train_steps=1")
    reports: list[StepReport] = []
    with PPOTrainer(once, ROWS, ROWS[:3]) as trainer:
        trainer.train(LengthAgent, on_step=reports.append)
        lines = (trainer.run_dir / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0]
    assert reports[0].stats["eval-rollout/reward__count"] == 3
    assert reports[0].stats["timeperf/eval__count"] == 1


def test_sampling_that_the_engine_cannot_do_is_refused_at_the_start(
    config: PPOConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LocalEngine, "supported", frozenset())
    with pytest.raises(RequestError, match="top_k, which this engine"):
        PPOTrainer(changed(config, "gconfig.top_k=5"), ROWS)


def test_a_model_in_an_engine_needs_no_path(config: PPOConfig) -> None:
    tokenizer = load_tokenizer(config.tokenizer_path)
    engine = LocalEngine(config.tokenizer_path, tokenizer, device="cpu")
    nameless = changed(config, "tokenizer_path=''", "total_train_steps=1")
    with PPOTrainer(nameless, ROWS, tokenizer=tokenizer, engine=engine) as trainer:
        trainer.train(LengthAgent)
        assert trainer.engine is engine and engine.get_version() == 1
    asyncio.run(engine.close())


@pytest.mark.parametrize("key", ["freq_steps=1", "eval_before_train=true"])
def test_an_evaluator_needs_rows(config: PPOConfig, key: str) -> None:
    with pytest.raises(ConfigError, match="has no effect: there is no valid_dataset"):
        PPOTrainer(changed(config, f"evaluator.{key}"), ROWS)


def test_a_group_of_one_is_named_at_the_start(
    config: PPOConfig, caplog: pytest.LogCaptureFixture
) -> None:
    """And not again, though its advantages are 0 in each step."""
    alone = changed(config, "rollout.group_size=1", "total_train_steps=4")
    with PPOTrainer(alone, ROWS) as trainer:
        trainer.train(LengthAgent)
    assert caplog.text.count("advantages are 0") == 1
    assert "rollout.group_size=1: an episode without company" in caplog.text
    caplog.clear()
    baseline = "actor.reward_norm.mean_level=batch"
    with PPOTrainer(changed(alone, baseline, "trial_name=two"), ROWS):
        assert "without company" not in caplog.text


def test_a_run_says_what_it_does(
    config: PPOConfig, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """What is loaded, where it is, a line for each step, where the results are."""
    talkative = changed(config, "stats_logger.console=line")
    for number in (1, 2):
        with PPOTrainer(talkative, ROWS, ROWS[:3]) as trainer:
            trainer.train(LengthAgent)
        lines = capsys.readouterr().out.splitlines()
        run = trainer.run_dir
        assert lines[:2] == [f"loading {config.tokenizer_path}", f"run folder {run}/"]
        assert [line.partition(": ")[0] for line in lines[2:4]] == ["step 1/2", "step 2/2"]
        assert "version 2" in lines[3] and "tokens/s" in lines[3]
        assert lines[4] == (
            f"finished: 2 steps; checkpoint in {run}/checkpoints/step2/; "
            f"metrics in {run}/metrics.jsonl"
        )
        assert len(lines) == 5
        assert (f"the earlier run of {run} is in {run}.1 now" in caplog.text) == (number == 2)


def test_the_written_config_reads_back(config: PPOConfig) -> None:
    with PPOTrainer(config, ROWS) as trainer:
        written = trainer.run_dir / "config.yaml"
        assert load_config(written) == config


def test_model_and_tokenizer_may_be_two_folders(
    config: PPOConfig, tiny_model_dir: Path, tmp_path: Path
) -> None:
    """``actor.path`` has no tokenizer: the one of ``tokenizer_path`` is taken."""
    weights_only = tmp_path / "weights"
    weights_only.mkdir()
    for name in ("config.json", "model.safetensors"):
        (weights_only / name).write_bytes((tiny_model_dir / name).read_bytes())
    with PPOTrainer(changed(config, f"actor.path={weights_only}"), ROWS) as trainer:
        assert trainer.tokenizer.name_or_path == str(tiny_model_dir)


def test_secrets_do_not_reach_the_written_config(config: PPOConfig) -> None:
    with PPOTrainer(changed(config, "stats_logger.wandb.api_key=hush"), ROWS) as trainer:
        assert "hush" not in (trainer.run_dir / "config.yaml").read_text()


def test_an_agent_that_always_fails_stops_the_run_with_its_own_message(config: PPOConfig) -> None:
    with (
        PPOTrainer(config, ROWS) as trainer,
        pytest.raises(CollectorError, match="the database is gone"),
    ):
        trainer.train(Failing)


def test_an_agent_that_returns_nothing_is_named_as_that(config: PPOConfig) -> None:
    with PPOTrainer(config, ROWS) as trainer, pytest.raises(CollectorError, match="no_reward"):
        trainer.train(Silent)


def test_faults_of_the_input_are_found_before_training(config: PPOConfig, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="nowhere"):
        PPOTrainer(changed(config, f"tokenizer_path={tmp_path / 'nowhere'}"), ROWS)
    with pytest.raises(ConfigError, match="train_dataset"):
        PPOTrainer(config)
    with pytest.raises(ConfigError, match="tokenizer_path"):
        PPOTrainer(changed(config, "tokenizer_path=''"), ROWS)
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(CheckpointError, match="cannot write the run's folder"):
        PPOTrainer(changed(config, f"fileroot={file}"), ROWS)


@pytest.mark.parametrize(
    ("overrides", "floor"),
    [
        (["rollout.group_size=8", "actor.reward_norm=null"], 1),
        (["rollout.group_size=8", "actor.reward_norm={mean_level: batch, std_level: batch}"], 1),
        (["rollout.group_size=8", "actor.reward_norm={mean_level: null, std_level: group}"], 2),
        (["rollout.group_size=1", "actor.adv_norm={mean_level: group}"], 1),
        (["rollout.group_size=8", "actor.min_usable_group_size=4"], 4),
        (["rollout.group_size=8", "actor.min_usable_group_size=1"], None),
        (["rollout.group_size=1", "actor.min_usable_group_size=1"], None),
        (
            ["rollout.group_size=8", "actor.reward_norm=null", "actor.min_usable_group_size=1"],
            1,
        ),
        (["rollout.group_size=4", "actor.min_usable_group_size=5"], None),
    ],
)
def test_the_floor_of_usable_episodes(overrides: list[str], floor: int | None) -> None:
    """The table of rule 7; None: refused."""
    if floor is None:
        with pytest.raises(ConfigError, match="min_usable_group_size"):
            min_usable_group_size(load_config(None, overrides))
    else:
        assert min_usable_group_size(load_config(None, overrides)) == floor


def test_what_ends_a_completion_in_the_engine_cuts_no_row_off(
    tiny_model_dir: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    """End ids of the model (5), of its tokenizer (2) and of gconfig (9); a row that ends with 7."""
    keys = [f"tokenizer_path={tiny_model_dir}", "actor.device=cpu", "gconfig.stop_token_ids=[9]"]
    model = load_model(tiny_model_dir, device=torch.device("cpu"), dtype=torch.float32)
    model.generation_config.eos_token_id = model.config.eos_token_id = 5
    config = load_config(None, keys)
    actor = setup.make_actor(config, model, tokenizer, total_steps=1, team=Team())
    rows = trajectory([[1, 3, end] for end in (5, 2, 9, 7)], [[0, 1, 1]] * 4, [1.0, 0.0, 0.0, 0.0])
    actor.update(Batch.from_trajectories([rows]))
    assert stats_tracker.export_all()["ppo_actor/no_eos_ratios/avg"] == 0.25
