"""Actor: updates do not depend on how rows are packed, and only trained tokens move weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from agent_rl.config import ActorConfig, OptimizerConfig
from agent_rl.train.actor import Actor
from agent_rl.train.batch import Batch
from agent_rl.train.checkpoint import load_state, save_state
from agent_rl.types import RolloutGroup, TensorDict


def tiny_model(dtype: torch.dtype = torch.float64) -> LlamaForCausalLM:
    torch.manual_seed(0)
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


def weights_after(trajectories: list[TensorDict], config: ActorConfig) -> torch.Tensor:
    model = tiny_model()
    actor = Actor(model, config, total_steps=10, temperature=0.7)
    actor.update(Batch.from_trajectories(trajectories))
    return torch.cat([p.detach().flatten() for p in model.parameters()])


SGD_LIKE = OptimizerConfig(lr=1e-2, eps=1.0, warmup_steps_proportion=0.0)
"""With eps 1 an AdamW step is smooth in the gradient; with 1e-8 it is close to its sign."""


@pytest.mark.parametrize("tree_packing", ["auto", "off"])
@pytest.mark.parametrize("max_tokens_per_mb", [1, 20, 4096])
def test_packing_changes_nothing(tree_packing: str, max_tokens_per_mb: int) -> None:
    """Cases B107, B108: 1 to 12 micro-batches, prefixes shared or not: the same weights."""
    plain = ActorConfig(tree_packing="off", optimizer=SGD_LIKE)
    other = ActorConfig.model_validate(
        plain.model_dump() | {"tree_packing": tree_packing, "max_tokens_per_mb": max_tokens_per_mb}
    )
    expected = weights_after(groups(), plain)
    start = torch.cat([p.detach().flatten() for p in tiny_model().parameters()])
    moved = (expected - start).abs().max()
    difference = (weights_after(groups(), other) - expected).abs().max()
    assert moved > 1e-5
    assert difference / moved < 1e-5


def test_all_masked_batch_touches_nothing() -> None:
    """Case B113: no trained token -> no step, no optimizer state, weights as they were."""
    rows = trajectory([[1, 2, 3], [1, 2, 4]], [[0, 0, 0], [0, 0, 0]], [1.0, 0.0])
    model = tiny_model()
    before = [p.detach().clone() for p in model.parameters()]
    actor = Actor(model, ActorConfig(), total_steps=10, temperature=1.0)
    report = actor.update(Batch.from_trajectories([rows]))
    assert (report.num_steps, report.num_skipped, report.num_trained_tokens) == (1, 1, 0)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_state_continues_exactly(tmp_path: Path) -> None:
    config = ActorConfig(optimizer=OptimizerConfig(lr=1e-2, lr_scheduler_type="linear"))
    first, second = Batch.from_trajectories(groups(1)), Batch.from_trajectories(groups(2))
    model = tiny_model(torch.bfloat16)
    actor = Actor(model, config, total_steps=4, temperature=1.0)
    actor.update(first)
    resumed_model = tiny_model(torch.bfloat16)
    resumed = Actor(resumed_model, config, total_steps=4, temperature=1.0)
    resumed.load_state_dict(load_state(save_state(actor.state_dict(), tmp_path / "actor.pt")))
    actor.update(second)
    resumed.update(second)
    for a, b in zip(model.parameters(), resumed_model.parameters(), strict=True):
        assert torch.equal(a, b)
