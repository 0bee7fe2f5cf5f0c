"""Team: the processes that train one model, and how they share the work of an update.

Every process has the whole batch and plans it alike: advantages, weights and minibatches are those
of one process, to the last denominator and the last statistic. Only the passes through the model
are divided, by whole groups or logical rollouts, and what they found is summed. One process is a
team of one, for which all of this does nothing.

The first process collects, logs and decides; the others follow it (``announce``, ``listen``). What
it sends is pickled: it is for the processes that one ``torchrun`` has started, nobody else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from agent_rl.errors import ConfigError
from agent_rl.train.batch import Batch, MicroBatch, balanced, idle_micro_batch

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_PATIENCE = timedelta(days=30)
"""Of processes that wait while the first one collects episodes."""


@dataclass(frozen=True, slots=True)
class Command:
    """What the first process is about to do and the others do with it."""

    name: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)


class Team:
    """Made by ``Team.join()``, once in a process; ``Team()`` is a team of one.

    ``reshards``: see ``parallel.reshard_after_forward``.
    """

    _has_left = False

    def __init__(self, group: ProcessGroup | None = None, *, reshards: bool = True) -> None:
        self.reshards = reshards
        self.group = group
        self.rank = 0 if group is None else dist.get_rank()
        self.size = 1 if group is None else dist.get_world_size()

    @classmethod
    def join(cls, device: str, *, reshards: bool = True) -> Team:
        """The team of all processes of this ``torchrun``; of one where there was none.

        Raises:
            ConfigError: the team of this process has ended already.
        """
        if not dist.is_torchelastic_launched():
            return cls()
        if cls._has_left:
            raise ConfigError(
                "a second PPOTrainer in one torchrun: the other processes ended with the first one"
            )
        if not dist.is_initialized():
            if device != "cpu":
                torch.cuda.set_device(dist.get_node_local_rank())
            dist.init_process_group("gloo" if device == "cpu" else "cpu:gloo,cuda:nccl")
        return cls(dist.new_group(backend="gloo", timeout=_PATIENCE), reshards=reshards)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def own_rows(self, batch: Batch, rows: Sequence[int]) -> list[int]:
        """The rows that this process computes: about equally many tokens for each process.

        A group stays together, so that its prefix is computed once, where there are as many groups
        as processes; a logical rollout always does. A process may have no rows.
        """
        if self.size == 1:
            return list(rows)
        parts = balanced(batch, rows, batch.lengths, self.size)
        return parts[self.rank] if self.rank < len(parts) else []

    def even(self, own: list[MicroBatch], batch: Batch) -> list[MicroBatch]:
        """As many passes in every process: one that came to a pass alone would wait for ever."""
        if self.size == 1:
            return own
        count = torch.tensor(len(own))
        dist.all_reduce(count, dist.ReduceOp.MAX, self.group)
        return own + [idle_micro_batch(batch)] * (int(count) - len(own))

    def add_up(self, values: Tensor) -> Tensor:
        """The sum over all processes, the same bits in each; [T] values are 0 off the own rows."""
        if self.size == 1:
            return values
        total = values.detach().to("cpu", copy=True)
        dist.all_reduce(total, group=self.group)
        return total.to(values.device)

    def announce(self, command: Command) -> None:
        """Called by the first process; the others get the command from ``listen``."""
        if self.size > 1 and self.is_first:
            dist.broadcast_object_list([command], src=0, group=self.group)

    def listen(self) -> Command:
        """Wait for what the first process does next."""
        received: list[Any] = [None]
        dist.broadcast_object_list(received, src=0, group=self.group)
        assert isinstance(received[0], Command), "only announce() sends here"
        return received[0]

    def leave(self) -> None:
        """The last call in a process."""
        if self.size > 1:
            type(self)._has_left = True
            dist.destroy_process_group()
