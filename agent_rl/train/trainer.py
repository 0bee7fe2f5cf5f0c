"""PPOTrainer: the loop on one page. Collect, learn, hand the new weights to the engine, repeat.

Colocated: engine and actor share one set of parameters, so the engine is paused while they change
and a weight update is a version bump. The trainer owns the run's folder; how episodes run is known
to rollout/, what the loss is to the actor.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
import yaml

from agent_rl.config import PPOConfig
from agent_rl.engine.base import InferenceEngine, WeightUpdate
from agent_rl.engine.loading import load_model, load_tokenizer
from agent_rl.engine.local import LocalEngine
from agent_rl.errors import CheckpointError, ConfigError
from agent_rl.record.dump import TrajectoryDump
from agent_rl.rollout.dataloader import DataLoader
from agent_rl.rollout.executor import RolloutEngine
from agent_rl.stats import tracker as stats_tracker
from agent_rl.stats.logger import FinetuneSpec, StatsLogger
from agent_rl.stats.redact import redact_sensitive_config
from agent_rl.stats.system import system_metrics
from agent_rl.tokens.certify import certify
from agent_rl.train.actor import Actor
from agent_rl.train.batch import Batch
from agent_rl.train.checkpoint import save_hf_checkpoint
from agent_rl.train.dataset import load_rows
from agent_rl.train.frequency import Frequency
from agent_rl.train.interrupt import Interrupts
from agent_rl.train.progress import RunProgress

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from agent_rl.types import JsonObject

logger = logging.getLogger(__name__)

Dataset = str | Path | Iterable[Mapping[str, object]]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """One training step, counted from 0, with the metrics that the loggers get."""

    step: int
    total_steps: int
    stats: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Workflows:
    """What ``train`` was asked to run, as ``RolloutEngine`` takes it."""

    train: dict[str, Any]
    eval: dict[str, Any]


class PPOTrainer:
    """Trains an agent with PPO/GRPO in this process.

    Args:
        config: from ``load_config``.
        train_dataset: a sequence of dicts, a JSONL or Parquet path, or a `datasets` dataset;
            None: ``config.train_dataset``.
        valid_dataset: the same for evaluation; may be absent.
        tokenizer: None: loaded from ``config.tokenizer_path``.
        engine: None: a LocalEngine on the actor's parameters. Another LocalEngine lends its
            model to the actor; any other engine gets new weights as a folder on disk.

    Raises:
        ConfigError, ModelLoadError, DatasetError, CheckpointError: before anything is trained.
    """

    def __init__(
        self,
        config: PPOConfig,
        train_dataset: Dataset | None = None,
        valid_dataset: Dataset | None = None,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        engine: InferenceEngine | None = None,
    ) -> None:
        self.config = config
        self.run_dir = _run_dir(config)
        usable = min_usable_group_size(config)
        rows = _rows("train_dataset", train_dataset, config.train_dataset)
        if not rows:
            raise ConfigError("there is no train_dataset: give PPOTrainer one or set the key")
        self.valid_rows = _rows("valid_dataset", valid_dataset, config.valid_dataset)
        self._loader = DataLoader(rows, config.rollout.consumer_batch_size, seed=config.seed)
        self.total_steps = config.total_train_steps or config.total_train_epochs * len(self._loader)
        _write_config(config, self.run_dir)
        _seed_everything(config.seed)
        self.tokenizer = tokenizer or load_tokenizer(config.tokenizer_path or _model_path(config))
        self.engine, self._model = _engine_and_model(config, self.tokenizer, engine)
        self._owns_engine = engine is None
        self._report_certification()
        self.actor = Actor(
            self._model,
            config.actor,
            total_steps=self.total_steps,
            temperature=config.gconfig.logprob_temperature,
        )
        self.eval_gconfig = config.eval_gconfig or replace(config.gconfig, greedy=True)
        self.rollout = RolloutEngine(
            self.engine,
            config.rollout,
            # None: it loads the one that rollout.tokenizer_path names.
            tokenizer=None if config.rollout.tokenizer_path else self.tokenizer,
            gconfig=config.gconfig,
            eval_gconfig=self.eval_gconfig,
            min_usable_group_size=usable,
            seed=config.seed,
            dump=self._trajectory_dump(),
        )
        spec = FinetuneSpec(
            total_train_epochs=-(-self.total_steps // len(self._loader)),
            steps_per_epoch=len(self._loader),
            total_train_steps=self.total_steps,
        )
        self._logger = StatsLogger(config, spec, log_dir=self.run_dir)
        self._progress = RunProgress(self.total_steps)
        self._saver_due = Frequency(config.saver)
        self._evaluator_due = Frequency(config.evaluator)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop episodes, engine and loggers; what was logged is on disk. May be called twice."""
        try:
            self.rollout.close()
            if self._owns_engine:
                asyncio.run(self.engine.close())
        finally:
            self._logger.close()

    def train(
        self,
        workflow: Any = None,
        workflow_kwargs: Mapping[str, Any] | None = None,
        eval_workflow: Any = None,
        eval_workflow_kwargs: Mapping[str, Any] | None = None,
        should_accept_fn: Callable[[Any], bool] | str | None = None,
        *,
        on_step: Callable[[StepReport], None] | None = None,
    ) -> None:
        """Run all steps. Ctrl-C and SIGTERM keep a checkpoint of the last whole step.

        Args:
            workflow: an agent or workflow, its class, or its import path.
            eval_workflow: None: the one that is trained.
            should_accept_fn: a trajectory for which it is False is not trained on.
            on_step: called after every step.

        Raises:
            WorkflowResolutionError: ``workflow`` names nothing that can run episodes.
            CollectorError: no usable episodes come any more; the message has the last failure.
            KeyboardInterrupt: after the checkpoint was written.
        """
        workflows = _Workflows(
            train={
                "workflow": workflow,
                "workflow_kwargs": workflow_kwargs,
                "should_accept_fn": should_accept_fn,
            },
            eval={
                "workflow": workflow if eval_workflow is None else eval_workflow,
                "workflow_kwargs": workflow_kwargs
                if eval_workflow is None
                else eval_workflow_kwargs,
            },
        )
        with Interrupts() as interrupts, self._progress:
            try:
                before: dict[str, float] = {}
                if self.config.evaluator.eval_before_train:
                    before = self.evaluate(**workflows.eval)
                for step in range(self.total_steps):
                    stats = {**before, **self._train_step(step, workflows, interrupts)}
                    before = {}
                    self._commit(step, stats)
                    if on_step is not None:
                        on_step(StepReport(step=step, total_steps=self.total_steps, stats=stats))
                    self._progress.advance()
            except KeyboardInterrupt:
                logger.warning("stopped; the checkpoint is in %s", self.save("interrupted"))
                raise

    def _train_step(
        self, step: int, workflows: _Workflows, interrupts: Interrupts
    ) -> dict[str, float]:
        with self._phase("rollout"):
            trajectories = self.rollout.prepare_batch(self._loader, **workflows.train)
        batch = Batch.from_trajectories(trajectories)
        self.rollout.pause()
        try:
            with interrupts.deferred():
                with self._phase("train_step"):
                    self.actor.update(batch)
                with self._phase("update_weights"):
                    self._publish(step + 1)
            is_epoch_end = (step + 1) % len(self._loader) == 0
            if self._saver_due.is_due(is_epoch_end=is_epoch_end) or step + 1 == self.total_steps:
                with self._phase("save"):
                    self.save(f"step{step + 1}")
        finally:
            self.rollout.resume()
        if self.valid_rows and self._evaluator_due.is_due(is_epoch_end=is_epoch_end):
            self._run_evaluation(workflows.eval)
        return stats_tracker.export_all() | system_metrics()

    def evaluate(
        self, workflow: Any, workflow_kwargs: Mapping[str, Any] | None = None
    ) -> dict[str, float]:
        """Metrics of one pass over ``valid_dataset``, each datum once, sampled by eval_gconfig.

        ``eval-rollout/reward`` is the mean over episodes that ended with a reward.
        """
        self._run_evaluation({"workflow": workflow, "workflow_kwargs": workflow_kwargs})
        return stats_tracker.get("eval-rollout").export()

    def save(self, name: str) -> Path:
        """Write the weights as the Hugging Face folder ``{run_dir}/checkpoints/{name}``."""
        return save_hf_checkpoint(self._model, self.tokenizer, self.run_dir / "checkpoints" / name)

    def _trajectory_dump(self) -> TrajectoryDump | None:
        if not self.config.rollout.dump_to_file:
            return None
        folder = _run_dir(self.config, self.config.rollout.fileroot)
        return TrajectoryDump(folder, self.tokenizer.decode)

    def _report_certification(self) -> None:
        """Say at start-up what this tokenizer and template can do exactly."""
        agent = self.config.rollout.agent
        certification = certify(
            self.tokenizer,
            tool_call_parser=agent.tool_call_parser,
            reasoning_parser=agent.reasoning_parser,
        )
        logger.info("%s", certification.summary())
        if agent.chat_template_type == "concat" and not certification.is_multi_turn_exact:
            logger.warning(
                "rollout.agent.chat_template_type=concat, but this chat template has no exact next "
                "turn (%s): later turns start new branches",
                certification.feature("multi-turn").reason,
            )

    def _run_evaluation(self, workflow: dict[str, Any]) -> None:
        if not self.valid_rows:
            raise ConfigError("there is no valid_dataset: give PPOTrainer one or set the key")
        with self._phase("eval"):
            self.rollout.rollout_batch(self.valid_rows, **workflow, is_eval=True)

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        """Timed as ``timeperf/{name}`` and shown in the progress bar."""
        self._progress.show(name)
        with stats_tracker.record_timing(name):
            yield

    def _publish(self, version: int) -> None:
        """Make the engine sample from the weights as they are now, as ``version``."""
        if isinstance(self.engine, LocalEngine):
            update = WeightUpdate(version=version)
        else:
            folder = self.save("published")
            update = WeightUpdate(version=version, method="disk", path=folder)
        self.rollout.update_weights(update)

    def _commit(self, step: int, stats: Mapping[str, float]) -> None:
        epoch, epoch_step = divmod(step, len(self._loader))
        self._logger.commit(epoch, epoch_step, step, stats)


def _run_dir(config: PPOConfig, fileroot: str | None = None) -> Path:
    return Path(fileroot or config.fileroot) / config.experiment_name / config.trial_name


def _rows(key: str, given: Dataset | None, configured: str | None) -> list[JsonObject]:
    if given is not None and configured is not None:
        raise ConfigError(f"{key} is both an argument and a config key; give one")
    source = given if given is not None else configured
    return [] if source is None else load_rows(source)


def _model_path(config: PPOConfig) -> str:
    path = config.actor.path or config.tokenizer_path
    if not path:
        raise ConfigError("set tokenizer_path (or actor.path): the folder of the model to train")
    return path


def min_usable_group_size(config: PPOConfig) -> int:
    """2 where a group's mean or std is used: such statistics need two observations.

    ``actor.min_usable_group_size`` wins; with a target of one episode, one is complete.

    Raises:
        ConfigError: the explicit value is above the target, or below 2 with group statistics.
    """
    actor, target = config.actor, config.rollout.group_size
    explicit = actor.min_usable_group_size
    norms = [norm for norm in (actor.reward_norm, actor.adv_norm) if norm is not None]
    floor = 2 if any(norm.uses_group_statistics for norm in norms) else 1
    if explicit is None:
        return min(floor, target)
    if explicit > target:
        raise ConfigError(
            f"actor.min_usable_group_size={explicit} is above rollout.group_size={target}"
        )
    if explicit < floor:
        raise ConfigError(
            f"actor.min_usable_group_size={explicit} must be at least 2 with group statistics in "
            "actor.reward_norm or actor.adv_norm"
        )
    return explicit


def _engine_and_model(
    config: PPOConfig, tokenizer: PreTrainedTokenizerBase, engine: InferenceEngine | None
) -> tuple[InferenceEngine, Any]:
    if isinstance(engine, LocalEngine):
        return engine, engine.model
    device = config.actor.device or ("cuda" if torch.cuda.is_available() else "cpu")
    model = load_model(
        _model_path(config),
        device=torch.device(device),
        dtype=getattr(torch, config.actor.dtype),
    )
    if engine is not None:
        return engine, model
    limits = config.engine
    return (
        LocalEngine(
            model,
            tokenizer,
            max_batch_size=limits.max_batch_size,
            max_seq_len=limits.max_seq_len,
        ),
        model,
    )


def _write_config(config: PPOConfig, run_dir: Path) -> None:
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        tree = redact_sensitive_config(config.model_dump(mode="json"))
        text = yaml.safe_dump(tree, sort_keys=False)
        (run_dir / "config.yaml").write_text(text, encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"cannot write the run's folder {run_dir}: {error}") from error


def _seed_everything(seed: int) -> None:
    """Torch, and the generator that gives the engine's requests their sampling noise."""
    random.seed(seed)
    torch.manual_seed(seed)
