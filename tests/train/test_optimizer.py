"""Schedule, float32 masters, clipping and skipped steps."""

from __future__ import annotations

import pytest
import torch
from torch.nn import Parameter

from agent_rl.config import OptimizerConfig
from agent_rl.train.optimizer import Optimizer, lr_multiplier


@pytest.mark.parametrize(
    ("step", "expected"), [(0, 0.1), (5, 0.55), (10, 1.0), (55, 0.55), (100, 0.1), (200, 0.1)]
)
def test_cosine(step: int, expected: float) -> None:
    config = OptimizerConfig(
        lr_scheduler_type="cosine", warmup_steps_proportion=0.1, min_lr_ratio=0.1
    )
    assert lr_multiplier(step, 100, config) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("kind", "step", "expected"),
    [
        ("constant", 0, 0.0),
        ("constant", 5, 0.5),
        ("constant", 10, 1.0),
        ("constant", 99, 1.0),
        ("linear", 5, 0.5),
        ("linear", 10, 1.0),
        ("linear", 55, 0.5),
        ("linear", 100, 0.0),
    ],
)
def test_constant_and_linear(kind: str, step: int, expected: float) -> None:
    config = OptimizerConfig.model_validate(
        {"lr_scheduler_type": kind, "warmup_steps_proportion": 0.1}
    )
    assert lr_multiplier(step, 100, config) == pytest.approx(expected)


def test_short_runs_have_no_warmup() -> None:
    """int(0.001 * 100) = 0 steps: the first update already learns."""
    assert lr_multiplier(0, 100, OptimizerConfig()) == 1.0


def one_weight(dtype: torch.dtype, **options: float) -> tuple[Parameter, Optimizer]:
    weight = Parameter(torch.ones(1, dtype=dtype))
    config = OptimizerConfig.model_validate({"lr": 1e-4, "weight_decay": 0.0} | options)
    return weight, Optimizer([weight], config, total_steps=100)


def test_bfloat16_weights_move() -> None:
    """Case B125: ten steps of 1e-4 each; bfloat16 alone would stay at 1.0 for ever."""
    weight, optimizer = one_weight(torch.bfloat16, lr=1e-3)
    for _ in range(10):
        weight.grad = torch.ones(1, dtype=torch.bfloat16)
        optimizer.collect()
        optimizer.step()
    master = optimizer.state_dict()["masters"][0]
    assert master.dtype == torch.float32
    assert float(master) == pytest.approx(0.99, abs=1e-4)
    assert float(weight.detach()) == pytest.approx(0.99, abs=4e-3)
    assert float(weight.detach()) < 1.0


def test_bfloat16_gradients_are_summed_in_float32() -> None:
    """256 + 1 is 256 in bfloat16."""
    weight, optimizer = one_weight(torch.bfloat16, gradient_clipping=1e9)
    for value in (256.0, 1.0):
        weight.grad = torch.full((1,), value, dtype=torch.bfloat16)
        optimizer.collect()
    norm, _ = optimizer.step()
    assert float(norm) == 257.0


def test_clipping() -> None:
    """Two steps of SGD-like size: a gradient of 10 is cut to 1."""
    weight, optimizer = one_weight(torch.float32, eps=1.0, beta1=0.0, beta2=0.0, lr=1.0)
    weight.grad = torch.tensor([10.0])
    norm, is_successful = optimizer.step()
    assert (float(norm), is_successful) == (10.0, True)
    assert float(weight.detach()) == pytest.approx(1.0 - 1.0 / (1.0 + 1.0), abs=1e-5)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_gradient_leaves_no_trace(bad: float) -> None:
    weight, optimizer = one_weight(torch.float32)
    weight.grad = torch.tensor([bad])
    _, is_successful = optimizer.step()
    assert not is_successful
    assert float(weight.detach()) == 1.0
    assert weight.grad is None
    assert optimizer.state_dict()["adamw"]["state"] == {}


def test_norm_weights_do_not_decay() -> None:
    matrix, vector = Parameter(torch.ones(1, 1)), Parameter(torch.ones(1))
    optimizer = Optimizer(
        [matrix, vector], OptimizerConfig(lr=0.1, weight_decay=0.5), total_steps=10
    )
    matrix.grad, vector.grad = torch.zeros(1, 1), torch.zeros(1)
    optimizer.step()
    assert float(matrix.detach()) == pytest.approx(0.95)
    assert float(vector.detach()) == 1.0


def test_schedule_moves_once_for_each_update() -> None:
    weight, optimizer = one_weight(torch.float32, lr_scheduler_type="linear", lr=1.0)  # type: ignore[arg-type]
    assert optimizer.lr == 1.0
    for _ in range(3):
        weight.grad = torch.zeros(1)
        optimizer.step()
    optimizer.end_update()
    assert optimizer.lr == pytest.approx(0.99)


def test_a_restarted_run_takes_its_options_from_its_own_config() -> None:
    """A decay that was changed between two processes is not the saved one: 1 - 0.1 * 0.5 twice."""
    matrix = Parameter(torch.ones(1, 1))
    before = Optimizer([matrix], OptimizerConfig(lr=0.1, weight_decay=0.0), total_steps=10)
    matrix.grad = torch.zeros(1, 1)
    before.step()
    after = Optimizer([matrix], OptimizerConfig(lr=0.1, weight_decay=0.5), total_steps=10)
    after.load_state_dict(before.state_dict())
    for _ in range(2):
        matrix.grad = torch.zeros(1, 1)
        after.step()
    assert float(matrix.detach()) == pytest.approx(0.95**2)
    assert float(after.state_dict()["adamw"]["state"][0]["step"]) == 3.0


def test_masters_of_a_run_that_had_none_are_its_weights() -> None:
    """float32 before and bfloat16 now: the first step starts from 2, not from where it began."""
    before = Optimizer([Parameter(torch.full((1, 1), 2.0))], OptimizerConfig(), total_steps=10)
    weight = Parameter(torch.ones(1, 1, dtype=torch.bfloat16))
    after = Optimizer([weight], OptimizerConfig(lr=0.0), total_steps=10)
    weight.data.fill_(2.0)  # the model is loaded before its optimizer
    after.load_state_dict(before.state_dict())
    weight.grad = torch.ones(1, 1, dtype=torch.bfloat16)
    after.collect()
    after.step()
    assert weight.item() == 2.0
