"""PPOTrainer: the loop on one page. Collect, learn, hand the new weights to the engine, repeat.

Colocated: engine and actor share one set of parameters, so the engine is paused while they change
and a weight update is a version bump. The trainer owns the run's folder; how episodes run is known
to rollout/, what the loss is to the actor.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from agent_rl.config import PPOConfig
from agent_rl.config.explain import require_section
from agent_rl.config.files import check_files
from agent_rl.engine.base import InferenceEngine, WeightUpdate
from agent_rl.engine.loading import load_tokenizer
from agent_rl.engine.local import LocalEngine
from agent_rl.engine.remote import RemoteEngine
from agent_rl.errors import AgentRLError, CheckpointError, ConfigError
from agent_rl.loop_thread import LoopThread
from agent_rl.online.service import OnlineService
from agent_rl.rollout.dataloader import DataLoader
from agent_rl.stats import tracker as stats_tracker
from agent_rl.stats.system import system_metrics
from agent_rl.train import health, setup
from agent_rl.train.batch import Batch
from agent_rl.train.dataset import Dataset
from agent_rl.train.frequency import Frequency
from agent_rl.train.interrupt import Interrupts
from agent_rl.train.progress import GroupCount, RunProgress
from agent_rl.train.random_states import seed_everything
from agent_rl.train.recover import Recovery, Stateful
from agent_rl.train.replica import Replica
from agent_rl.train.run_folder import RunFolder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from agent_rl.types import TensorDict

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """One training step, counted from 0, with the metrics that the loggers get."""

    step: int
    total_steps: int
    stats: Mapping[str, float]


class PPOTrainer:
    """Trains an agent with PPO/GRPO, in this process or in all those of one ``torchrun``.

    Of several, only the first process comes back from the constructor; the others train with it
    and end when it is closed (docs/guides/training.md).

    Args:
        config: from ``load_config``.
        train_dataset: a sequence of dicts, a JSONL or Parquet path, a `datasets` dataset, or a
            map-style one; None: ``config.train_dataset``.
        valid_dataset: the same for evaluation; may be absent.
        tokenizer: None: loaded from ``config.tokenizer_path``.
        engine: None: what ``config.engine`` says, by default a LocalEngine on the actor's
            parameters. Another LocalEngine lends its model to the actor; any other engine gets new
            weights as ``config.engine.update`` says.
        source: where batches come from with rollout.agent.mode=online; it serves the engine. None:
            one made from ``config.online`` and ``config.gateway``, which serves until ``close``.

    Raises:
        ConfigError, ModelLoadError, DatasetError, CheckpointError: before anything is trained.
        SystemExit: with code 0, in the other processes, when the first one is done.
    """

    def __init__(
        self,
        config: PPOConfig,
        train_dataset: Dataset | None = None,
        valid_dataset: Dataset | None = None,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        engine: InferenceEngine | None = None,
        source: OnlineService | None = None,
    ) -> None:
        require_section(config, PPOConfig, "PPOTrainer")
        check_files(config)
        self.config = config
        self._folder = RunFolder(config)
        self.run_dir = self._folder.path
        usable = setup.min_usable_group_size(config)
        is_online = source is not None or config.rollout.agent.mode == "online"
        rows = setup.training_rows(config, train_dataset, is_online=is_online)
        self.valid_rows = setup.validation_rows(config, valid_dataset)
        self._loader = DataLoader(rows, config.rollout.consumer_batch_size, seed=config.seed)
        self.total_steps = config.total_train_steps or config.total_train_epochs * len(self._loader)
        self._team = setup.join_team(config)
        is_quiet = config.stats_logger.console == "off" or not self._team.is_first
        self._progress = RunProgress(is_quiet=is_quiet, is_timed=not is_online)
        seed_everything(config.seed)
        self._progress.say(f"loading {setup.model_name(config) or 'the model'}")
        self.tokenizer = tokenizer or load_tokenizer(
            config.tokenizer_path or setup.model_path(config)
        )
        model = setup.model_to_train(config, engine, self._team)
        self._owns_engine = engine is None
        if not self._team.is_first:
            engine = None
        else:
            self._folder.claim()
            self._progress.say(f"run folder {self.run_dir}/")
            engine = engine or setup.open_engine(config, model, self.tokenizer, self._team)
        self.actor = setup.make_actor(
            config, model, self.tokenizer, total_steps=self.total_steps, team=self._team
        )
        self._replica = Replica(
            self.actor, self._team, self.tokenizer, engine_model=getattr(engine, "model", None)
        )
        if engine is None:
            self._replica.follow()
        self.engine = engine
        self._publisher = setup.weight_publisher(config, self._replica)
        setup.report_certification(self.tokenizer, config.rollout.agent)
        self.eval_gconfig = config.eval_gconfig or replace(config.gconfig, greedy=True)
        self.rollout = setup.rollout_engine(
            config, self.engine, self.tokenizer, self.eval_gconfig, usable
        )
        steps_per_epoch = len(self._loader)
        self._logger = setup.open_logger(config, self.total_steps, steps_per_epoch)
        self._saver_due, self._evaluator_due, self._recover_due = (
            Frequency(limits, steps_per_epoch=steps_per_epoch)
            for limits in (config.saver, config.evaluator, config.recover)
        )
        self._faults = setup.watch_faults(config, self.actor, is_online=is_online)
        parts: dict[str, Stateful] = {
            "dataloader": self._loader,
            "rollout": self.rollout,
            "logger": self._logger,
            "saver": self._saver_due,
            "evaluator": self._evaluator_due,
            "recover": self._recover_due,
        }
        self._recovery = setup.recovery(config, parts)
        self._owns_source = False
        try:
            self._num_steps, self._is_whole = self._resume(), True
        except AgentRLError:
            self.close()
            raise
        self._progress.begin(self.total_steps, num_done=self._num_steps)
        self._num_taken = 0  # training groups, by this process
        self.source = source
        self._owns_source = is_online and source is None
        if self._owns_source:
            self.source = setup.online_service(config, self.engine, self.tokenizer, self.run_dir)
            self.source.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop episodes, engine and loggers; what was logged is on disk. May be called twice."""
        try:
            if self._owns_source and self.source is not None:
                self.source.close()
            self.rollout.close()
            if self._owns_engine:
                with closing(LoopThread("trainer")) as thread:  # a notebook's loop runs in this one
                    thread.call(self.engine.close())
        finally:
            self._replica.dismiss()
            self._logger.close()
            self._folder.release()

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
        """Run all steps that are not done yet.

        Ctrl-C and SIGTERM keep the last whole step: with ``recover.mode=auto`` as the state that a
        restarted run goes on from, else as a checkpoint.

        Args:
            workflow: an agent or workflow, its class, or its import path.
            eval_workflow: None: the one that is trained.
            should_accept_fn: a trajectory for which it is False is not trained on.
            on_step: called after every step.

        Raises:
            WorkflowResolutionError: ``workflow`` names nothing that can run episodes.
            CollectorError: no usable episodes come any more; the message has the last failure.
            KeyboardInterrupt: Ctrl-C, after the last whole step was kept.
            SystemExit: SIGTERM, likewise; the exit code is 0.
        """
        training = {"workflow": workflow, "workflow_kwargs": workflow_kwargs}
        evaluation = {"workflow": eval_workflow, "workflow_kwargs": eval_workflow_kwargs}
        workflows = setup.Workflows(
            train={**training, "should_accept_fn": should_accept_fn},
            eval=training if eval_workflow is None else evaluation,
        )
        is_patient = self._team.size > 1
        with Interrupts(is_patient=is_patient) as interrupts, self._progress.running():
            try:
                self._run(workflows, interrupts, on_step)
            except KeyboardInterrupt:
                self._keep_stopped()
                if interrupts.is_terminated:
                    raise SystemExit(0) from None
                raise

    def _run(
        self,
        workflows: setup.Workflows,
        interrupts: Interrupts,
        on_step: Callable[[StepReport], None] | None,
    ) -> None:
        before: dict[str, float] = {}
        if self._num_steps >= self.total_steps:
            fix = "raise total_train_steps, or choose another trial_name"
            logger.warning("all %d steps are done already: %s", self._num_steps, fix)
        elif self._num_steps > 0 and self._recovery is not None:
            self._recovery.restore_randomness()
        elif self.config.evaluator.eval_before_train:
            before = self.evaluate(**workflows.eval)
        for step in range(self._num_steps, self.total_steps):
            stats = {**before, **self._train_step(step, workflows, interrupts)}
            before = {}
            self._commit(step, stats)
            if on_step is not None:
                on_step(StepReport(step=step, total_steps=self.total_steps, stats=stats))
            with interrupts.deferred():
                self._keep_step()
            self._progress.advance()
        self._progress.say(self._folder.farewell(self._num_steps))

    def _train_step(
        self, step: int, workflows: setup.Workflows, interrupts: Interrupts
    ) -> dict[str, float]:
        batch = Batch.from_trajectories(self._collect(workflows))
        # Servers go on sampling from the old weights until they get the new ones.
        is_local = isinstance(self.engine, LocalEngine)
        with self._held() if is_local else nullcontext(), interrupts.deferred():
            self._is_whole = False
            with self._phase("train_step"):
                self._replica.update(batch)
            with self._phase("update_weights"), nullcontext() if is_local else self._held():
                self._publish(step + 1)
            self._num_steps, self._is_whole = step + 1, True
            is_last = self._num_steps == self.total_steps
            if self._saver_due.is_due(self._num_steps) or is_last:
                with self._phase("save"):
                    self.save(f"step{step + 1}")
        if self.valid_rows and self._evaluator_due.is_due(self._num_steps):
            self._run_evaluation(workflows.eval)
        return stats_tracker.export_all() | system_metrics()

    def _collect(self, workflows: setup.Workflows) -> list[TensorDict]:
        size = self.config.rollout.consumer_batch_size
        if self.source is not None:
            with self._phase("rollout"):
                return self.source.drain(size)
        count = GroupCount(self.rollout.counts, size, num_before=self._num_taken)
        with self._phase("rollout", count):
            groups = self.rollout.prepare_batch(self._loader, **workflows.train)
        self._num_taken += len(groups)
        return groups

    @contextmanager
    def _held(self) -> Iterator[None]:
        """Nothing is sampled inside; requests wait, unless the source refuses them meanwhile."""
        with nullcontext() if self.source is None else self.source.updating():
            self.rollout.pause()
            try:
                yield
            finally:
                self.rollout.resume()

    def evaluate(
        self, workflow: Any, workflow_kwargs: Mapping[str, Any] | None = None
    ) -> dict[str, float]:
        """Metrics of one pass over ``valid_dataset``, each datum once, sampled by eval_gconfig.

        ``eval-rollout/reward`` is the mean over episodes that ended with a reward.
        """
        self._run_evaluation({"workflow": workflow, "workflow_kwargs": workflow_kwargs})
        return stats_tracker.get("eval-rollout").export()

    def save(self, name: str) -> Path:
        """Write the weights as the Hugging Face folder ``{run_dir}/checkpoints/{name}``.

        With ``actor.lora`` the adapters are added in, and stand alone in its folder ``adapter``.
        """
        folder = self.run_dir / "checkpoints" / name
        self._replica.export(folder, is_kept=True)
        return folder

    def _resume(self) -> int:
        """Continue from the state of an earlier process, if there is one; the steps it has done."""
        if self._recovery is None or not self._recovery.load(self._replica):
            if isinstance(self.engine, RemoteEngine):
                self._publish(0)  # servers may hold weights of an earlier run
            return 0
        num_steps = self._recovery.num_steps
        self._publish(num_steps)
        logger.warning("going on after step %d of %d", num_steps, self.total_steps)
        return num_steps

    def _keep_step(self) -> None:
        """Note where the run stands; write it where that is due."""
        if self._recovery is None:
            return
        is_due = self._recover_due.is_due(self._num_steps)
        self._recovery.note(self._num_steps)
        if is_due or self._num_steps == self.total_steps:
            with self._phase("recover"):
                self._write_recovery_or_serve_on(self._recovery)

    def _write_recovery_or_serve_on(self, recovery: Recovery) -> None:
        """A full disk is no reason to leave users without a model."""
        try:
            self._write_recovery(recovery)
        except CheckpointError as error:
            if self.source is None or self._num_steps == self.total_steps:
                raise
            logger.error(
                "serving goes on, and the state is written when it is due again: %s", error
            )

    def _keep_stopped(self) -> None:
        if not self._is_whole:
            logger.warning("stopped within an update: the weights are of no step and not kept")
        elif self._num_steps == 0 and self._recovery is not None:
            logger.warning("stopped before the first step was done")
        else:
            if self._recovery is None or self.source is not None:  # what users taught is wanted
                logger.warning("stopped; the checkpoint is in %s", self.save("interrupted"))
            if self._recovery is not None:
                if self._recovery.num_steps < self._num_steps:  # after the update of a step
                    self._recovery.note(self._num_steps)
                self._write_recovery(self._recovery)
                logger.warning("stopped after step %d; run it again to go on", self._num_steps)

    def _write_recovery(self, recovery: Recovery) -> None:
        recovery.save(self._replica)
        self.rollout.mark_trained(self._num_steps)
        if self.source is not None:
            self.source.note_saved(self._num_steps)

    def _run_evaluation(self, workflow: dict[str, Any]) -> None:
        if not self.valid_rows:
            raise ConfigError("there is no valid_dataset: give PPOTrainer one or set the key")
        counts = partial(self.rollout.counts, is_eval=True)
        count = GroupCount(counts, len(self.valid_rows), num_before=counts().accepted)
        with self._phase("eval", count):
            self.rollout.rollout_batch(self.valid_rows, **workflow, is_eval=True)

    @contextmanager
    def _phase(self, name: str, count: GroupCount | None = None) -> Iterator[None]:
        """Timed as ``timeperf/{name}``, and shown to the user."""
        with self._progress.phase(name, count), stats_tracker.record_timing(name):
            yield

    def _publish(self, version: int) -> None:
        """Make the engine sample from the weights as they are now, as ``version``."""
        if isinstance(self.engine, LocalEngine):
            self._replica.copy_to_engine()
            self.rollout.update_weights(WeightUpdate(version=version))
        else:
            self.rollout.update_weights(self._publisher.update(version))
            self._publisher.clean(version)

    def _commit(self, step: int, stats: Mapping[str, float]) -> None:
        epoch, epoch_step = divmod(step, len(self._loader))
        line = self._progress.step_line(health.one_line(stats, version=step + 1))
        words = health.describe(stats)
        self._logger.commit(epoch, epoch_step, step, stats, line=line, summary=words)
        for fault in self._faults.look(stats):
            logger.warning("step %d: %s", step + 1, fault)
