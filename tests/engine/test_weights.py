"""New weights on their way: folders, adapters, buckets."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from live_server import LiveServer
from served_model import ServedModel, merge_adapter
from sglang_server import sglang_app
from vllm_server import vllm_app

from agent_rl.config import LoraConfig
from agent_rl.engine.base import WeightUpdate
from agent_rl.engine.buckets import in_buckets
from agent_rl.engine.loading import load_model
from agent_rl.engine.remote import RemoteEngine
from agent_rl.engine.sglang import SGLang
from agent_rl.engine.vllm import VLLM
from agent_rl.engine.weights import WeightPublisher
from agent_rl.errors import ConfigError, EngineError, RequestError
from agent_rl.train.lora import add_adapters, write_adapters
from agent_rl.types import GenerationConfig, ModelRequest, ModelResponse


def ask(seed: int, **gconfig: Any) -> ModelRequest:
    config = GenerationConfig(**{"max_new_tokens": 30, **gconfig})
    return ModelRequest(rid=f"r{seed}", input_ids=[5 + seed, 6, 7], gconfig=config)


def test_folders_come_and_go(tmp_path: Path) -> None:
    saved: list[Path] = []

    def save(folder: Path) -> None:
        folder.mkdir(parents=True)
        saved.append(folder)

    publisher = WeightPublisher("disk", root=tmp_path / "w", save=save, tensors=dict)
    publisher.clean(0)  # nothing is there yet
    for version in (1, 2, 3):
        update = publisher.update(version)
        assert (update.version, update.method, update.path) == (version, "disk", saved[-1])
        (tmp_path / "w" / "notes").mkdir(exist_ok=True)
        publisher.clean(version)
    assert sorted(path.name for path in (tmp_path / "w").iterdir()) == ["notes", "v3"]


def test_tensors_are_not_written(tmp_path: Path) -> None:
    tensors = {"a": torch.ones(2)}
    publisher = WeightPublisher(
        "distributed", root=tmp_path, save=lambda folder: None, tensors=tensors.items
    )
    update = publisher.update(4)
    assert (update.version, update.method, update.path) == (4, "distributed", None)
    assert update.tensors is not None and list(update.tensors()) == [("a", tensors["a"])]


def test_buckets() -> None:
    """3, 4 and 9 bytes in buckets of 8: the last is larger than a bucket and goes alone."""
    named = [(f"t{size}", torch.zeros(size, dtype=torch.uint8)) for size in (3, 4, 9)]
    buckets = [[name for name, _ in bucket] for bucket in in_buckets(iter(named), 8)]
    assert buckets == [["t3", "t4"], ["t9"]]
    assert list(in_buckets(iter([]), 8)) == []


@pytest.fixture
def adapter(tmp_path: Path, served_folder: Path) -> Path:
    """As training leaves it, in PEFT's form."""
    torch.manual_seed(3)
    model = load_model(served_folder, device=torch.device("cpu"), dtype=torch.float32)
    add_adapters(model, LoraConfig(rank=2, alpha=4))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    folder = tmp_path / "adapter"
    folder.mkdir()
    write_adapters(model, folder)
    return folder


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
async def test_an_adapter_is_published_alone(kind: str, served_folder: Path, adapter: Path) -> None:
    """Tokens after it have its version and log-probs; the adapter before it is unloaded."""
    served = ServedModel(served_folder, max_batch_size=8, max_seq_len=200)
    app = sglang_app(served) if kind == "sglang" else vllm_app(served)
    server = await LiveServer(app).start()
    api = SGLang() if kind == "sglang" else VLLM()
    engine = await asyncio.to_thread(lambda: RemoteEngine(api, [server.address]))
    stream = engine.astream(ask(0, max_new_tokens=150))
    await anext(stream)
    await engine.update_weights(WeightUpdate(version=1, method="lora", path=adapter))
    crossed = [item async for item in stream][-1]
    assert isinstance(crossed, ModelResponse)
    assert set(crossed.output_versions) == {0, 1}
    response = await engine.agenerate(ask(1, greedy=True))
    assert set(response.output_versions) == {1}
    merged = load_model(served_folder, device=torch.device("cpu"), dtype=torch.float32)
    merge_adapter(merged, adapter)
    ids = torch.tensor([[*response.input_tokens, *response.output_tokens]])
    with torch.no_grad():
        logits = merged(input_ids=ids).logits[0, 2:-1]
    chosen = torch.tensor(response.output_tokens)[:, None]
    expected = logits.log_softmax(-1).gather(1, chosen)[:, 0]
    assert torch.allclose(torch.tensor(response.output_logprobs), expected, atol=1e-4)
    await engine.update_weights(WeightUpdate(version=2, method="lora", path=adapter))
    assert list(served.adapters) == ["v2"]
    assert served.label == "default"
    await engine.close()
    await server.close()


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
async def test_a_server_that_lost_the_adapter_gets_it_again(
    kind: str, served_folder: Path, adapter: Path
) -> None:
    """It started anew, unnoticed: what it refuses for that goes to another one."""
    servers = []
    for _ in range(2):
        served = ServedModel(served_folder, max_batch_size=8, max_seq_len=200)
        app = sglang_app(served) if kind == "sglang" else vllm_app(served)
        servers.append(await LiveServer(app).start())
    api = SGLang() if kind == "sglang" else VLLM()
    addresses = [server.address for server in servers]
    engine = await asyncio.to_thread(
        lambda: RemoteEngine(api, addresses, routing="round_robin", health_interval_s=1000.0)
    )
    await engine.update_weights(WeightUpdate(version=1, method="lora", path=adapter))
    await servers[0].model.adapters.pop("v1").close()
    for n in range(4):
        response = await engine.agenerate(ask(n))
        assert set(response.output_versions) == {1}
    async with asyncio.timeout(60.0):
        while "v1" not in servers[0].model.adapters or len(engine.up) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    await engine.close()
    for server in servers:
        await server.close()


async def test_what_vllm_cannot_state_or_do_is_refused(served_folder: Path) -> None:
    served = ServedModel(served_folder, max_batch_size=8, max_seq_len=200)
    server = await LiveServer(vllm_app(served)).start()
    api = VLLM()
    engine = await asyncio.to_thread(lambda: RemoteEngine(api, [server.address]))
    assert "top_p" not in engine.supported
    with pytest.raises(EngineError, match="by method 'tensor'; use 'distributed', 'disk' or"):
        update = WeightUpdate(version=1, method="tensor", tensors=lambda: [("a", torch.ones(1))])
        await engine.update_weights(update)
    with pytest.raises(RequestError, match=r"temperature is 0\.005, but vLLM samples at 0\.01"):
        await engine.agenerate(ask(1, temperature=0.005))
    api._gives_raw[server.address] = True
    with pytest.raises(RequestError, match=r"temperature is 0\.5, but http.*processed_logprobs"):
        await engine.agenerate(ask(1, temperature=0.5))
    assert (await engine.agenerate(ask(1))).output_tokens
    await engine.close()
    await server.close()


async def test_an_update_without_what_it_needs(served_folder: Path) -> None:
    served = ServedModel(served_folder, max_batch_size=8, max_seq_len=200)
    server = await LiveServer(sglang_app(served)).start()
    engine = await asyncio.to_thread(lambda: RemoteEngine(SGLang(), [server.address]))
    needs = {"disk": "path", "lora": "path", "distributed": "tensors", "tensor": "tensors"}
    for method, missing in needs.items():
        with pytest.raises(ConfigError, match=rf"WeightUpdate\.{missing} is missing"):
            await engine.update_weights(WeightUpdate(version=1, method=method))
    assert (await engine.agenerate(ask(1))).output_tokens
    await engine.close()
    await server.close()
