"""Weights over a process group, into servers that are processes of their own."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from agent_rl.engine.base import WeightUpdate
from agent_rl.engine.launch import LaunchedServers, ServerCommand
from agent_rl.engine.loading import load_model
from agent_rl.engine.remote import RemoteEngine
from agent_rl.engine.sglang import SGLang
from agent_rl.types import GenerationConfig, ModelRequest, ModelResponse

SERVER = Path(__file__).parent / "sglang_server.py"


def ask(seed: int, max_new_tokens: int) -> ModelRequest:
    config = GenerationConfig(max_new_tokens=max_new_tokens)
    return ModelRequest(rid=f"r{seed}", input_ids=[5 + seed, 6, 7], gconfig=config)


@torch.no_grad()
def assert_exact(models: list[LlamaForCausalLM], response: ModelResponse) -> None:
    ids = torch.tensor([[*response.input_tokens, *response.output_tokens]])
    chosen = torch.tensor(response.output_tokens)[:, None]
    versions = torch.tensor(response.output_versions)
    for version, model in enumerate(models):
        expected = model(input_ids=ids).logits[0, 2:-1].log_softmax(-1).gather(1, chosen)[:, 0]
        difference = (torch.tensor(response.output_logprobs) - expected)[versions == version]
        assert difference.numel() == 0 or difference.abs().max() < 1e-4


async def until_up(engine: RemoteEngine, count: int) -> None:
    async with asyncio.timeout(60.0):
        while len(engine.up) != count:  # noqa: ASYNC110 - it has no event for it
            await asyncio.sleep(0.01)


@pytest.mark.slow
async def test_broadcasts_under_load_and_after_a_death(served_folder: Path, tmp_path: Path) -> None:
    """Two servers, then one; requests go on through all of it."""
    models = []
    for version in range(4):
        model = load_model(served_folder, device=torch.device("cpu"), dtype=torch.float32)
        noise = torch.Generator().manual_seed(version)
        with torch.no_grad():
            for parameter in model.parameters():
                spread = 0.05 * version * parameter.std()
                parameter += spread * torch.randn(parameter.shape, generator=noise)
        models.append(model)

    def update(version: int) -> WeightUpdate:
        tensors = dict(models[version].named_parameters())
        return WeightUpdate(version=version, method="distributed", tensors=tensors.items)

    command = ServerCommand.of("sglang", (sys.executable, str(SERVER)))
    servers = LaunchedServers(command, str(served_folder), [{}, {}], log_dir=tmp_path)
    await asyncio.to_thread(servers.wait_ready, 120.0)
    engine = await asyncio.to_thread(
        lambda: RemoteEngine(SGLang(), servers.addresses, health_interval_s=0.1, launched=servers)
    )
    running = [asyncio.ensure_future(engine.agenerate(ask(n, 300))) for n in range(8)]
    for version in (1, 2):
        await engine.update_weights(update(version))
        assert engine.get_version() == version and len(engine.up) == 2
    os.kill(servers.pids[0], signal.SIGKILL)
    await until_up(engine, 1)
    await engine.update_weights(update(3))
    for response in await asyncio.gather(*running):
        assert len(response.output_tokens) == 300 or response.stop_reason == "stop"
        assert list(response.output_versions) == sorted(response.output_versions)
        assert_exact(models, response)
    last = await engine.agenerate(ask(9, 10))
    assert set(last.output_versions) == {3}
    assert_exact(models, last)
    await engine.close()
