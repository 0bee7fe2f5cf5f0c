"""Running sums of one metric key: a scalar, a denominator, or a masked stat.

A stat is reduced when it is recorded, so memory does not grow with the tokens seen. Its sums stay
tensors on the device and are read once, at export. Nothing here knows scopes, locks or ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup


class ReduceType(StrEnum):
    """What a key exports; docs/guides/metrics.md has the table."""

    AVG_MIN_MAX = "avg_min_max"
    AVG = "avg"
    SUM = "sum"
    MIN = "min"
    MAX = "max"
    SCALAR = "scalar"


Sums: TypeAlias = "tuple[Tensor, Tensor, Tensor, Tensor]"
"""0-d tensors: sum, count, minimum and maximum over the True positions."""


@dataclass(slots=True)
class Scalar:
    total: float = 0.0
    count: int = 0

    def add(self, value: float) -> None:
        self.total += value
        self.count += 1


@dataclass(slots=True)
class Denominator:
    """The masks that stats refer to by their index, and how many positions are True."""

    masks: list[Tensor] = field(default_factory=list)
    num_cleared: int = 0
    count: Tensor | None = None

    def add(self, mask: Tensor) -> None:
        mask = mask.detach().clone()
        self.masks.append(mask)
        count = mask.sum()
        self.count = count if self.count is None else self.count + count

    def mask(self, index: int) -> Tensor | None:
        """The ``index``-th mask recorded; None where there is none, or it was exported."""
        index -= self.num_cleared
        return self.masks[index] if 0 <= index < len(self.masks) else None

    def clear(self) -> None:
        self.num_cleared += len(self.masks)
        self.masks, self.count = [], None

    def sums(self) -> Sums | None:
        return None if self.count is None else (self.count,) * 4


@dataclass(slots=True)
class Stat:
    """Sums over the True positions: x=[1,2,3] mask TTF and x=[5] mask T -> sum 8, count 3."""

    denominator: str
    reduce_type: ReduceType
    group: ProcessGroup | None
    num_records: int = 0
    running: Sums | None = None

    def add(self, values: Tensor, mask: Tensor) -> None:
        self.num_records += 1
        new = _masked_sums(values.detach(), mask.to(values.device))
        self.running = new if self.running is None else _join(self.running, new)

    def clear(self) -> None:
        """Forget the sums, but not which mask comes next."""
        self.running = None

    def sums(self) -> Sums | None:
        return self.running


def _masked_sums(values: Tensor, mask: Tensor) -> Sums:
    """``where`` and not a product: 0 * nan is nan, and padding may hold anything.

    The sum is float64: float32 loses counts and small terms after 2**24 tokens.
    """
    import torch

    return (
        torch.where(mask, values, 0.0).sum(dtype=torch.float64),
        mask.sum(),
        torch.where(mask, values, math.inf).min(),
        torch.where(mask, values, -math.inf).max(),
    )


def _join(old: Sums, new: Sums) -> Sums:
    import torch

    return (
        old[0] + new[0],
        old[1] + new[1],
        torch.minimum(old[2], new[2]),
        torch.maximum(old[3], new[3]),
    )


def read_sums(sums: list[Sums]) -> list[list[float]]:
    """All sums as numbers, with one transfer from the device."""
    if not sums:
        return []
    import torch

    device = sums[0][0].device
    flat = [value.to(device, torch.float64) for four in sums for value in four]
    numbers: list[list[float]] = torch.stack(flat).view(-1, 4).tolist()
    return numbers


def as_number(value: object) -> float | None:
    """The value as a float; None for what is no single number (text is none, even "3")."""
    if isinstance(value, str | bytes):
        return None
    try:
        return float(value)  # type: ignore[arg-type]  # asks the value itself
    except (TypeError, ValueError, OverflowError, RuntimeError):  # RuntimeError: a larger tensor
        return None
