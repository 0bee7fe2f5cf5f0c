"""The reference: the frozen policy whose distance the KL terms measure.

A model of its own, or the actor's with its adapters switched off: the same weights as before
training, at no cost in memory. It never changes, so a resumed run loads it as the first one did.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from agent_rl.config import RefConfig
from agent_rl.train.batch import Batch
from agent_rl.train.forward import score, segment_attention
from agent_rl.train.lora import adapters_off
from agent_rl.train.sharding import shard
from agent_rl.train.team import Team


class Reference:
    """``model`` is frozen here, unless it is the actor's (``is_actor``)."""

    def __init__(
        self,
        model: Any,
        config: RefConfig,
        *,
        temperature: float,
        is_actor: bool = False,
        team: Team | None = None,
    ) -> None:
        self._model = model
        self._config = config
        self._temperature = temperature
        self._is_actor = is_actor
        self._team = team or Team()
        if not is_actor:
            model.requires_grad_(False).eval()
            shard(model, self._team)

    def logprobs(self, batch: Batch) -> Tensor:
        """[T] of the trained tokens, under the temperature they were sampled with."""
        without = adapters_off(self._model) if self._is_actor else nullcontext()
        with torch.no_grad(), without, segment_attention(self._model):
            return score(
                self._model,
                batch.without_choices(),
                temperature=self._temperature,
                max_tokens=self._config.max_tokens_per_mb,
                team=self._team,
            )
