"""LocalEngine over a tiny random Llama: what it returns equals a fresh forward pass."""

from __future__ import annotations

import asyncio
import gc
import math
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from agent_rl.engine.base import WeightUpdate
from agent_rl.engine.local import LocalEngine
from agent_rl.errors import (
    ConfigError,
    ContextLengthError,
    EngineError,
    ModelLoadError,
    RequestError,
)
from agent_rl.types import GenerationConfig, ModelRequest, ModelResponse, TokenDelta

VOCAB, EOS = 97, 2


def tiny_llama(seed: int = 0, **changes: object) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64}
    depth = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    ends = {"eos_token_id": EOS, "bos_token_id": 1, "pad_token_id": 0}
    model = LlamaForCausalLM(
        LlamaConfig(**sizes, **depth, **ends, max_position_embeddings=512, **changes)
    )
    with torch.no_grad():  # the usual initialisation is so small that all tokens look alike
        for parameter in model.parameters():
            parameter.mul_(4.0)
    return model


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def model() -> LlamaForCausalLM:
    return tiny_llama()


@pytest_asyncio.fixture
async def engine(model: LlamaForCausalLM) -> AsyncIterator[LocalEngine]:
    engine = LocalEngine(model, max_batch_size=8, max_seq_len=400)
    yield engine
    await engine.close()


def request(input_ids: list[int], rid: str = "r", **gconfig: object) -> ModelRequest:
    return ModelRequest(rid=rid, input_ids=input_ids, gconfig=GenerationConfig(**gconfig))


def prompt(seed: int, length: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (length,), generator=generator).tolist()


@torch.no_grad()
def fresh_logprobs(
    model: LlamaForCausalLM, response: ModelResponse, temperature: float
) -> torch.Tensor:
    """The oracle: one plain forward pass over prompt and completion."""
    ids = torch.tensor([[*response.input_tokens, *response.output_tokens]])
    logits = model(input_ids=ids).logits[0].float() / temperature
    first = len(response.input_tokens) - 1
    chosen = ids[0, first + 1 :]
    return logits[first:-1].log_softmax(-1).gather(1, chosen[:, None])[:, 0]


def assert_fresh(model: LlamaForCausalLM, response: ModelResponse, temperature: float) -> None:
    expected = fresh_logprobs(model, response, temperature)
    assert torch.tensor(response.output_logprobs).sub(expected).abs().max() < 1e-4


@pytest.mark.parametrize("extra", [{}, {"top_p": 0.9}, {"top_k": 5}, {"repetition_penalty": 1.5}])
@pytest.mark.parametrize("temperature", [0.7, 1.0])
async def test_logprobs_equal_a_fresh_forward_pass(
    engine: LocalEngine, model: LlamaForCausalLM, temperature: float, extra: dict[str, float]
) -> None:
    """Tempered, before truncation and penalties (cases B56, B57)."""
    gconfig = {"temperature": temperature, "max_new_tokens": 12, **extra}
    requests = [request(prompt(n, 3 + 7 * n), **gconfig) for n in range(5)]
    for response in await asyncio.gather(*map(engine.agenerate, requests)):
        assert_fresh(model, response, temperature)
