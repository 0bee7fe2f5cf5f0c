"""Floating-point operations of a training pass, and what a device could do in the same time.

Model FLOPs count the work that the maths needs, once: forward 2 per weight and token, backward
twice that; attention over the tokens that are seen; the output layer where a token is predicted.
Recomputation is not counted. MFU is their rate over the device's peak (arxiv.org/abs/2204.02311).
"""

from __future__ import annotations

from typing import Any

import torch

from agent_rl.train.batch import MicroBatch

_PEAK_TFLOPS = {
    "A100": 312.0,
    "L40": 181.0,
    "H100": 989.0,
    "H200": 989.0,
    "B200": 2250.0,
}
"""Dense bfloat16, from the makers' data sheets; the first name found in the device's counts."""


def training_flops(model: Any, parts: list[MicroBatch]) -> float:
    """Of forward and backward over these micro-batches."""
    head = model.get_output_embeddings().weight.numel()
    embeddings = {id(p) for p in (model.get_input_embeddings().weight,)}
    embeddings.add(id(model.get_output_embeddings().weight))
    body = sum(p.numel() for p in model.parameters() if p.ndim >= 2 and id(p) not in embeddings)
    config = model.config
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    width = config.num_attention_heads * size
    total = 0.0
    for part in parts:
        seen = float((part.positions + 1).sum())
        total += 6.0 * body * len(part.input_ids)
        total += 12.0 * config.num_hidden_layers * width * seen
        total += 6.0 * head * len(part.predictors)
    return total


def peak_flops(device: torch.device) -> float | None:
    """Of one device; None: not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak * 1e12 for key, peak in _PEAK_TFLOPS.items() if key in name), None)


def utilisation(flops: float, seconds: float, device: torch.device) -> str:
    """``0.41 MFU (405 TFLOP/s)``, or the rate alone where the peak is not known."""
    rate, peak = flops / seconds, peak_flops(device)
    shown = f"{rate / 1e12:.3g} TFLOP/s"
    return shown if peak is None else f"{rate / peak:.2f} MFU ({shown})"
