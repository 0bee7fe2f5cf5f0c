"""A tiny random Llama, and trajectories written by hand or drawn from a seed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from agent_rl.types import RolloutGroup, TensorDict


def tiny_model(dtype: torch.dtype = torch.float64, *, seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
    )
    return LlamaForCausalLM(config).to(dtype)


def trajectory(
    rows: Sequence[Sequence[int]],
    masks: Sequence[Sequence[int]],
    rewards: Sequence[float],
    row_counts: tuple[int, ...] | None = None,
) -> TensorDict:
    width = max(map(len, rows))
    ids = torch.zeros(len(rows), width, dtype=torch.int32)
    mask = torch.zeros_like(ids)
    attention = torch.zeros_like(ids, dtype=torch.bool)
    for i, (row, row_mask) in enumerate(zip(rows, masks, strict=True)):
        ids[i, : len(row)] = torch.tensor(row)
        mask[i, : len(row)] = torch.tensor(row_mask)
        attention[i, : len(row)] = True
    return {
        "input_ids": ids,
        "attention_mask": attention,
        "loss_mask": mask,
        "logprobs": -3.9 * mask.float(),
        "versions": torch.zeros_like(ids),
        "rewards": torch.tensor(rewards),
        "rollout_group": RolloutGroup(row_counts=row_counts or (1,) * len(rows)),
    }


def groups(seed: int = 1) -> list[TensorDict]:
    """Three prompts of 6 tokens with 4 completions of 3 to 8 tokens."""
    generator = torch.Generator().manual_seed(seed)
    result = []
    for _ in range(3):
        prompt = torch.randint(1, 50, (6,), generator=generator).tolist()
        sizes = torch.randint(3, 9, (4,), generator=generator).tolist()
        rows = [prompt + torch.randint(1, 50, (n,), generator=generator).tolist() for n in sizes]
        masks = [[0] * 6 + [1] * n for n in sizes]
        result.append(trajectory(rows, masks, torch.rand(4, generator=generator).tolist()))
    return result
