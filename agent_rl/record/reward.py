"""What counts as a reward: one finite number, from Python, numpy, torch or decimal."""

from __future__ import annotations

import math
from decimal import Decimal
from numbers import Real
from typing import Any


def as_reward(value: Any) -> float:
    """The number as a float: 1, 0.5, True, Decimal("0.5"), numpy and torch scalars.

    Raises:
        ValueError: not a number (a string, a list, None, ...), or NaN or infinite.
    """
    number = value
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        number = value.item()
    if not isinstance(number, Real | Decimal):
        raise ValueError(
            f"a reward must be one finite number, got {value!r} of type {type(value).__name__}"
        )
    reward = float(number)
    if not math.isfinite(reward):
        raise ValueError(f"a reward must be finite, got {value!r}")
    return reward
