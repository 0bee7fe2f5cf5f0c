"""StatsLogger: one commit for each step, to every sink that the config names. Rank 0 only.

Steps strictly increase, also over a resume: ``step = max(global_step, last step + 1)``. Keys that
end in ``__count`` are weights for merging and stay behind. What belongs to one step - training and
evaluation - is committed in one dict.
"""

from __future__ import annotations

import atexit
import getpass
import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from agent_rl.config import PPOConfig
from agent_rl.stats.accumulators import as_number
from agent_rl.stats.console import LineSink, TableSink
from agent_rl.stats.jsonl import JsonlSink
from agent_rl.stats.ranks import own_rank
from agent_rl.stats.redact import redact_sensitive_config
from agent_rl.stats.services import SwanLabSink, TensorBoardSink, TrackioSink, WandbSink
from agent_rl.stats.sink import BackgroundSink, Commit, GuardedSink
from agent_rl.stats.version import version_info

logger = logging.getLogger(__name__)
Metrics: TypeAlias = Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class FinetuneSpec:
    """How long the training is; for the header of each step."""

    total_train_epochs: int
    steps_per_epoch: int
    total_train_steps: int


class StatsLogger:
    """Sends each step's metrics to the sinks of ``config.stats_logger``.

    Args:
        config: the whole PPOConfig: its names and a redacted copy go with the run.
        ft_spec: totals for the header.
        log_dir: folder of metrics.jsonl and of what services keep on this machine; None:
            ``{fileroot}/logs/{user}/{experiment_name}/{trial_name}``. Created on demand.

    Raises:
        ValueError: ``config`` is not a PPOConfig.
        MissingDependencyError: a sink is enabled and its package is not installed.
    """

    def __init__(
        self, config: PPOConfig, ft_spec: FinetuneSpec, *, log_dir: str | Path | None = None
    ) -> None:
        if not isinstance(config, PPOConfig):
            raise ValueError(
                f"StatsLogger needs the whole PPOConfig, not {type(config).__name__}: it also "
                "reads experiment_name, trial_name and fileroot"
            )
        self.log_dir = default_log_dir(config) if log_dir is None else Path(log_dir)
        self._ft_spec = ft_spec
        self._last_commit_step = -1
        self._close_timeout_s = config.stats_logger.close_timeout_s
        self._skipped: set[str] = set()
        self._is_closed = False
        self._sinks = list(_make_sinks(config, self.log_dir)) if own_rank() == 0 else []
        atexit.register(self.close)

    def commit(
        self,
        epoch: int,
        step: int,
        global_step: int,
        data: Metrics | Sequence[Metrics],
        *,
        line: str = "",
        summary: str = "",
    ) -> None:
        """Log one dict at one step, or a list of dicts at consecutive steps.

        Counters begin at 0; ``step`` is within the epoch. For the console, ``line`` is the step in
        one line ("": the counters) and ``summary`` the metrics in words, above their table. Ranks
        other than 0 do nothing.
        """
        if own_rank() != 0:
            return
        if self._is_closed:
            raise RuntimeError("commit() after close() of StatsLogger")
        items = [data] if isinstance(data, Mapping) else list(data)
        spec = self._ft_spec
        header = (
            f"Epoch {epoch + 1}/{spec.total_train_epochs} "
            f"Step {step + 1}/{spec.steps_per_epoch} "
            f"Train step {global_step + 1}/{spec.total_train_steps}"
        )
        log_step = max(global_step, self._last_commit_step + 1)
        for offset, item in enumerate(items):
            row = Commit(
                step=log_step + offset,
                epoch=epoch,
                epoch_step=step,
                global_step=global_step,
                header=header,
                metrics=self._clean(item),
                line=line,
                summary=summary,
            )
            for sink in self._sinks:
                sink.log(row)
        if items:
            self._last_commit_step = log_step + len(items) - 1

    def _clean(self, item: Metrics) -> dict[str, float]:
        metrics = {}
        for key, value in item.items():
            if key.endswith("__count"):
                continue
            number = as_number(value)
            if number is not None:
                metrics[key] = number
            elif key not in self._skipped:
                self._skipped.add(key)
                logger.warning("metric %r skipped: %.80r is not a number", key, value)
        return metrics

    def state_dict(self) -> dict[str, int]:
        return {"last_commit_step": self._last_commit_step}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Call before the first commit, so that the sinks know where the run goes on."""
        self._last_commit_step = state["last_commit_step"]

    def close(self) -> None:
        """Let the sinks finish, all at once, within ``close_timeout_s``. May be called twice."""
        if self._is_closed:
            return
        self._is_closed = True
        atexit.unregister(self.close)
        deadline_s = time.monotonic() + self._close_timeout_s
        for sink in self._sinks:
            sink.request_close()
        for sink in self._sinks:
            sink.join(deadline_s)

    def __enter__(self) -> StatsLogger:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def default_log_dir(config: PPOConfig) -> Path:
    """``{fileroot}/logs/{user}/{experiment_name}/{trial_name}``."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        user = f"uid{os.getuid()}"
    root = Path(config.fileroot) / "logs" / user
    return root / config.experiment_name / config.trial_name


def _make_sinks(config: PPOConfig, log_dir: Path) -> Iterator[GuardedSink | BackgroundSink]:
    section = config.stats_logger
    if section.console != "off":
        yield GuardedSink(LineSink() if section.console == "line" else TableSink())
    if section.jsonl:
        yield GuardedSink(JsonlSink(log_dir / "metrics.jsonl"))
    services = (section.wandb, section.swanlab, section.trackio)
    if section.tensorboard.path is None and all(each.mode == "disabled" for each in services):
        return
    run_config = redact_sensitive_config(config.model_dump(mode="json"))
    run_config["version_info"] = dict(version_info())
    if section.tensorboard.path is not None:
        yield BackgroundSink(TensorBoardSink(section.tensorboard.path, run_config))
    if section.wandb.mode != "disabled":
        yield BackgroundSink(WandbSink(config, log_dir, run_config))
    if section.swanlab.mode != "disabled":
        yield BackgroundSink(SwanLabSink(config, log_dir, run_config))
    if section.trackio.mode != "disabled":
        yield BackgroundSink(TrackioSink(config, run_config))
