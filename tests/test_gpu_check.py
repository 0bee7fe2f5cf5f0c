"""The check for GPUs runs here on the CPU, so that it works when a GPU is at hand."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def test_tiny_mode_passes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    gpu_check = importlib.import_module("gpu_check")
    assert gpu_check.main(["--tiny"]) == 0
    out = capsys.readouterr().out
    assert out.count("ok   ") == 4
    assert "computed 192 of 384" in out, "prefixes of 2 x 4 rows are shared"


def test_flops_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Toy: body 2 (4096 q + 2 * 2048 kv + 4096 o + 3 * 8192 mlp) = 73728 weights, head 32768.

    Row 1 2 3, the last two trained: 3 nodes that see 1 + 2 + 3, two predictions.
    """
    monkeypatch.syspath_prepend(BENCHMARKS)
    flops, gpu_check = importlib.import_module("flops"), importlib.import_module("gpu_check")
    from agent_rl.train.batch import Batch, micro_batches

    ids = torch.tensor([[1, 2, 3]])
    rows = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids, dtype=torch.bool),
        "loss_mask": torch.tensor([[0, 1, 1]]),
        "rewards": torch.ones(1),
    }
    batch = Batch.from_trajectories([rows])
    parts = micro_batches(batch, [0], max_tokens=8, share_prefixes=True)
    model = gpu_check.make_model(gpu_check.TOY, torch.device("cpu"), torch.float32)
    expected = 6 * 73728 * 3 + 12 * 2 * 64 * 6 + 6 * 512 * 64 * 2
    assert flops.training_flops(model, parts) == expected
