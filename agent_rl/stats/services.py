"""The third-party sinks: TensorBoard, wandb, SwanLab, Trackio. Each imported only when enabled."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import sys
import time
from pathlib import Path
from typing import Any

from agent_rl.config import PPOConfig
from agent_rl.errors import MissingDependencyError
from agent_rl.stats.sink import Commit
from agent_rl.types import JsonObject

logger = logging.getLogger(__name__)
_LOGIN_TIMEOUT_S = 30


def require_package(package: str, *, needed_by: str, install: str = "") -> None:
    """Raise MissingDependencyError in one line when the package is not installed."""
    if sys.modules.get(package) is None and importlib.util.find_spec(package) is None:
        raise MissingDependencyError(
            f"{needed_by} needs the package {package}; run: pip install '{install or package}'"
        )


class TensorBoardSink:
    name = "tensorboard"

    def __init__(self, path: str, run_config: JsonObject) -> None:
        require_package("tensorboard", needed_by="stats_logger.tensorboard")
        self._path = path
        self._run_config = run_config

    def open(self, next_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # purge_step hides what a crashed run wrote of the steps that are repeated now
        self._writer: Any = SummaryWriter(self._path, purge_step=next_step or None)
        self._writer.add_text("config", f"```\n{json.dumps(self._run_config, indent=2)}\n```", 0)

    def log(self, commit: Commit) -> None:
        for key, value in commit.metrics.items():
            self._writer.add_scalar(key, value, commit.step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbSink:
    name = "wandb"

    def __init__(self, config: PPOConfig, log_dir: Path, run_config: JsonObject) -> None:
        require_package("wandb", needed_by="stats_logger.wandb")
        self._config = config
        self._log_dir = log_dir
        self._run_config = run_config
        self._first_step = 0

    def open(self, next_step: int) -> None:
        import wandb

        section = self._config.stats_logger.wandb
        experiment, trial = self._config.experiment_name, self._config.trial_name
        suffix = section.id_suffix
        if suffix == "timestamp":
            suffix = time.strftime("%Y_%m_%d_%H_%M_%S")
        for variable, value in (
            ("WANDB_BASE_URL", section.base_url),
            ("WANDB_API_KEY", section.api_key),
        ):
            if value:  # its service process reads them too
                os.environ[variable] = value
        if section.mode in ("online", "shared"):
            wandb.login(timeout=_LOGIN_TIMEOUT_S)
        self._log_dir.mkdir(parents=True, exist_ok=True)
        self._run: Any = wandb.init(
            mode=section.mode,
            entity=section.entity,
            project=section.project or experiment,
            name=section.name or trial,
            group=section.group or f"{experiment}_{trial}",
            job_type=section.job_type,
            notes=section.notes,
            tags=list(section.tags),
            id=f"{experiment}_{trial}_{suffix}",
            resume="allow",
            dir=str(self._log_dir),
            config=self._run_config,
        )
        self._first_step = self._run.step
        if self._first_step > next_step:
            logger.info(
                "wandb has the steps before %d already; they are not sent again", self._first_step
            )

    def log(self, commit: Commit) -> None:
        if commit.step >= self._first_step:  # it refuses steps that go back
            self._run.log(dict(commit.metrics), step=commit.step)

    def close(self) -> None:
        self._run.finish()


class SwanLabSink:
    name = "swanlab"

    def __init__(self, config: PPOConfig, log_dir: Path, run_config: JsonObject) -> None:
        require_package("swanlab", needed_by="stats_logger.swanlab")
        if config.stats_logger.swanlab.mode == "local":
            require_package(
                "swanboard",
                needed_by="stats_logger.swanlab.mode=local",
                install="swanlab[dashboard]",
            )
        self._config = config
        self._log_dir = log_dir
        self._run_config = run_config

    def open(self, next_step: int) -> None:
        import swanlab

        section = self._config.stats_logger.swanlab
        if section.mode == "cloud" and section.api_key:
            swanlab.login(api_key=section.api_key)
        folder = self._log_dir / "swanlab"
        folder.mkdir(parents=True, exist_ok=True)
        swanlab.init(
            mode=section.mode,
            project=section.project or self._config.experiment_name,
            experiment_name=section.name or f"{self._config.trial_name}_train",
            logdir=str(folder),
            config=self._run_config,
        )
        self._swanlab: Any = swanlab

    def log(self, commit: Commit) -> None:
        self._swanlab.log(dict(commit.metrics), step=commit.step)

    def close(self) -> None:
        self._swanlab.finish()


class TrackioSink:
    name = "trackio"

    def __init__(self, config: PPOConfig, run_config: JsonObject) -> None:
        require_package("trackio", needed_by="stats_logger.trackio")
        self._config = config
        self._run_config = run_config

    def open(self, next_step: int) -> None:
        import trackio

        section = self._config.stats_logger.trackio
        trackio.init(
            project=section.project or self._config.experiment_name,
            name=section.name or self._config.trial_name,
            space_id=section.space_id if section.mode == "online" else None,
            resume="allow",
            config=self._run_config,
        )
        self._trackio: Any = trackio

    def log(self, commit: Commit) -> None:
        self._trackio.log(dict(commit.metrics), step=commit.step)

    def close(self) -> None:
        self._trackio.finish()
