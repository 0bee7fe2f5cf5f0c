"""AdamW with a schedule, gradient clipping and float32 states for low-precision weights.

bfloat16 weights keep float32 master copies here: near 1.0 the spacing of bfloat16 is 0.004, and an
update of 1e-4 would vanish. Parameters are changed in place, because the engine shares them. A step
whose gradient is not finite is skipped and leaves no trace.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from agent_rl.config import OptimizerConfig
from agent_rl.errors import CheckpointError
from agent_rl.train.sharding import whole


def lr_multiplier(step: int, total_steps: int, config: OptimizerConfig) -> float:
    """Factor on ``lr`` for the 0-based ``step``.

    Warm-up takes int(warmup_steps_proportion * total_steps) steps. Cosine, total 100, proportion
    0.1, min_lr_ratio 0.1: steps 0, 5, 10, 55, 100 -> 0.1, 0.55, 1, 0.55, 0.1.
    """
    low = config.min_lr_ratio
    warmup = int(config.warmup_steps_proportion * total_steps)
    if step < warmup:
        start = low if config.lr_scheduler_type == "cosine" else 0.0
        return start + (1.0 - start) * step / warmup
    done = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    if config.lr_scheduler_type == "constant":
        return 1.0
    if config.lr_scheduler_type == "linear":
        return max(low, 1.0 - (1.0 - low) * done)
    return max(low, (1.0 - low) / 2.0 * math.cos(math.pi * done) + (1.0 + low) / 2.0)


class Optimizer:
    """Owns the gradient between ``collect`` (after each backward pass) and ``step``."""

    def __init__(
        self, parameters: Iterable[Parameter], config: OptimizerConfig, *, total_steps: int
    ) -> None:
        self._config = config
        self._total_steps = total_steps
        self._num_updates = 0
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._masters = [
            p if p.dtype in (torch.float32, torch.float64) else Parameter(p.detach().float())
            for p in self._parameters
        ]
        matrices = [p for p in self._masters if p.ndim >= 2]
        vectors = [p for p in self._masters if p.ndim < 2]
        self._adamw = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": config.weight_decay},
                # Norm weights and biases have no scale to hold down.
                {"params": vectors, "weight_decay": 0.0},
            ],
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            fused=bool(self._masters),
        )
        self._set_lr()

    @property
    def lr(self) -> float:
        return self._config.lr * lr_multiplier(self._num_updates, self._total_steps, self._config)

    @property
    def num_updates(self) -> int:
        """Updates that ended before: the version of the weights."""
        return self._num_updates

    @torch.no_grad()
    def collect(self) -> None:
        """Add the gradients of low-precision weights to those of their float32 masters."""
        for parameter, master in zip(self._parameters, self._masters, strict=True):
            if master is not parameter and parameter.grad is not None:
                grad = parameter.grad.float()
                master.grad = grad if master.grad is None else master.grad.add_(grad)
                parameter.grad = None

    @torch.no_grad()
    def step(self) -> tuple[Tensor, bool]:
        """Clip, step, clear: (norm before clipping, whether the weights changed)."""
        limit = self._config.gradient_clipping
        norm = whole(torch.nn.utils.clip_grad_norm_(self._masters, limit))
        is_finite = bool(torch.isfinite(norm))
        if is_finite:
            self._adamw.step()
            for parameter, master in zip(self._parameters, self._masters, strict=True):
                if master is not parameter:
                    parameter.copy_(master)
        self.clear()
        return norm.detach(), is_finite

    def clear(self) -> None:
        """Drop gradients, such as those of an update that was interrupted."""
        for parameter in (*self._parameters, *self._masters):
            parameter.grad = None

    def end_update(self) -> None:
        """Move the schedule on: once for each batch, however many steps that took."""
        self._num_updates += 1
        self._set_lr()

    @torch.no_grad()
    def allocate(self) -> None:
        """Make the states that the first step would make: a sharded state is read into them."""
        for master in self._masters:
            if not self._adamw.state[master]:
                self._adamw.state[master] = {
                    "step": torch.zeros((), device=master.device if master.is_cuda else "cpu"),
                    "exp_avg": torch.zeros_like(master),
                    "exp_avg_sq": torch.zeros_like(master),
                }

    def state_dict(self) -> dict[str, Any]:
        return {
            "adamw": self._adamw.state_dict(),
            "num_updates": self._num_updates,
            "masters": [
                None if master is parameter else master.detach()
                for parameter, master in zip(self._parameters, self._masters, strict=True)
            ],
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """After the weights themselves were loaded; their dtype may be another than it was."""
        saved = state["masters"]
        if len(saved) != len(self._masters):
            raise CheckpointError(
                f"the optimizer state has {len(saved)} parameters, the model {len(self._masters)}"
            )
        options = [
            {name: value for name, value in group.items() if name != "params"}
            for group in self._adamw.param_groups
        ]
        self._adamw.load_state_dict(state["adamw"])
        for group, own in zip(self._adamw.param_groups, options, strict=True):
            group.update(own)  # the config of today, not that of the saved run
        self._num_updates = state["num_updates"]
        for parameter, master, values in zip(self._parameters, self._masters, saved, strict=True):
            if values is not None:
                master.copy_(values)
            elif master is not parameter:  # the saved run had no masters: its weights were float32
                master.copy_(parameter)
        self._set_lr()

    def _set_lr(self) -> None:
        for group in self._adamw.param_groups:
            group["lr"] = self.lr
