"""Replica: what each process of a run has of the trained model, and what all do with it together.

The first process calls these methods; each call is announced first, so that the others, which do
nothing but ``follow``, make the same call and meet it in the collectives inside. In a run of one
process they are plain methods.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, NoReturn, ParamSpec, TypeVar

import torch
from torch import Tensor

from agent_rl.errors import AgentRLError
from agent_rl.stats import tracker as stats_tracker
from agent_rl.train.actor import Actor, UpdateReport
from agent_rl.train.batch import Batch
from agent_rl.train.checkpoint import (
    load_state,
    save_adapter_checkpoint,
    save_hf_checkpoint,
    save_state,
)
from agent_rl.train.sharding import whole_weights
from agent_rl.train.team import Command, Team

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

P = ParamSpec("P")
T = TypeVar("T")
logger = logging.getLogger(__name__)

_DISMISS = "dismiss"


def together(
    method: Callable[Concatenate[Replica, P], T],
) -> Callable[Concatenate[Replica, P], T]:
    """Let all processes call this method at the same time."""

    @wraps(method)
    def everywhere(self: Replica, /, *args: P.args, **kwargs: P.kwargs) -> T:
        self.team.announce(Command(method.__name__, args, dict(kwargs)))
        return method(self, *args, **kwargs)

    return everywhere


class Replica:
    """``engine_model``: of the first process, where its engine has weights of its own."""

    def __init__(
        self,
        actor: Actor,
        team: Team,
        tokenizer: PreTrainedTokenizerBase,
        *,
        engine_model: Any = None,
    ) -> None:
        self.actor = actor
        self.team = team
        self._tokenizer = tokenizer
        self._engine_model = engine_model
        self._is_dismissed = False

    @together
    def update(self, batch: Batch) -> UpdateReport:
        """See ``Actor.update``."""
        return self.actor.update(batch)

    @together
    @torch.no_grad()
    def copy_to_engine(self) -> None:
        """Give the engine's own model the weights as they are now; one process shares them."""
        if self.team.size == 1:
            return
        own = None if self._engine_model is None else self._engine_model.state_dict()
        for name, value in whole_weights(self.actor.model):
            if own is not None:
                own[name].copy_(value)

    @together
    def export(self, folder: Path, *, is_kept: bool = False) -> None:
        """Write the weights as a Hugging Face folder; one that is kept has checksums."""
        weights = self._whole() if self.team.size > 1 else None
        if self.team.is_first:
            save_hf_checkpoint(
                self.actor.model, self._tokenizer, folder, weights=weights, has_checksums=is_kept
            )

    @together
    def gather(self) -> dict[str, Tensor]:
        """The weights in the first process, those that are tied once."""
        unique = {name for name, _ in self.actor.model.named_parameters()}
        weights = self.actor.model.state_dict() if self.team.size == 1 else self._whole()
        return {name: value for name, value in weights.items() if name in unique}

    def _whole(self) -> dict[str, Tensor]:
        """On the CPU of the first process; the others help and get nothing."""
        weights = {}
        for name, value in whole_weights(self.actor.model):
            if self.team.is_first:
                weights[name] = value.cpu()
        return weights

    @together
    def export_adapters(self, folder: Path) -> None:
        """Write the adapters alone, as a peft folder."""
        save_adapter_checkpoint(self.actor.model, folder)

    @together
    def save_state(self, folder: Path) -> None:
        """Everything that an exact continuation needs; each process writes its part."""
        save_state(self.actor.state_dict(), folder, self.team)

    @together
    def load_state(self, folder: Path) -> None:
        """
        Raises:
            CheckpointError: the folder is damaged, or of another model.
        """
        like = None
        if self.team.size > 1:
            self.actor.allocate()
            like = self.actor.state_dict()
        self.actor.load_state_dict(load_state(folder, like=like, team=self.team))

    def follow(self) -> NoReturn:
        """Do what the first process does until it dismisses this one, then end the process.

        Signals are for the first process: torchrun sends them to all.

        Raises:
            SystemExit: with code 0, at the end.
        """
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        while (command := self.team.listen()).name != _DISMISS:
            try:
                getattr(self, command.name)(*command.args, **command.kwargs)
            except AgentRLError as error:  # the first process has it as well, and decides
                logger.warning("process %d: %s failed: %s", self.team.rank, command.name, error)
            stats_tracker.export_all()  # the first process logs
        self.team.leave()
        raise SystemExit(0)

    def dismiss(self) -> None:
        """Let the other processes end. May be called twice."""
        if not self._is_dismissed:
            self._is_dismissed = True
            self.team.announce(Command(_DISMISS))
            self.team.leave()
