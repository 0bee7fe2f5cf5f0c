"""Several servers: requests that are resumed, new weights, load."""

from __future__ import annotations

import asyncio
import logging
import resource
from pathlib import Path

import pytest
from fleet_rig import (  # noqa: F401 - fixtures
    Connect,
    Kind,
    Models,
    ask,
    assert_exact,
    calls,
    connect_fixture,
    endless,
    generated,
    hold,
    models_fixture,
    release,
    start,
    until,
    update,
)
from live_server import LiveServer
from scripted_server import Answer, ScriptedServer

from agent_rl.engine.base import WeightUpdate
from agent_rl.engine.remote import RemoteEngine
from agent_rl.engine.sglang import SGLang
from agent_rl.errors import EngineError
from agent_rl.types import ModelResponse

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
    connect: Connect, models: Models
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


async def test_nothing_reaches_a_paused_server(connect: Connect, models: Models) -> None:
    """Case B134: what comes in a pause, weight updates included, waits in the engine."""
    engine, [server] = await connect()
    await engine.pause()
    late = [asyncio.ensure_future(engine.agenerate(ask(n))) for n in range(4)]
    await engine.update_weights(update(models, 1))
    assert calls(server, "generate") == []
    await engine.resume()
    for response in await asyncio.gather(*late):
        assert set(response.output_versions) == {1}


@pytest.mark.parametrize("mode", ["retract", "in_place"])
async def test_kept_requests_are_not_aborted(connect: Connect, models: Models, mode: str) -> None:
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


async def test_a_new_name_for_the_weights_ends_nothing(connect: Connect, models: Models) -> None:
    """Case B136: the endpoint aborts whatever runs unless it is told not to."""
    engine, [server] = await connect()
    stream = engine.astream(endless(models, 60))
    await anext(stream)
    await hold(server)
    await asyncio.to_thread(engine.set_version, 4)
    await release(server)
    response = [item async for item in stream][-1]
    assert isinstance(response, ModelResponse)
    assert len(response.output_tokens) == 60
    assert len(calls(server, "generate")) == 1
    assert [body["new_version"] for body in calls(server, "update_weight_version")] == ["4"]


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


# New weights


async def test_a_server_that_fails_an_update_is_out_until_it_has_the_weights(
    connect: Connect, models: Models
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
    connect: Connect, models: Models, tmp_path: Path
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


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
async def test_a_server_killed_during_an_update_under_load(
    connect: Connect, models: Models, kind: Kind, caplog: pytest.LogCaptureFixture
) -> None:
    """Three servers; zero lost requests, exact versions, and the capacity comes back."""
    caplog.set_level(logging.ERROR)
    engine, servers = await connect(3, kind, routing="least_loaded")
    req = endless(models, 80)
    await hold(*servers)
    running = [asyncio.ensure_future(engine.agenerate(req)) for _ in range(12)]
    await until(lambda: all(len(server.model.running) == 4 for server in servers))
    await release(*servers)
    await until(lambda: all(s.model.engine.counters.generated_tokens for s in servers))
    await hold(*servers)
    late = [asyncio.ensure_future(engine.agenerate(req)) for _ in range(3)]
    await until(lambda: sum(map(generated, servers)) == 15)
    faults = servers[2].model.faults
    faults.update_begins, faults.update_may_end = asyncio.Event(), asyncio.Event()
    updating = asyncio.ensure_future(engine.update_weights(update(models, 1)))
    await faults.update_begins.wait()
    await servers[2].kill()
    faults.update_may_end.set()
    await updating
    responses = await asyncio.gather(*running, *late)
    for response in responses:
        assert len(response.output_tokens) == 80 or response.stop_reason == "stop"
        assert list(response.output_versions) == sorted(response.output_versions)
        assert_exact(models, response)
    assert all(set(response.output_versions) == {1} for response in responses[12:])
    assert any(0 in response.output_versions for response in responses)
    again = await start(models[0][0], servers[2].port, kind)  # with the weights of the start
    await until(lambda: len(engine.up) == 3)
    assert again.model.label == "1"
    after = await asyncio.gather(*(engine.agenerate(ask(n)) for n in range(12)))
    assert generated(again) > 0
    for response in after:
        assert set(response.output_versions) == {1}
        assert_exact(models, response)
    await again.close()


async def test_updates_follow_each_other_while_requests_run(
    connect: Connect, models: Models
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


@pytest.mark.slow
async def test_2000_requests_within_256_file_descriptors() -> None:
    """Case B142: the pool holds no more connections than requests in flight; both loops work, and
    nothing is left open (warnings are errors)."""
    answer = Answer(token_ids=[5, 6, 2])
    scripted = ScriptedServer(kind="sglang", script=[answer] * 2000)
    server = await LiveServer(scripted.app()).start()
    engine = await asyncio.to_thread(
        lambda: RemoteEngine(SGLang(), [server.address], max_in_flight=60)
    )

    async def many(start: int) -> list[ModelResponse]:
        requests = (engine.agenerate(ask(n, 5)) for n in range(start, start + 1000))
        return await asyncio.gather(*requests)

    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
    try:
        first = await many(0)
        second = await asyncio.to_thread(lambda: asyncio.run(many(1000)))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert {response.output_tokens for response in first + second} == {(5, 6, 2)}
    assert len(scripted.asked) == 2000
    await engine.close()
    await server.close()


async def test_a_cancelled_request_is_ended_on_the_server(connect: Connect) -> None:
    engine, [server] = await connect()
    await hold(server)
    running = asyncio.ensure_future(engine.agenerate(ask(1, 380)))
    await until(lambda: bool(server.model.running))
    running.cancel()
    await until(lambda: not server.model.running)
    with pytest.raises(asyncio.CancelledError):
        await running
