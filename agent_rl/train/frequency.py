"""When something periodic is due: every so many epochs, steps or seconds, whichever is first."""

from __future__ import annotations

import time
from collections.abc import Mapping

from agent_rl.config import StepsConfig


class Frequency:
    """Asked once after every step. All limits null: never due."""

    def __init__(self, config: StepsConfig, *, steps_per_epoch: int) -> None:
        self._config = config
        self._steps_per_epoch = steps_per_epoch
        self._steps = 0
        self._epochs = 0
        self._last_s = time.monotonic()

    def is_due(self, num_steps: int) -> bool:
        """After the run's first ``num_steps`` steps."""
        self._steps += 1
        self._epochs += num_steps % self._steps_per_epoch == 0
        now_s = time.monotonic()
        limits = (
            (self._config.freq_steps, self._steps),
            (self._config.freq_epochs, self._epochs),
            (self._config.freq_secs, now_s - self._last_s),
        )
        if not any(limit is not None and count >= limit for limit, count in limits):
            return False
        self._steps = self._epochs = 0
        self._last_s = now_s
        return True

    def state_dict(self) -> dict[str, float]:
        elapsed_s = time.monotonic() - self._last_s
        return {"steps": self._steps, "epochs": self._epochs, "elapsed_s": elapsed_s}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Time that passed between the two processes does not count."""
        self._steps, self._epochs = int(state["steps"]), int(state["epochs"])
        self._last_s = time.monotonic() - state["elapsed_s"]
