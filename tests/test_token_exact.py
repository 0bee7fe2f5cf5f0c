"""The real model, from the SDK call to the record: what is stored is what was sampled."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest_asyncio
import torch

from agent_rl import (
    ArealOpenAI,
    LocalEngine,
    ModelRequest,
    ModelResponse,
    WeightUpdate,
    small_model,
)
from agent_rl.engine.loading import load_tokenizer

MESSAGES = [{"role": "user", "content": "Name a colour."}]


class SpyEngine(LocalEngine):
    """Keeps what it sampled, beside the record."""

    def __init__(self) -> None:
        super().__init__(small_model(), device="cpu", max_seq_len=256)
        self.sampled: list[ModelResponse] = []

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        self.sampled.append(await super().agenerate(req))
        return self.sampled[-1]


@pytest_asyncio.fixture
async def engine() -> AsyncIterator[SpyEngine]:
    engine = SpyEngine()
    yield engine
    await engine.close()


@torch.no_grad()
def fresh_logprobs(model: Any, sampled: ModelResponse, temperature: float) -> torch.Tensor:
    """[number of sampled tokens], by one plain forward pass."""
    ids = torch.tensor([[*sampled.input_tokens, *sampled.output_tokens]])
    logits = model(input_ids=ids).logits[0, len(sampled.input_tokens) - 1 : -1] / temperature
    chosen = torch.tensor(sampled.output_tokens)[:, None]
    return logits.log_softmax(-1).gather(1, chosen)[:, 0]


async def test_recorded_tokens_are_sampled_tokens_before_and_after_an_update(
    engine: SpyEngine,
) -> None:
    client = ArealOpenAI(engine, load_tokenizer(small_model()))
    settings: list[dict[str, float]] = [
        {"temperature": 0.7},
        {"temperature": 1.0},
        {"temperature": 1.0, "top_p": 0.9},
    ]

    async def ask_all() -> None:
        for setting in settings:
            await client.chat.completions.create(
                model="m", messages=MESSAGES, max_tokens=10, **setting
            )

    def check(first: int, version: int) -> None:
        recorded = list(client.interactions.values())[first:]
        for interaction, response, setting in zip(
            recorded, engine.sampled[first:], settings, strict=True
        ):
            stored = interaction.model_response
            assert stored.input_tokens == response.input_tokens
            assert stored.output_tokens == response.output_tokens
            assert set(stored.output_versions) == {version}
            fresh = fresh_logprobs(engine.model, stored, setting["temperature"])
            difference = torch.tensor(stored.output_logprobs) - fresh
            assert difference.abs().max() < 1e-3

    await ask_all()
    check(0, version=0)

    before = fresh_logprobs(engine.model, engine.sampled[0], 0.7)
    await engine.pause()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in engine.model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(noise, alpha=0.02 * float(parameter.std()))
    await engine.update_weights(WeightUpdate(version=1))
    await engine.resume()
    moved = (fresh_logprobs(engine.model, engine.sampled[0], 0.7) - before).abs().max()
    assert moved > 1e-2, "the update must be large enough for a stale cache to show"

    await ask_all()
    check(3, version=1)
