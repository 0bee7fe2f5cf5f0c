"""Weights through this machine's memory; a run with a server of its own is in
test_train_on_servers.py."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import pytest_asyncio
import torch
from live_server import LiveServer
from served_model import ServedModel
from sglang_server import sglang_app
from transformers import PreTrainedModel

from agent_rl.engine.base import NamedTensor, WeightUpdate
from agent_rl.engine.remote import RemoteEngine
from agent_rl.engine.server import Server
from agent_rl.engine.sglang import SGLang
from agent_rl.engine.shared_memory import SharedBuffer, SharedMemorySender
from agent_rl.errors import EngineError
from agent_rl.types import GenerationConfig, ModelRequest


@pytest_asyncio.fixture
async def servers(served_folder: Path) -> AsyncIterator[list[LiveServer]]:
    found = []
    for _ in range(2):
        served = ServedModel(served_folder, max_batch_size=8, max_seq_len=200)
        found.append(await LiveServer(sglang_app(served)).start())
    yield found
    for server in found:
        await server.close()


async def connect(servers: list[LiveServer]) -> RemoteEngine:
    return await asyncio.to_thread(
        lambda: RemoteEngine(SGLang(), [server.address for server in servers])
    )


def weights_of(server: LiveServer) -> dict[str, torch.Tensor]:
    return dict(server.model.engine.model.named_parameters())


def buckets_of(server: LiveServer) -> list[tuple[str | None, bool]]:
    """(label, whether the cache is dropped) of each bucket it got."""
    log = server.model.faults.log
    bodies = [body for kind, body in log if kind == "update_weights_from_tensor"]
    return [(body["weight_version"], body["flush_cache"]) for body in bodies]


def shared_names() -> set[str]:
    """What this process has given a name in shared memory."""
    return {path.name for path in Path("/dev/shm").glob(f"torch_{os.getpid()}_*")}


def test_tensors_lie_where_their_types_may_begin() -> None:
    """3 bytes, then two numbers of 4 bytes and one of 2."""
    buffer = SharedBuffer()
    bucket = [
        ("a", torch.tensor([1, 2, 3], dtype=torch.uint8)),
        ("b", torch.tensor([[0.5], [-2.0]])),
        ("c", torch.tensor(1.5, dtype=torch.bfloat16)),
    ]
    places = buffer.fill(bucket)
    assert [(place.start_idx, place.end_idx, place.numel) for place in places] == [
        (0, 3, 3),
        (16, 24, 8),
        (32, 34, 2),
    ]
    assert places[1] == SimpleNamespace(
        name="b", dtype=torch.float32, shape=torch.Size([2, 1]), start_idx=16, end_idx=24, numel=8
    )
    flat = buffer._flat_N
    assert flat[:3].tolist() == [1, 2, 3]
    assert flat[16:24].view(torch.float32).tolist() == [0.5, -2.0]
    assert flat[32:34].view(torch.bfloat16).tolist() == [1.5]


def test_a_machine_with_too_little_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Said before, because writing beyond it kills the process."""
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=32))
    with pytest.raises(EngineError, match=r"has 32 bytes left.*needs 40.*update to disk"):
        SharedBuffer().fill([("a", torch.zeros(10))])


async def test_buckets_and_the_label_with_the_last(
    servers: list[LiveServer], other_model: PreTrainedModel
) -> None:
    tensors = dict(other_model.named_parameters())
    engine = await connect(servers)
    inner = [Server(server.connection) for server in engine._fleet.router.servers]
    update = WeightUpdate(version=7, method="tensor", tensors=tensors.items)
    sender = SharedMemorySender(SGLang(), bucket_bytes=20_000)

    async def send() -> object:
        return await sender.send(inner, update, keeps_cache=False)

    assert await engine._loop.run(send()) == {}
    for server in servers:
        *first, last = buckets_of(server)
        assert len(first) > 1
        assert set(first) == {(None, False)}
        assert last == ("7", True)
        assert server.model.label == "7"
        assert not server.model.is_receiving
        for name, value in weights_of(server).items():
            assert torch.equal(value, tensors[name])
    await engine.close()


async def test_new_weights_for_all_servers(
    servers: list[LiveServer], other_model: PreTrainedModel
) -> None:
    tensors = dict(other_model.named_parameters())
    engine = await connect(servers)
    update = WeightUpdate(version=1, method="tensor", tensors=tensors.items)
    await engine.update_weights(update)
    assert engine.get_version() == 1
    req = ModelRequest(
        rid="r", input_ids=[5, 6, 7], gconfig=GenerationConfig(max_new_tokens=8, greedy=True)
    )
    response = await engine.agenerate(req)
    assert set(response.output_versions) == {1}
    ids = torch.tensor([[*response.input_tokens, *response.output_tokens]])
    with torch.no_grad():
        logits = other_model(input_ids=ids).logits[0, 2:-1]
    assert logits.argmax(-1).tolist() == list(response.output_tokens)
    await engine.close()


async def test_a_server_that_fails_is_out_and_the_other_serves(
    servers: list[LiveServer], other_model: PreTrainedModel
) -> None:
    """The memory that it was to read is not kept for it."""
    bad, good = servers
    bad.model.faults.fail_update = True
    engine = await connect(servers)
    tensors = dict(other_model.named_parameters())
    await engine.update_weights(WeightUpdate(version=1, method="tensor", tensors=tensors.items))
    assert engine.up == [good.address]
    assert good.model.label == "1"
    assert torch.equal(weights_of(good)["lm_head.weight"], tensors["lm_head.weight"])
    assert shared_names() == set()
    await engine.close()


async def test_an_update_that_breaks_off_keeps_no_memory(
    servers: list[LiveServer], other_model: PreTrainedModel
) -> None:
    def half() -> Iterator[NamedTensor]:
        yield from list(other_model.named_parameters())[:4]
        raise RuntimeError("out of memory")

    engine = await connect(servers)
    inner = [Server(server.connection) for server in engine._fleet.router.servers]
    sender = SharedMemorySender(SGLang(), bucket_bytes=5_000)
    update = WeightUpdate(version=7, method="tensor", tensors=half)

    async def send() -> object:
        return await sender.send(inner, update, keeps_cache=False)

    with pytest.raises(RuntimeError, match="out of memory"):
        await engine._loop.run(send())
    assert {label for label, _ in buckets_of(servers[0])} == {None}
    assert shared_names() == set()
    await engine.close()


def test_memory_that_nobody_reads_is_freed_with_the_buffer() -> None:
    buffer = SharedBuffer()
    buffer.handle(buffer.fill([("a", torch.zeros(10))]), num_readers=2)
    assert len(shared_names()) == 1
    buffer.handle(buffer.fill([("a", torch.zeros(1000))]), num_readers=2)
    assert len(shared_names()) == 1
    buffer.close()
    buffer.close()
    assert shared_names() == set()
