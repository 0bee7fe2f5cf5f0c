from __future__ import annotations

from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from agent_rl.record.reward import as_reward


@pytest.mark.parametrize(
    ("value", "reward"),
    [
        (np.float32(0.5), 0.5),
        (True, 1.0),
        (torch.tensor(0.5), 0.5),
        (Decimal("0.5"), 0.5),
        (1, 1.0),
        (np.int64(2), 2.0),
        (np.bool_(True), 1.0),
        (np.array(0.25), 0.25),
        (torch.tensor(True), 1.0),
        (Fraction(1, 4), 0.25),
    ],
)
def test_numbers_of_all_kinds(value: Any, reward: float) -> None:
    """case B86: numpy, torch, bool, Decimal and int become floats."""
    result = as_reward(value)
    assert result == reward and type(result) is float


@pytest.mark.parametrize(
    "value",
    ["0.5", (0.5,), [0.5], {"score": 0.5}, None, b"1", 1j, torch.tensor([0.5]), np.array([1.0])],
)
def test_other_things_are_refused(value: Any) -> None:
    """case B86: what is not one number is a clear error."""
    with pytest.raises(ValueError, match="one finite number"):
        as_reward(value)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), np.float32("nan"), Decimal("NaN")])
def test_numbers_that_are_not_finite_are_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="finite"):
        as_reward(value)


def test_a_number_too_big_for_a_float() -> None:
    with pytest.raises(ValueError, match="finite"):
        as_reward(10**400)


def test_a_number_that_a_row_cannot_hold() -> None:
    """1e300 is a float, and infinite in the rows' float32."""
    largest = float(torch.finfo(torch.float32).max)
    assert as_reward(-largest) == -largest
    for value in (1e300, Decimal("-1e39"), 1e39):
        with pytest.raises(ValueError, match="finite as a float32, got"):
            as_reward(value)
