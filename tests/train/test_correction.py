"""Behaviour weights, rejection and M2PO by hand-worked numbers."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from agent_rl.config import RejectionSamplingConfig
from agent_rl.train.correction import (
    Correction,
    behaviour_correction,
    loglinear_proximal,
    m2po_mask,
)


def correct(logs: list[float], **options: object) -> Correction:
    """One row whose log-ratios proximal - behaviour are ``logs``."""
    config = RejectionSamplingConfig.model_validate(options)
    values = torch.tensor(logs, dtype=torch.float64)
    mask = torch.ones(len(logs), dtype=torch.bool)
    rows = torch.zeros(len(logs), dtype=torch.long)
    return behaviour_correction(values, torch.zeros_like(values), mask, rows, config)


def close(values: Tensor, expected: list[float]) -> bool:
    return values.tolist() == pytest.approx(expected, abs=1e-3)


def test_token_mask_rejects_the_token() -> None:
    """exp(2) = 7.39 is above 5; the others keep exp(.1)."""
    got = correct([0.1, 0.1, 2.0])
    assert close(got.weights, [1.1052, 1.1052, 0.0])
    assert got.is_kept.tolist() == [True, True, False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_ratio_beyond_all_numbers_is_rejected(dtype: torch.dtype) -> None:
    """Case B115: log-ratios 1000 and 0 under the bounds .5 and 5: weights 0 and 1, no inf * 0."""
    got = behaviour_correction(
        torch.zeros(2, dtype=dtype),
        torch.tensor([-1000.0, 0.0], dtype=dtype),
        torch.ones(2, dtype=torch.bool),
        torch.zeros(2, dtype=torch.long),
        RejectionSamplingConfig(lower=0.5, upper=5.0),
    )
    assert got.weights.tolist() == [0.0, 1.0]
    assert got.is_kept.tolist() == [False, True]


def test_sequence_mean_keeps_the_row_at_one_weight() -> None:
    assert close(correct([0.1, 0.1, 2.0], level="sequence").weights, [2.0820] * 3)


@pytest.mark.parametrize("agg", ["sum", "max"])
def test_sequence_sum_and_max_reject_the_row(agg: str) -> None:
    """exp(2.2) = 9.03 and exp(2) = 7.39 are above 5."""
    assert close(correct([0.1, 0.1, 2.0], level="sequence", agg=agg).weights, [0.0] * 3)


def test_token_clamp_is_tis() -> None:
    got = correct([0.5, 1.0], action="clamp", upper=2.0)
    assert close(got.weights, [1.649, 2.0])
    assert got.is_kept.tolist() == [True, True]
    assert got.is_touched.tolist() == [False, True]


def test_sequence_sum_clamp_is_sequence_tis() -> None:
    """exp(1.5) = 4.48 is cut to 2 at both tokens."""
    got = correct([0.5, 1.0], level="sequence", action="clamp", agg="sum", upper=2.0)
    assert close(got.weights, [2.0, 2.0])


def test_token_mask_with_two_bounds_is_icepop() -> None:
    assert close(correct([0.5, 1.0], upper=2.0, lower=0.5).weights, [1.649, 0.0])


def test_geometric_mean_of_the_row() -> None:
    assert close(correct([0.5, 1.0], level="sequence").weights, [2.117, 2.117])


def test_kl_metric_decides_by_row_and_weighs_by_token() -> None:
    """k2 of .1, .1, 2.0: .005 .005 2, mean .67: above .5 the row goes, below 1 it stays."""
    gone = correct([0.1, 0.1, 2.0], level="sequence", metric="kl_k2", upper=0.5)
    assert close(gone.weights, [0.0] * 3)
    kept = correct([0.1, 0.1, 2.0], level="sequence", metric="kl_k2", upper=1.0)
    assert close(kept.weights, [1.1052, 1.1052, 7.389])


def test_masked_places_and_unknown_values_are_in_bounds() -> None:
    """Case B67: what stands off the mask influences no row and no token."""
    proximal = torch.tensor([0.0, float("nan"), 9.0])
    behaviour = torch.tensor([0.0, 0.0, float("-inf")])
    mask = torch.tensor([True, False, False])
    rows = torch.tensor([0, 0, 1])
    config = RejectionSamplingConfig(level="sequence", agg="max")
    got = behaviour_correction(proximal, behaviour, mask, rows, config)
    assert got.weights.tolist() == [1.0, 0.0, 0.0]
    assert not got.is_touched.any()


@pytest.mark.parametrize(
    "options",
    [
        {"level": "word"},
        {"action": "drop"},
        {"metric": "kl"},
        {"agg": "median"},
        {"lower": 6.0},
        {"upper": 1.0},
        {"lower": 0.0},
        {"metric": "kl_k2", "upper": 0.0},
        {"metric": "kl_k1", "action": "clamp"},
    ],
)
def test_bad_settings_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        RejectionSamplingConfig.model_validate(options)


def test_loglinear_proximal() -> None:
    """Version 4 now: tokens of version 3, 1 and 4 move by 0, 2/3 and 0 of the way."""
    got = loglinear_proximal(
        torch.tensor([-1.0, -1.0, -1.0, float("nan")]),
        torch.tensor([-4.0, -4.0, -4.0, 0.0]),
        torch.tensor([3, 1, 4, -1]),
        torch.tensor([True, True, True, False]),
        current_version=4,
    )
    assert got.tolist() == pytest.approx([-4.0, -2.0, -4.0, 0.0])


def test_m2po_drops_the_largest() -> None:
    """Squares 4, 1, .1, .1 with threshold .5: means 1.3, .4 -> only the 4 goes."""
    logs = torch.tensor([2.0, 1.0, math.sqrt(0.1), -math.sqrt(0.1)])
    mask = torch.ones(4, dtype=torch.bool)
    kept = m2po_mask(logs, torch.zeros(4), mask, threshold=0.5)
    assert kept.tolist() == [False, True, True, True]


def test_m2po_keeps_the_smallest_at_least() -> None:
    logs = torch.tensor([3.0, 2.0, float("nan")])
    mask = torch.tensor([True, True, False])
    assert m2po_mask(logs, torch.zeros(3), mask, threshold=0.1).tolist() == [False, True, False]
    assert not m2po_mask(logs, torch.zeros(3), torch.zeros_like(mask), threshold=0.1).any()
