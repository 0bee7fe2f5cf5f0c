"""How far collection may run ahead of training, as one pure formula; and how old rows are.

Bound of staleness 2, batches of 4 groups, version 0: (2 + 0 + 1) * 4 = 12 groups may be accepted
or running. Each new version opens room for one more batch. Bound 0 is synchronous: no group of the
next batch starts before the weights that it is meant for are there. The bound is on starting: a
group that takes long is older when it ends.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from agent_rl.types import TensorDict


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """``max_staleness=None`` is no bound: evaluation and one-shot batches."""

    max_concurrent: int
    batch_size: int = 1
    max_staleness: int | None = None

    def capacity(self, *, version: int, accepted: int, running: int) -> int:
        """Groups that may start now; negative where the limits are overdrawn.

        ``accepted`` counts since version 0, also what earlier processes accepted.
        """
        room = self.max_concurrent - running
        if self.max_staleness is None:
            return room
        allowed = (self.max_staleness + version + 1) * self.batch_size
        return min(room, allowed - (accepted + running))

    def consumed(self, version: int) -> int:
        """Groups that were accepted at least, if training has reached ``version``.

        A new process that starts at version 50 has accepted nothing, but 50 batches went before:
        counted from here, bound 2 and batches of 8 leave room for 53 * 8 - 50 * 8 = 24, not 424.
        """
        return version * self.batch_size


def head_version(group: TensorDict) -> int:
    """The oldest version of its sampled tokens; -1 where nothing says."""
    mask, versions = group.get("loss_mask"), group.get("versions")
    if not isinstance(mask, Tensor) or not isinstance(versions, Tensor) or not mask.any():
        return -1
    return int(versions[mask.bool()].min())
