"""The folder of a run: whose it is, and what becomes of an earlier run's.

Nothing of an earlier run is overwritten: a run that does not go on from what it finds there moves
it aside, ``trial`` -> ``trial.1``. Two runs never write to one folder at the same time.
"""

from __future__ import annotations

import fcntl
import logging
import os
import weakref
from collections.abc import Callable
from pathlib import Path

import yaml

from agent_rl.config import PPOConfig
from agent_rl.errors import CheckpointError, ConfigError
from agent_rl.stats.redact import redact_sensitive_config

logger = logging.getLogger(__name__)

_LOCK = ".lock"
_WORK = (
    *("metrics.jsonl", "checkpoints", "recover", "rollout", "eval-rollout"),
    *("rollout.journal", "samples.journal", "turns.jsonl"),
)
"""What a run leaves behind once it has done something."""


class RunFolder:
    """``{fileroot}/{experiment_name}/{trial_name}``; nothing is written before ``claim``."""

    def __init__(self, config: PPOConfig) -> None:
        self.path = Path(config.fileroot) / config.experiment_name / config.trial_name
        self._config = config
        self._unlock: Callable[[], object] | None = None

    def claim(self) -> None:
        """Make the folder this run's alone until ``release``, and write ``config.yaml`` there.

        An earlier run that this one does not go on from is moved aside.

        Raises:
            ConfigError: another run is writing there, or a folder that other trials are in (an
                empty trial_name) has an earlier run.
            CheckpointError: the folder cannot be written.
        """
        try:
            self._own()
            if not self._goes_on() and any((self.path / name).exists() for name in _WORK):
                self._move_aside()
                self._own()
            tree = redact_sensitive_config(self._config.model_dump(mode="json"))
            text = yaml.safe_dump(tree, sort_keys=False)
            (self.path / "config.yaml").write_text(text, encoding="utf-8")
        except OSError as error:
            self.release()
            raise CheckpointError(f"cannot write the run's folder {self.path}: {error}") from error

    def release(self) -> None:
        """Other runs may have the folder. May be called twice."""
        if self._unlock is not None:
            self._unlock()

    def farewell(self, num_steps: int) -> str:
        """``finished: 2 steps; checkpoint in runs/a/b/checkpoints/step2/; metrics in ...``"""
        parts = [f"finished: {num_steps} steps"]
        checkpoint = self.path / "checkpoints" / f"step{num_steps}"
        if checkpoint.is_dir():
            parts.append(f"checkpoint in {checkpoint}/")
        if self._config.stats_logger.jsonl:
            parts.append(f"metrics in {self.path / 'metrics.jsonl'}")
        return "; ".join(parts)

    def _goes_on(self) -> bool:
        """From the state of an earlier process, from the episodes that it had finished, or from
        the conversations that it had judged."""
        config = self._config
        if config.recover.mode == "off":
            return False
        has_journal = config.rollout.journal and (self.path / "rollout.journal").exists()
        is_online = config.rollout.agent.mode == "online"
        has_samples = is_online and (self.path / "samples.journal").exists()
        return has_journal or has_samples or any((self.path / "recover").glob("step*"))

    def _own(self) -> None:
        self.release()
        self.path.mkdir(parents=True, exist_ok=True)
        lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        # Also when the run's constructor fails and nobody is left to call release.
        self._unlock = weakref.finalize(self, os.close, lock)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.release()
            raise ConfigError(
                f"another run is writing to {self.path} (or a trainer there was not closed); "
                "choose another trial_name"
            ) from None

    def _move_aside(self) -> None:
        if not self._config.trial_name:
            self.release()
            raise ConfigError(
                f"{self.path} holds an earlier run; with trial_name='' it may hold other trials "
                "too and is not moved aside: remove it, or set trial_name"
            )
        number = 1
        while (aside := self.path.with_name(f"{self.path.name}.{number}")).exists():
            number += 1
        self.path.rename(aside)
        logger.warning("the earlier run of %s is in %s now", self.path, aside)
