"""A RemoteEngine over several test servers: what tests of the fleet have in common."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
import pytest_asyncio
import torch
from live_server import LiveServer
from served_model import ServedModel
from sglang_server import sglang_app
from transformers import PreTrainedModel
from vllm_server import vllm_app

from agent_rl.engine.base import WeightUpdate
from agent_rl.engine.loading import load_model
from agent_rl.engine.remote import RemoteEngine
from agent_rl.engine.server_api import ServerApi
from agent_rl.engine.sglang import SGLang
from agent_rl.engine.vllm import VLLM
from agent_rl.types import GenerationConfig, ModelRequest, ModelResponse

Kind = Literal["sglang", "vllm"]
Models = dict[int, tuple[Path, PreTrainedModel]]
Connect = Callable[..., Awaitable[tuple[RemoteEngine, list[LiveServer]]]]


@pytest_asyncio.fixture(name="connect")
async def connect_fixture(served_folder: Path) -> AsyncIterator[Connect]:
    """An engine over new servers; all are closed at the end."""
    engines: list[RemoteEngine] = []
    servers: list[LiveServer] = []

    async def make(
        count: int = 1,
        kind: Kind = "sglang",
        grammar_backends: Sequence[str] = ("llguidance",),
        **options: Any,
    ) -> tuple[RemoteEngine, list[LiveServer]]:
        """The servers have these grammar backends in turn."""
        new = [
            await start(
                served_folder,
                kind=kind,
                grammar_backend=grammar_backends[n % len(grammar_backends)],
            )
            for n in range(count)
        ]
        servers.extend(new)
        options = {"health_interval_s": 0.05, "unavailable_timeout_s": 30.0, **options}
        engine = await asyncio.to_thread(
            lambda: RemoteEngine(api_of(kind), [server.address for server in new], **options)
        )
        engines.append(engine)
        return engine, new

    yield make
    for engine in engines:
        await engine.close()
    for server in servers:
        await server.close()


def api_of(kind: Kind) -> ServerApi:
    return SGLang() if kind == "sglang" else VLLM()


async def start(
    folder: Path, port: int = 0, kind: Kind = "sglang", grammar_backend: str = "llguidance"
) -> LiveServer:
    """``grammar_backend``: of SGLang."""
    served = ServedModel(folder, max_batch_size=8, max_seq_len=400)
    is_sglang = kind == "sglang"
    app = sglang_app(served, grammar_backend=grammar_backend) if is_sglang else vllm_app(served)
    return await LiveServer(app, port=port).start()


def ask(seed: int, max_new_tokens: int = 20, **gconfig: Any) -> ModelRequest:
    ids = random.Random(seed).choices(range(3, 97), k=5 + seed % 7)
    config = GenerationConfig(max_new_tokens=max_new_tokens, **gconfig)
    return ModelRequest(rid=f"r{seed}", input_ids=ids, gconfig=config)


async def until(is_true: Callable[[], bool]) -> None:
    async with asyncio.timeout(60.0):
        while not is_true():  # noqa: ASYNC110 - several servers and an engine, no one event
            await asyncio.sleep(0.005)


def endless(models: Models, max_new_tokens: int) -> ModelRequest:
    """Greedy, from a prompt after which the served model does not come to an end by itself."""
    for seed in range(50):
        req = ask(seed, max_new_tokens, greedy=True)
        inputs = torch.tensor([req.input_ids])
        plain = models[0][1].generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            do_sample=False,
            max_new_tokens=max_new_tokens,
        )
        if plain.shape[1] == len(req.input_ids) + max_new_tokens:
            return req
    raise AssertionError("the model always ends early")


async def hold(*servers: LiveServer) -> None:
    """Sample nothing more until an update or ``release`` lets them go on."""
    for server in servers:
        await server.model.engine.pause()


async def release(*servers: LiveServer) -> None:
    for server in servers:
        await server.model.engine.resume()


def calls(server: LiveServer, name: str) -> list[Any]:
    return [body for path, body in server.model.faults.log if path == name]


def generated(server: LiveServer) -> int:
    """How many of the tests' requests it got; an engine may ask one of its own, of one token."""
    bodies = [body["sampling_params"] for body in calls(server, "generate")]
    return sum(body.get("top_k") != 1 for body in bodies)


@pytest.fixture(name="models", scope="session")
def models_fixture(served_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Version -> folder and model: 0 as served, 1 and 2 with other weights."""
    cpu = torch.device("cpu")
    found = {0: (served_folder, load_model(served_folder, device=cpu, dtype=torch.float32))}
    for version in (1, 2):
        model = load_model(served_folder, device=cpu, dtype=torch.float32)
        noise = torch.Generator().manual_seed(version)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.05 * parameter.std() * torch.randn(parameter.shape, generator=noise)
        folder = tmp_path_factory.mktemp("weights") / f"v{version}"
        model.save_pretrained(folder)
        found[version] = (folder, model)
    return found


@torch.no_grad()
def assert_exact(models: Models, response: ModelResponse) -> None:
    """Each token has the log-prob that the weights of its version give it."""
    ids = torch.tensor([[*response.input_tokens, *response.output_tokens]])
    chosen = torch.tensor(response.output_tokens)[:, None]
    for version in set(response.output_versions):
        logits = models[version][1](input_ids=ids).logits[0, len(response.input_tokens) - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, chosen)[:, 0]
        is_its = torch.tensor(response.output_versions) == version
        difference = torch.tensor(response.output_logprobs) - expected
        assert difference[is_its].abs().max() < 1e-4


def update(models: Models, version: int) -> WeightUpdate:
    return WeightUpdate(version=version, method="disk", path=models[version][0])
