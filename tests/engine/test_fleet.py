"""Several servers: routing, death and return, new weights, and never a lost request."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from live_server import LiveServer
from served_model import ServedModel
from sglang_server import sglang_app
from transformers import PreTrainedModel

from agent_rl.engine.base import WeightUpdate
from agent_rl.engine.loading import load_model
from agent_rl.engine.remote import RemoteEngine
from agent_rl.engine.sglang import SGLang
from agent_rl.errors import ConfigError, EngineError, RequestError
from agent_rl.types import GenerationConfig, ModelRequest, ModelResponse

Connect = Callable[..., Awaitable[tuple[RemoteEngine, list[LiveServer]]]]


@pytest_asyncio.fixture
async def connect(served_folder: Path) -> AsyncIterator[Connect]:
    """An engine over new servers; all are closed at the end."""
    engines: list[RemoteEngine] = []
    servers: list[LiveServer] = []

    async def make(count: int = 1, **options: Any) -> tuple[RemoteEngine, list[LiveServer]]:
        new = [await start(served_folder) for _ in range(count)]
        servers.extend(new)
        options = {"health_interval_s": 0.05, "unavailable_timeout_s": 30.0, **options}
        engine = await asyncio.to_thread(
            lambda: RemoteEngine(SGLang(), [server.address for server in new], **options)
        )
        engines.append(engine)
        return engine, new

    yield make
    for engine in engines:
        await engine.close()
    for server in servers:
        await server.close()


async def start(folder: Path, port: int = 0) -> LiveServer:
    served = ServedModel(folder, max_batch_size=8, max_seq_len=400)
    return await LiveServer(sglang_app(served), port=port).start()


def ask(seed: int, max_new_tokens: int = 20, **gconfig: Any) -> ModelRequest:
    ids = random.Random(seed).choices(range(3, 97), k=5 + seed % 7)
    config = GenerationConfig(max_new_tokens=max_new_tokens, **gconfig)
    return ModelRequest(rid=f"r{seed}", input_ids=ids, gconfig=config)


async def until(is_true: Callable[[], bool]) -> None:
    async with asyncio.timeout(60.0):
        while not is_true():  # noqa: ASYNC110 - several servers and an engine, no one event
            await asyncio.sleep(0.005)


def endless(models: dict[int, tuple[Path, PreTrainedModel]], max_new_tokens: int) -> ModelRequest:
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


@pytest.fixture(scope="session")
def models(
    served_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[int, tuple[Path, PreTrainedModel]]:
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
def assert_exact(models: dict[int, tuple[Path, PreTrainedModel]], response: ModelResponse) -> None:
    """Each token has the log-prob that the weights of its version give it."""
    ids = torch.tensor([[*response.input_tokens, *response.output_tokens]])
    chosen = torch.tensor(response.output_tokens)[:, None]
    for version in set(response.output_versions):
        logits = models[version][1](input_ids=ids).logits[0, len(response.input_tokens) - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, chosen)[:, 0]
        is_its = torch.tensor(response.output_versions) == version
        difference = torch.tensor(response.output_logprobs) - expected
        assert difference[is_its].abs().max() < 1e-4


def update(models: dict[int, tuple[Path, PreTrainedModel]], version: int) -> WeightUpdate:
    return WeightUpdate(version=version, method="disk", path=models[version][0])


# Resuming


async def test_an_abort_from_outside_is_resumed_within_the_budget(connect: Connect) -> None:
    """10 tokens in all, the rest of the budget sent each time (cases B35, B36, B45)."""
    engine, [server] = await connect()
    server.model.faults.abort_at_once = 2
    response = await engine.agenerate(ask(1, 10, stop_token_ids=()))
    assert len(response.output_tokens) == 10 or response.stop_reason == "stop"
    sent = calls(server, "generate")
    assert [body["sampling_params"]["max_new_tokens"] for body in sent] == [10, 10, 10]
    assert len({body["rid"] for body in sent}) == 3
    assert {len(body["rid"]) for body in sent} == {32}  # SGLang aborts by prefix


async def test_a_pause_sends_prompt_and_partial_completion_again(
    connect: Connect, models: dict[int, tuple[Path, PreTrainedModel]]
) -> None:
    """Cases B35, B36, B136: one abort at the pause, none afterwards; versions of each part."""
    engine, [server] = await connect()
    stream = engine.astream(endless(models, 100))
    await anext(stream)
    await hold(server)
    await engine.pause()
    await engine.update_weights(update(models, 1))
    assert calls(server, "continue_generation") == [{}]  # at the start; still paused
    await engine.resume()
    response = [item async for item in stream][-1]
    assert isinstance(response, ModelResponse)
    first, second = calls(server, "generate")
    num_old = response.output_versions.count(0)
    assert second["input_ids"] == [*first["input_ids"], *response.output_tokens[:num_old]]
    assert second["sampling_params"]["max_new_tokens"] == 100 - num_old
    assert [body["mode"] for body in calls(server, "pause_generation")] == ["abort"]
    assert all(not body["abort_all_requests"] for body in calls(server, "update_weights_from_disk"))
    assert set(response.output_versions) == {0, 1}
    assert_exact(models, response)


@pytest.mark.parametrize("mode", ["retract", "in_place"])
async def test_kept_requests_are_not_aborted(
    connect: Connect, models: dict[int, tuple[Path, PreTrainedModel]], mode: str
) -> None:
    """One request over the wire, two versions in its spans (case B136)."""
    engine, [server] = await connect(on_update=mode)
    stream = engine.astream(endless(models, 100))
    await anext(stream)
    await hold(server)
    await engine.update_weights(update(models, 1))
    items = [item async for item in stream]
    response = items[-1]
    assert isinstance(response, ModelResponse)
    assert len(calls(server, "generate")) == 1
    assert calls(server, "abort_request") == []
    assert set(response.output_versions) == {0, 1}
    assert_exact(models, response)
    shown = [version for delta in items[:-1] for version in delta.versions]
    assert tuple(shown) == response.output_versions[-len(shown) :]
    [body] = calls(server, "update_weights_from_disk")
    assert body["flush_cache"] == (mode == "retract")


async def test_versions_are_pinned_when_a_server_tells_none(connect: Connect) -> None:
    """Cases B61, B63: set_version while the request runs does not change its tokens."""
    engine, [server] = await connect()
    server.model.faults.hides_versions = True
    await asyncio.to_thread(engine.set_version, 3)
    assert server.model.label == "3"
    stream = engine.astream(ask(4, 60))
    await anext(stream)
    await asyncio.to_thread(engine.set_version, 4)
    response = [item async for item in stream][-1]
    assert isinstance(response, ModelResponse)
    assert set(response.output_versions) == {3}
    server.model.faults.abort_at_once = 1
    late = await engine.agenerate(ask(5))
    assert set(late.output_versions) == {4}


# Failures of one server


@pytest.mark.parametrize("fault", ["drop", "error_500", "busy"])
async def test_a_fault_costs_a_try_not_the_request(connect: Connect, fault: str) -> None:
    """Case B141: the request goes again, under another id, and one answer is used."""
    engine, [server] = await connect()
    setattr(server.model.faults, fault, 2)
    response = await engine.agenerate(ask(1))
    assert len(calls(server, "generate")) == 3
    assert len(response.output_tokens) == 20 or response.stop_reason == "stop"
    assert await engine.health()


async def test_a_request_that_fails_everywhere_fails(connect: Connect) -> None:
    engine, servers = await connect(2)
    for server in servers:
        server.model.faults.error_500 = 100
    with pytest.raises(EngineError, match=r"failed 6 times, the last: .*out of order"):
        await engine.agenerate(ask(1))


async def test_a_refusal_is_not_repeated(connect: Connect) -> None:
    engine, [server] = await connect()
    server.model.engine.max_seq_len = 100  # smaller than it told
    with pytest.raises(RequestError, match="longer than the context"):
        await engine.agenerate(ask(1, 200))
    assert len(calls(server, "generate")) == 1


async def test_ids_and_logprobs_of_different_lengths_are_refused(connect: Connect) -> None:
    """Case B41: 2 ids with 3 log-probs."""
    from agent_rl.engine.sglang import _read_piece

    entries = [[-0.1, 20, None], [-0.2, 21, None], [-0.3, 60, None]]
    with pytest.raises(EngineError, match="2 token ids and 3 log-probs"):
        _read_piece({"output_ids": [20, 21], "meta_info": {"output_token_logprobs": entries}}, 0)


async def test_one_of_three_dies_and_nothing_is_lost(connect: Connect) -> None:
    engine, servers = await connect(3, routing="least_loaded")
    await hold(*servers)
    running = [asyncio.ensure_future(engine.agenerate(ask(n, 60))) for n in range(24)]
    await until(lambda: all(len(server.model.running) == 8 for server in servers))
    await servers[1].kill()
    await release(servers[0], servers[2])
    responses = await asyncio.gather(*running)
    for response in responses:
        assert len(response.output_tokens) == 60 or response.stop_reason == "stop"
    await until(lambda: len(engine.up) == 2)
    again = await start(Path(servers[1].model.first_folder), servers[1].port)
    await until(lambda: len(engine.up) == 3)
    num_before = [len(calls(server, "generate")) for server in (servers[0], again, servers[2])]
    await asyncio.gather(*(engine.agenerate(ask(n)) for n in range(12)))
    num_after = [len(calls(server, "generate")) for server in (servers[0], again, servers[2])]
    assert all(after > before for before, after in zip(num_before, num_after, strict=True))
    await again.close()


async def test_a_stream_goes_on_elsewhere_from_what_was_shown(
    connect: Connect, models: dict[int, tuple[Path, PreTrainedModel]]
) -> None:
    engine, servers = await connect(2)
    stream = engine.astream(endless(models, 100))
    items = [await anext(stream)]
    await hold(*servers)
    busy = next(server for server in servers if server.model.running)
    await busy.kill()
    await release(*(server for server in servers if server is not busy))
    items += [item async for item in stream]
    response = items[-1]
    assert isinstance(response, ModelResponse)
    shown = [token_id for delta in items[:-1] for token_id in delta.token_ids]
    assert tuple(shown) == response.output_tokens
    assert len(shown) == 100 or response.stop_reason == "stop"
    assert_exact(models, response)


async def test_with_no_server_left_requests_fail_in_bounded_time(connect: Connect) -> None:
    """Case B131: with the reason, and the version stays."""
    engine, [server] = await connect(unavailable_timeout_s=0.2)
    await hold(server)
    running = asyncio.ensure_future(engine.agenerate(ask(1, 300)))
    await until(lambda: bool(server.model.running))
    await server.kill()
    with pytest.raises(EngineError, match=r"no inference server is up: .*ConnectError"):
        await running
    assert not await engine.health()


async def test_no_server_at_the_start() -> None:
    with pytest.raises(EngineError, match=r"no inference server answers: http://127.0.0.1:9: "):
        await asyncio.to_thread(RemoteEngine, SGLang(), ["http://127.0.0.1:9"])
    with pytest.raises(ConfigError, match=r"engine\.addresses is empty"):
        RemoteEngine(SGLang(), [])


async def test_the_key_is_sent_and_a_wrong_one_is_named(served_folder: Path) -> None:
    served = ServedModel(served_folder, max_batch_size=8, max_seq_len=400)
    server = await LiveServer(sglang_app(served, api_key="k")).start()
    with pytest.raises(EngineError, match=r"HTTP 401: Unauthorized; check engine\.api_key"):
        await asyncio.to_thread(lambda: RemoteEngine(SGLang(), [server.address], api_key="x"))
    engine = await asyncio.to_thread(lambda: RemoteEngine(SGLang(), [server.address], api_key="k"))
    assert (await engine.agenerate(ask(1))).output_tokens
    await engine.close()
    await server.close()


# New weights


async def test_a_server_that_fails_an_update_is_out_until_it_has_the_weights(
    connect: Connect, models: dict[int, tuple[Path, PreTrainedModel]]
) -> None:
    engine, servers = await connect(2, routing="round_robin")
    servers[0].model.faults.fail_update = True
    await engine.update_weights(update(models, 1))
    assert engine.get_version() == 1
    assert engine.up == [servers[1].address]
    for n in range(4):
        response = await engine.agenerate(ask(n))
        assert set(response.output_versions) == {1}
        assert_exact(models, response)
    servers[0].model.faults.fail_update = False
    await until(lambda: len(engine.up) == 2)
    assert servers[0].model.label == "1"


async def test_a_folder_nobody_can_load_keeps_the_old_weights(
    connect: Connect, models: dict[int, tuple[Path, PreTrainedModel]], tmp_path: Path
) -> None:
    engine, _ = await connect(2)
    await engine.update_weights(update(models, 1))
    with pytest.raises(EngineError, match="no inference server took the weights 2: "):
        await engine.update_weights(WeightUpdate(version=2, method="disk", path=tmp_path))
    assert engine.get_version() == 1
    response = await engine.agenerate(ask(1))
    assert set(response.output_versions) == {1}
    assert_exact(models, response)


async def test_weights_that_somebody_else_loaded_are_not_used(connect: Connect) -> None:
    """The server's own label is checked against ours."""
    engine, servers = await connect(2, routing="round_robin", health_interval_s=1000.0)
    servers[0].model.faults.foreign_label = "77"
    for n in range(4):
        response = await engine.agenerate(ask(n))
        assert set(response.output_versions) == {0}
    await until(lambda: engine.up == [servers[1].address])


async def test_a_server_killed_during_an_update_under_load(
    connect: Connect,
    models: dict[int, tuple[Path, PreTrainedModel]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Three servers; zero lost requests, exact versions, and the capacity comes back."""
    caplog.set_level(logging.ERROR)
    engine, servers = await connect(3, routing="least_loaded")
    req = endless(models, 80)
    await hold(*servers)
    running = [asyncio.ensure_future(engine.agenerate(req)) for _ in range(12)]
    await until(lambda: all(len(server.model.running) == 4 for server in servers))
    await release(*servers)
    await until(lambda: all(s.model.engine.counters.generated_tokens for s in servers))
    await hold(*servers)
    faults = servers[2].model.faults
    faults.update_begins, faults.update_may_end = asyncio.Event(), asyncio.Event()
    updating = asyncio.ensure_future(engine.update_weights(update(models, 1)))
    await faults.update_begins.wait()
    await servers[2].kill()
    faults.update_may_end.set()
    await updating
    responses = await asyncio.gather(*running)
    assert len(responses) == 12
    for response in responses:
        assert len(response.output_tokens) == 80 or response.stop_reason == "stop"
        assert list(response.output_versions) == sorted(response.output_versions)
        assert_exact(models, response)
    assert any(1 in response.output_versions for response in responses)
    assert any(0 in response.output_versions for response in responses)
    again = await start(models[0][0], servers[2].port)  # with the weights of the start
    await until(lambda: len(engine.up) == 3)
    assert again.model.label == "1"
    after = await asyncio.gather(*(engine.agenerate(ask(n)) for n in range(12)))
    assert calls(again, "generate")
    for response in after:
        assert set(response.output_versions) == {1}
        assert_exact(models, response)
    await again.close()


async def test_updates_follow_each_other_while_requests_run(
    connect: Connect, models: dict[int, tuple[Path, PreTrainedModel]]
) -> None:
    engine, _ = await connect(2)
    stream = engine.astream(ask(3, 150))
    await anext(stream)
    await engine.update_weights(update(models, 1))
    await engine.update_weights(update(models, 2))
    response = [item async for item in stream][-1]
    assert isinstance(response, ModelResponse)
    assert list(response.output_versions) == sorted(response.output_versions)
    assert_exact(models, response)


# Load


async def test_more_requests_than_fit_wait_in_order(connect: Connect) -> None:
    engine, servers = await connect(2, max_in_flight=3)
    peak = 0

    def watch() -> bool:
        nonlocal peak
        peak = max(peak, *(len(server.model.running) for server in servers))
        return all(task.done() for task in tasks)

    tasks = [asyncio.ensure_future(engine.agenerate(ask(n, 5))) for n in range(20)]
    await until(watch)
    assert all(task.result() for task in tasks)
    assert 0 < peak <= 3


async def test_it_is_used_from_two_event_loops(connect: Connect) -> None:
    """Case B142: 80 requests through a pool, half of them from another thread's loop."""
    engine, [server] = await connect()

    async def many(start: int) -> list[ModelResponse]:
        return await asyncio.gather(
            *(engine.agenerate(ask(n, 1)) for n in range(start, start + 40))
        )

    here, there = await asyncio.gather(many(0), asyncio.to_thread(lambda: asyncio.run(many(40))))
    assert len([*here, *there]) == 80
    assert len(calls(server, "generate")) == 80


async def test_a_cancelled_request_is_ended_on_the_server(connect: Connect) -> None:
    engine, [server] = await connect()
    await hold(server)
    running = asyncio.ensure_future(engine.agenerate(ask(1, 380)))
    await until(lambda: bool(server.model.running))
    running.cancel()
    await until(lambda: not server.model.running)
    with pytest.raises(asyncio.CancelledError):
        await running
