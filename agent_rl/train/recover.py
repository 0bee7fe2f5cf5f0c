"""Recovery: the run's state on disk, from which a restarted run goes on as if it never stopped.

``{run_dir}/recover/step12/`` is the state after 12 whole steps: ``actor/`` (weights, optimizer) and
``run.json`` (random states, dataloader, rollout, logger, frequencies), with the checksums of both.
It appears by renaming a folder that is complete and flushed, and earlier ones are removed after
that: whatever kills the process, a whole state is there. A state that is there and cannot be used
is an error, never a fresh start.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from agent_rl.engine.checksums import ALL_FILES, check_checksums, write_checksums
from agent_rl.errors import CheckpointError
from agent_rl.train.checkpoint import whole_folder
from agent_rl.train.random_states import random_states, restore_random_states
from agent_rl.train.replica import Replica
from agent_rl.types import JsonObject

_FORMAT = 2
_STATE = re.compile(r"step(\d+)")


class Stateful(Protocol):
    """Has a small state of plain JSON values."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any) -> None: ...


class Recovery:
    """
    Args:
        folder: ``{run_dir}/recover``; it is created by the first ``save``.
        seed: of the run; a state of another seed is refused.
        model: that the run started from; likewise.
        parts: what has a state of its own, by its name in ``run.json``.

    ``num_steps`` whole steps are in the state that ``note`` or ``load`` saw last.
    """

    def __init__(
        self, folder: Path, *, seed: int, model: str, parts: Mapping[str, Stateful]
    ) -> None:
        self.folder = folder
        self.num_steps = 0
        self._seed = seed
        self._model = model
        self._parts = parts
        self._noted = ""

    def note(self, num_steps: int) -> None:
        """Keep in memory how everything but the weights stands after ``num_steps`` whole steps.

        What begins after this, such as the episodes of the next step, is not in what ``save``
        writes: a run that was stopped half way through them begins the step again.
        """
        noted = {
            "format": _FORMAT,
            "num_steps": num_steps,
            "seed": self._seed,
            "model": self._model,
            "random_states": random_states(),
            "parts": {name: part.state_dict() for name, part in self._parts.items()},
        }
        try:
            self.num_steps, self._noted = num_steps, json.dumps(noted)
        except (TypeError, ValueError) as error:
            raise CheckpointError(
                f"recover.mode=auto needs dataset rows of plain JSON values: {error}"
            ) from error

    def save(self, replica: Replica) -> Path:
        """Write what was noted, with weights and optimizer; remove earlier states.

        Raises:
            CheckpointError: the disk fails. The earlier state is kept.
        """
        target = self.folder / f"step{self.num_steps}"
        if not target.exists():
            with whole_folder(target) as work:
                replica.save_state(work / "actor")
                (work / "run.json").write_text(self._noted, encoding="utf-8")
                write_checksums(work, ALL_FILES)
        for path in self.folder.glob("*step*"):  # also what a killed save left behind
            if path != target:
                shutil.rmtree(path, ignore_errors=True)
        return target

    def load(self, replica: Replica) -> bool:
        """Put the newest state into actor and parts; False: there is none.

        ``restore_randomness`` is apart, because what is done before training draws as well.

        Raises:
            CheckpointError: there is one, but damaged or of another run.
        """
        newest = self._newest()
        if newest is None:
            return False
        try:
            noted = _read_json(newest / "run.json")
            self._check(noted)
            check_checksums(newest, ALL_FILES)
            replica.load_state(newest / "actor")
            for name, part in self._parts.items():
                part.load_state_dict(noted["parts"][name])
        except (CheckpointError, KeyError, RuntimeError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"cannot resume from {newest}: {_reason(error)}; to start anew, remove "
                f"{self.folder} or choose another trial_name"
            ) from error
        self.num_steps, self._noted = noted["num_steps"], json.dumps(noted)
        return True

    def restore_randomness(self) -> None:
        """After ``load``: all generators stand where the saved run's stood after its last step."""
        restore_random_states(json.loads(self._noted)["random_states"])

    def _newest(self) -> Path | None:
        if not self.folder.is_dir():
            return None
        found = {
            int(match[1]): path
            for path in self.folder.iterdir()
            if (match := _STATE.fullmatch(path.name))
        }
        return found[max(found)] if found else None

    def _check(self, noted: JsonObject) -> None:
        if noted["format"] != _FORMAT:
            raise CheckpointError(f"its format is {noted['format']!r}, not {_FORMAT}")
        if noted["seed"] != self._seed:
            raise CheckpointError(f"it was written with seed={noted['seed']}, not {self._seed}")
        if noted["model"] != self._model:
            raise CheckpointError(f"it began with the model {noted['model']}, not {self._model}")
        if type(noted["num_steps"]) is not int or noted["num_steps"] < 0:
            raise CheckpointError(f"num_steps is {noted['num_steps']!r}")


def _read_json(path: Path) -> JsonObject:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path.name} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path.name} holds a {type(value).__name__}, not an object")
    return value


def _reason(error: BaseException) -> str:
    if isinstance(error, KeyError):
        return f"{error.args[0]!r} is missing"
    return " ".join(str(error).split())[:300]
