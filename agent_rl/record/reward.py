"""What counts as a reward, one finite number from Python, numpy, torch or decimal, and whose."""

from __future__ import annotations

import math
import reprlib
from decimal import Decimal
from numbers import Real
from typing import Any

_MAX_FLOAT32 = 3.4028234663852886e38


def as_reward(value: Any) -> float:
    """The number as a float: 1, 0.5, True, Decimal("0.5"), numpy and torch scalars.

    Raises:
        ValueError: not a number (a string, a list, None, ...), or NaN, or beyond what a row
            holds, which is a float32.
    """
    number = value
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        number = value.item()
    if not isinstance(number, Real | Decimal):
        raise ValueError(
            "a reward must be one finite number, "
            f"got {reprlib.repr(value)} of type {type(value).__name__}"
        )
    try:
        reward = float(number)
    except OverflowError:
        reward = math.inf
    if not abs(reward) <= _MAX_FLOAT32:
        raise ValueError(f"a reward must be finite as a float32, got {reprlib.repr(value)}")
    return reward


def as_interaction_id(value: object) -> str:
    """The id itself. Raises TypeError for what is none, such as the whole completion."""
    if isinstance(value, str):
        return value
    kind = type(value).__name__
    hint = "pass its id, completion.id" if hasattr(value, "id") else "pass completion.id"
    raise TypeError(f"an interaction is named by its id, a str, not by a {kind}; {hint}")
