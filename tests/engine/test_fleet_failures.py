"""Servers that die, hang, lie or forget: no request is lost, and none is answered wrongly."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from fleet_rig import (  # noqa: F401 - fixtures
    Connect,
    Kind,
    Models,
    api_of,
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
from served_model import ServedModel
from sglang_server import sglang_app

from agent_rl.engine.remote import RemoteEngine
from agent_rl.engine.sglang import SGLang
from agent_rl.errors import ConfigError, EngineError, RequestError
from agent_rl.types import ModelResponse


@pytest.mark.parametrize("fault", ["drop", "error_500", "busy"])
async def test_a_fault_costs_a_try_not_the_request(connect: Connect, fault: str) -> None:
    """Case B141: the request goes again, under another id, and one answer is used."""
    engine, [server] = await connect()
    setattr(server.model.faults, fault, 2)
    response = await engine.agenerate(ask(1))
    assert len({body["rid"] for body in calls(server, "generate")}) == 3
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
    connect: Connect, models: Models
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
    with pytest.raises(EngineError, match=r"(no inference server is up|failed).*ConnectError"):
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


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
async def test_a_stream_that_breaks_off_goes_on(
    connect: Connect, models: Models, kind: Kind
) -> None:
    """The connection is reset twice in the middle; each token is shown once."""
    engine, [server] = await connect(kind=kind)
    server.model.faults.drop_stream = 2
    items = [item async for item in engine.astream(endless(models, 40))]
    response = items[-1]
    assert isinstance(response, ModelResponse)
    shown = [token_id for delta in items[:-1] for token_id in delta.token_ids]
    assert tuple(shown) == response.output_tokens
    assert len(shown) == 40
    assert generated(server) == 3
    assert_exact(models, response)


async def test_a_server_that_answers_all_but_requests_costs_none(connect: Connect) -> None:
    """It looks well and is the least busy, and still takes no request twice."""
    engine, servers = await connect(2, routing="least_loaded")
    servers[0].model.faults.error_500 = 1000
    for n in range(8):
        assert (await engine.agenerate(ask(n))).output_tokens
    assert len(engine.up) == 2


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
async def test_a_server_that_starts_anew_gets_the_present_weights_first(
    connect: Connect, models: Models, kind: Kind
) -> None:
    """Until it has loaded them, it gets no request."""
    engine, servers = await connect(2, kind)
    await engine.update_weights(update(models, 1))
    await servers[0].kill()
    await until(lambda: engine.up == [servers[1].address])
    again = await start(models[0][0], servers[0].port, kind)
    faults = again.model.faults
    faults.update_begins, faults.update_may_end = asyncio.Event(), asyncio.Event()
    await faults.update_begins.wait()
    for n in range(6):
        assert set((await engine.agenerate(ask(n))).output_versions) == {1}
    assert generated(again) == 0
    faults.update_may_end.set()
    await until(lambda: len(engine.up) == 2)
    assert again.model.label == "1"
    responses = await asyncio.gather(*(engine.agenerate(ask(n)) for n in range(8)))
    assert generated(again) > 0
    for response in responses:
        assert set(response.output_versions) == {1}
        assert_exact(models, response)
    await again.close()


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
async def test_old_weights_are_noticed_before_the_server_is_missed(
    connect: Connect, models: Models, kind: Kind
) -> None:
    """It starts anew between two looks, and calls its weights as it did at first."""
    engine, servers = await connect(2, kind, routing="round_robin", health_interval_s=1000.0)
    await engine.update_weights(update(models, 1))
    await until(lambda: all(len(server.model.labels) == 2 for server in servers))
    servers[0].model.faults.foreign_label = "default"
    for n in range(4):
        response = await engine.agenerate(ask(n))
        assert set(response.output_versions) == {1}
        assert_exact(models, response)
    await until(lambda: engine.up == [servers[1].address])


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
async def test_a_server_that_hangs_is_out_and_comes_back(connect: Connect, kind: Kind) -> None:
    engine, servers = await connect(2, kind, health_timeout_s=0.2)
    servers[0].model.faults.may_tell = asyncio.Event()
    await until(lambda: engine.up == [servers[1].address])
    assert (await engine.agenerate(ask(1))).output_tokens
    servers[0].model.faults.may_tell.set()
    await until(lambda: len(engine.up) == 2)


async def test_a_server_that_takes_weights_is_left_alone(connect: Connect, models: Models) -> None:
    """Neither missed when it is slow, nor taken for one whose update was broken off."""
    engine, servers = await connect(2)
    faults = servers[0].model.faults
    faults.update_begins, faults.update_may_end = asyncio.Event(), asyncio.Event()
    updating = asyncio.ensure_future(engine.update_weights(update(models, 1)))
    await faults.update_begins.wait()

    async def looks() -> int:
        """At the first, after so many more at the second."""
        num_looks = len(calls(servers[1], "tell"))
        await until(lambda: len(calls(servers[1], "tell")) >= num_looks + 3)
        return len(calls(servers[0], "tell"))

    assert await looks() == await looks()
    faults.update_may_end.set()
    await updating
    assert len(engine.up) == 2
    assert len(calls(servers[0], "update_weights_from_disk")) == 1


async def test_one_that_hangs_hides_no_other_that_dies(connect: Connect, models: Models) -> None:
    """The first is loading weights for as long as it likes; the second dies meanwhile."""
    engine, servers = await connect(3)
    faults = servers[0].model.faults
    faults.fail_update = True
    await engine.update_weights(update(models, 1))
    faults.update_begins, faults.update_may_end = asyncio.Event(), asyncio.Event()
    faults.fail_update = False
    await faults.update_begins.wait()
    await servers[1].kill()
    await until(lambda: engine.up == [servers[2].address])
    assert (await engine.agenerate(ask(1))).output_tokens
    faults.update_may_end.set()
    await until(lambda: servers[0].address in engine.up)


async def test_all_are_gone_and_one_comes_back(connect: Connect, models: Models) -> None:
    engine, servers = await connect(2, unavailable_timeout_s=0.1)
    await engine.update_weights(update(models, 1))
    for server in servers:
        await server.kill()
    await until(lambda: not engine.up)
    with pytest.raises(EngineError, match="no inference server is up: "):
        await engine.agenerate(ask(1))
    with pytest.raises(EngineError, match="no inference server took the weights 2: none is up: "):
        await engine.update_weights(update(models, 2))
    assert engine.get_version() == 1
    again = await start(models[0][0], servers[1].port)
    await until(lambda: engine.up == [servers[1].address])
    response = await engine.agenerate(ask(1))
    assert set(response.output_versions) == {1}
    assert_exact(models, response)
    await again.close()


async def test_a_slow_server_is_given_up_after_the_timeout(connect: Connect) -> None:
    engine, servers = await connect(2, routing="least_loaded", timeout_s=1.0)
    await hold(servers[0])
    responses = await asyncio.gather(*(engine.agenerate(ask(n, 5)) for n in range(4)))
    assert all(response.output_tokens for response in responses)
    await until(lambda: not servers[0].model.running)  # aborted there


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
async def test_an_update_that_a_trainer_left_open_is_closed_by_the_next(
    connect: Connect, models: Models, served_folder: Path, kind: Kind
) -> None:
    """Before anything is asked of the server: vLLM dies of a request meanwhile."""
    server = await start(served_folder, kind=kind)
    server.model.is_receiving = True
    api = api_of(kind)
    engine = await asyncio.to_thread(lambda: RemoteEngine(api, [server.address]))
    assert not server.model.is_receiving
    await engine.update_weights(update(models, 1))
    assert_exact(models, await engine.agenerate(ask(1)))
    await engine.close()
    await server.close()
