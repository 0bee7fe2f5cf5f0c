"""Weights over a process group, into servers that are processes of their own.

And into a real one, whose address and model folder are in the environment (tests/real_servers).
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest
import torch
from transformers import LlamaForCausalLM

from agent_rl.engine.base import NamedTensor, WeightUpdate
from agent_rl.engine.broadcast import Broadcaster
from agent_rl.engine.command import ServerCommand
from agent_rl.engine.http import ServerConnection
from agent_rl.engine.launch import LaunchedServers
from agent_rl.engine.loading import load_model
from agent_rl.engine.remote import RemoteEngine
from agent_rl.engine.server import Server
from agent_rl.engine.server_api import ServerApi
from agent_rl.engine.sglang import SGLang
from agent_rl.engine.vllm import VLLM
from agent_rl.types import GenerationConfig, ModelRequest, ModelResponse

Kind = Literal["sglang", "vllm"]
HERE = Path(__file__).parent
APIS: dict[Kind, ServerApi] = {"sglang": SGLang(), "vllm": VLLM()}
REAL = [kind for kind in APIS if f"AGENT_RL_{kind.upper()}" in os.environ]


def ask(seed: int, max_new_tokens: int) -> ModelRequest:
    config = GenerationConfig(max_new_tokens=max_new_tokens)
    return ModelRequest(rid=f"r{seed}", input_ids=[5 + seed, 6, 7], gconfig=config)


@torch.no_grad()
def assert_exact(
    models: list[LlamaForCausalLM], response: ModelResponse, tolerance: float = 1e-4
) -> None:
    ids = torch.tensor([[*response.input_tokens, *response.output_tokens]])
    chosen = torch.tensor(response.output_tokens)[:, None]
    versions = torch.tensor(response.output_versions)
    for version, model in enumerate(models):
        expected = model(input_ids=ids).logits[0, 2:-1].log_softmax(-1).gather(1, chosen)[:, 0]
        difference = (torch.tensor(response.output_logprobs) - expected)[versions == version]
        assert difference.numel() == 0 or difference.abs().max() < tolerance


async def until_up(engine: RemoteEngine, count: int) -> None:
    async with asyncio.timeout(60.0):
        while len(engine.up) != count:  # noqa: ASYNC110 - it has no event for it
            await asyncio.sleep(0.01)


def update(models: list[LlamaForCausalLM], version: int) -> WeightUpdate:
    tensors = dict(models[version].named_parameters())
    return WeightUpdate(version=version, method="distributed", tensors=tensors.items)


@pytest.fixture(scope="module")
def models(served_folder: Path) -> list[LlamaForCausalLM]:
    """Of each version: 0 as served, the others with other weights."""
    found = []
    for version in range(4):
        model = load_model(served_folder, device=torch.device("cpu"), dtype=torch.float32)
        noise = torch.Generator().manual_seed(version)
        with torch.no_grad():
            for parameter in model.parameters():
                spread = 0.05 * version * parameter.std()
                parameter += spread * torch.randn(parameter.shape, generator=noise)
        found.append(model)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sglang", "vllm"])
async def test_broadcasts_under_load_and_after_a_death(
    served_folder: Path, models: list[LlamaForCausalLM], tmp_path: Path, kind: Kind
) -> None:
    """Two servers, then one; requests go on through all of it."""
    command = ServerCommand.of(kind, (sys.executable, str(HERE / f"{kind}_server.py")))
    servers = LaunchedServers(
        command, str(served_folder), [{}, {}], log_dir=tmp_path, max_restarts=0
    )
    await asyncio.to_thread(servers.wait_ready)
    engine = await asyncio.to_thread(
        lambda: RemoteEngine(APIS[kind], servers.addresses, health_interval_s=0.1, launched=servers)
    )
    running = [asyncio.ensure_future(engine.agenerate(ask(n, 300))) for n in range(8)]
    for version in (1, 2):
        await engine.update_weights(update(models, version))
        assert engine.get_version() == version and len(engine.up) == 2
    os.kill(servers.pids[0], signal.SIGKILL)
    await until_up(engine, 1)
    await engine.update_weights(update(models, 3))
    for response in await asyncio.gather(*running):
        assert len(response.output_tokens) == 300 or response.stop_reason == "stop"
        assert list(response.output_versions) == sorted(response.output_versions)
        assert_exact(models, response)
    last = await engine.agenerate(ask(9, 10))
    assert set(last.output_versions) == {3}
    assert_exact(models, last)
    await engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("kind", REAL)
async def test_a_real_server_takes_broadcasts_under_load(
    served_folder: Path, models: list[LlamaForCausalLM], kind: Kind
) -> None:
    address = os.environ[f"AGENT_RL_{kind.upper()}"]
    engine = await asyncio.to_thread(lambda: RemoteEngine(APIS[kind], [address]))
    await engine.update_weights(WeightUpdate(version=0, method="disk", path=served_folder))
    streams = [engine.astream(ask(n, 100)) for n in range(3)]
    for stream in streams:
        await anext(stream)
    await engine.update_weights(update(models, 1))
    for stream in streams:
        response = [item async for item in stream][-1]
        assert isinstance(response, ModelResponse)
        assert list(response.output_versions) == sorted(response.output_versions)
        assert_exact(models, response, 2e-3)
    await engine.update_weights(update(models, 2))
    last = await engine.agenerate(ask(9, 10))
    assert set(last.output_versions) == {2}
    assert_exact(models, last, 2e-3)
    await engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("kind", REAL)
async def test_a_real_server_is_whole_again_after_half_an_update(
    served_folder: Path, models: list[LlamaForCausalLM], kind: Kind
) -> None:
    """A trainer goes away in the middle of its update; the next one finds and ends that."""
    address = os.environ[f"AGENT_RL_{kind.upper()}"]
    server = Server(ServerConnection(address, api_key=None, timeout_s=60.0))
    server.mark_up()

    def half() -> Iterator[NamedTensor]:
        yield from list(models[1].named_parameters())[:40]
        raise RuntimeError("out of memory")

    first = Broadcaster(APIS[kind], bucket_bytes=4 << 20)
    with pytest.raises(RuntimeError, match="out of memory"):
        broken = WeightUpdate(version=1, method="distributed", tensors=half)
        await first.send([server], broken, keeps_cache=False)
    await server.connection.close()
    engine = await asyncio.to_thread(lambda: RemoteEngine(APIS[kind], [address]))
    await engine.update_weights(WeightUpdate(version=0, method="disk", path=served_folder))
    response = await engine.agenerate(ask(1, 10))
    assert_exact(models, response, 2e-3)
    await engine.update_weights(update(models, 1))
    response = await engine.agenerate(ask(1, 10))
    assert set(response.output_versions) == {1}
    assert_exact(models, response, 2e-3)
    await engine.close()
