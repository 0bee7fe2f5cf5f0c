"""Launched servers that end in the middle of a run: started again, so often and not oftener."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from fleet_rig import (  # noqa: F401 - fixtures
    Kind,
    Models,
    api_of,
    ask,
    assert_exact,
    models_fixture,
    until,
    update,
)

from agent_rl.engine.command import ServerCommand
from agent_rl.engine.http import ServerConnection
from agent_rl.engine.launch import LaunchedServers
from agent_rl.engine.remote import RemoteEngine
from agent_rl.engine.restarter import Restarter
from agent_rl.engine.router import Router
from agent_rl.engine.server import Server
from agent_rl.errors import EngineError
from agent_rl.types import ModelResponse

HERE = Path(__file__).parent

# Ends with code 3 when it is asked for /end. What is in the file {model}/mood makes it end at its
# start, or never become ready.
SERVER = """
import argparse, http.server, os, pathlib, sys
parser = argparse.ArgumentParser()
for flag in ("--model-path", "--host", "--port"):
    parser.add_argument(flag)
options, _ = parser.parse_known_args()
mood = pathlib.Path(options.model_path, "mood").read_text()
print("feels", mood, flush=True)
if mood == "bad":
    sys.exit(4)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/end":
            print("out of memory", flush=True)
            os._exit(3)
        self.send_response(503 if mood == "slow" else 200)
        self.end_headers()
    def log_message(self, *arguments):
        pass
http.server.HTTPServer((options.host, int(options.port)), Handler).serve_forever()
"""


@pytest.fixture
def mood(tmp_path: Path) -> Callable[[str], None]:
    """What servers find that start from now on."""
    return lambda text: (tmp_path / "mood").write_text(text) and None


@pytest.fixture
def launched(tmp_path: Path, mood: Callable[[str], None]) -> Iterator[LaunchedServers]:
    program = tmp_path / "server.py"
    program.write_text(SERVER)
    mood("well")
    command = ServerCommand.of("sglang", (sys.executable, str(program)))
    with LaunchedServers(
        command, str(tmp_path), [{}], log_dir=tmp_path / "logs", max_restarts=2, grace_s=0.2
    ) as servers:
        yield servers.wait_ready()


def fleet_of(launched: LaunchedServers) -> tuple[Server, Router, Restarter]:
    [address] = launched.addresses
    server = Server(ServerConnection(address, api_key=None, timeout_s=10.0))
    router = Router([server], "round_robin", max_in_flight=1, unavailable_timeout_s=60.0)
    return server, router, Restarter(launched, router, first_pause_s=0.01)


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name.endswith("restarter")]


def end(launched: LaunchedServers) -> None:
    [address] = launched.addresses
    with pytest.raises(httpx.RemoteProtocolError):
        httpx.get(f"{address}/end")
    while launched.process(address).exit_code is None:
        time.sleep(0.01)


async def test_a_process_that_ended_runs_again(
    launched: LaunchedServers, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """At the same port; its log goes on, and ours has the code and the last lines."""
    server, _, restarter = fleet_of(launched)
    [first] = launched.pids
    await restarter.look_after(server)
    assert launched.pids == (first,)
    await asyncio.to_thread(end, launched)
    await restarter.look_after(server)
    assert launched.pids != (first,)
    assert launched.process(server.address).is_ready()
    assert server.is_starting and not server.is_gone and not server.is_up
    assert (tmp_path / "logs/server-0.log").read_text() == "feels well\nout of memory\nfeels well\n"
    ended, again = said(caplog)
    assert ended.startswith(f"{server.address}: its process ended with code 3; the end of ")
    assert ended.endswith("server-0.log:\nfeels well\nout of memory")
    assert again == f"{server.address} is started again in 0.01 s (1 of 2)"
    await server.connection.close()


async def test_one_that_cannot_be_started_is_given_up(
    launched: LaunchedServers, mood: Callable[[str], None], caplog: pytest.LogCaptureFixture
) -> None:
    """After growing pauses. Requests are told then, whatever they wait for otherwise."""
    server, router, restarter = fleet_of(launched)
    waiting = asyncio.ensure_future(router.pick([1], lambda: False))
    mood("bad")
    await asyncio.to_thread(end, launched)
    await restarter.look_after(server)
    pauses = [message for message in said(caplog) if "is started again" in message]
    assert [message.partition(" in ")[2] for message in pauses] == [
        "0.01 s (1 of 2)",
        "0.02 s (2 of 2)",
    ]
    for pick in (waiting, router.pick([1], lambda: False)):
        with pytest.raises(EngineError) as info:
            await pick
        assert (
            f"no inference server is up: {server.address}: its process ended with code 4, after 2 "
            "restarts in succession (engine.launch.max_restarts=2); the end of "
        ) in str(info.value)
        assert str(info.value).endswith("\nfeels bad")
    server.mark_down("it did not take new weights")
    assert "code 4" in str(server.why_down)
    await server.connection.close()


async def test_one_that_does_not_become_ready_has_had_its_try(
    launched: LaunchedServers, mood: Callable[[str], None], caplog: pytest.LogCaptureFixture
) -> None:
    server, _, restarter = fleet_of(launched)
    launched.ready_timeout_s = 0.1
    mood("slow")
    await asyncio.to_thread(end, launched)
    await restarter.look_after(server)
    assert server.is_gone
    late = [message for message in said(caplog) if "was not ready after 0.1 s" in message]
    assert len(late) == 2
    await server.connection.close()


async def test_a_folder_that_is_gone_is_a_reason_too(
    launched: LaunchedServers, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server, router, restarter = fleet_of(launched)
    await asyncio.to_thread(end, launched)
    shutil.rmtree(tmp_path / "logs")
    await restarter.look_after(server)
    assert sum("cannot be started: " in message for message in said(caplog)) == 2
    with pytest.raises(EngineError, match=r"code 3, after 2 restarts.*its log cannot be read"):
        await router.pick([1], lambda: False)
    await server.connection.close()


async def test_one_that_was_well_for_long_has_all_its_tries_again(
    launched: LaunchedServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted from when it was ready: one that takes long to fail never was."""
    monkeypatch.setattr("agent_rl.engine.restarter._WELL_AFTER_S", -1.0)
    server, _, restarter = fleet_of(launched)
    for _ in range(4):
        await asyncio.to_thread(end, launched)
        await restarter.look_after(server)
        assert not server.is_gone
    await server.connection.close()


async def test_nothing_is_started_after_the_end(launched: LaunchedServers) -> None:
    before = launched.pids
    await asyncio.to_thread(launched.close)
    launched.start_again(launched.addresses[0])
    assert launched.pids == before


async def test_requests_wait_for_a_server_that_is_being_started(launched: LaunchedServers) -> None:
    """And with them an update: however short ``unavailable_timeout_s`` is."""
    server, _, _ = fleet_of(launched)
    router = Router([server], "round_robin", max_in_flight=1, unavailable_timeout_s=0.0)
    server.mark_starting("its process ended")
    picked = asyncio.ensure_future(router.pick([1], lambda: False))
    started = asyncio.ensure_future(router.until_started())
    for _ in range(10):
        await asyncio.sleep(0)
    assert not picked.done() and not started.done()
    server.mark_up()
    await router.look_again()
    assert await picked is server
    await started
    server.mark_down("it ended again")
    with pytest.raises(EngineError, match="it ended again"):
        await router.pick([1], lambda: False)
    await server.connection.close()


def server_pid(launched: LaunchedServers, address: str) -> int:
    """The server itself: the only child of its warden."""
    warden = launched.process(address).pid
    return int(Path(f"/proc/{warden}/task/{warden}/children").read_text())


def modes(folder: Path, pattern: str) -> list[int]:
    return [file.stat().st_mode & 0o777 for file in folder.glob(pattern)]


def command_lines() -> str:
    lines = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            lines.append(file.read_text(errors="replace"))
        except OSError:
            continue  # it has ended meanwhile
    return "\n".join(lines)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sglang", "vllm"])
async def test_servers_that_are_killed_come_back_with_the_present_weights(
    served_folder: Path, models: Models, tmp_path: Path, kind: Kind
) -> None:
    """First one of two, then both; no request is lost, and nobody sees the key."""
    command = ServerCommand.of(kind, (sys.executable, str(HERE / f"{kind}_server.py")))
    launched = LaunchedServers(
        command, str(served_folder), [{}, {}], log_dir=tmp_path, api_key="a-secret-key"
    )
    assert modes(tmp_path, "*.log") == [0o600] * 2
    assert modes(tmp_path, "*.key.yaml") == [0o600] * (2 if kind == "sglang" else 0)
    await asyncio.to_thread(launched.wait_ready)
    assert modes(tmp_path, "*.key.yaml") == []
    assert "a-secret-key" not in command_lines()
    engine = await asyncio.to_thread(
        lambda: RemoteEngine(
            api_of(kind),
            launched.addresses,
            api_key="a-secret-key",
            health_interval_s=0.05,
            unavailable_timeout_s=5.0,
            launched=launched,
            first_pause_s=0.01,
        )
    )
    await engine.update_weights(update(models, 1))
    for victims in (launched.addresses[:1], launched.addresses):
        running = [asyncio.ensure_future(engine.agenerate(ask(n, 200))) for n in range(8)]
        dead = {launched.process(address).pid for address in victims}
        for address in victims:
            os.kill(server_pid(launched, address), signal.SIGKILL)
        for response in await asyncio.gather(*running):
            assert len(response.output_tokens) == 200 or response.stop_reason == "stop"
            assert set(response.output_versions) == {1}
            assert_exact(models, response)
        await until(lambda dead=dead: dead.isdisjoint(launched.pids) and len(engine.up) == 2)
    for address in launched.addresses:
        os.kill(server_pid(launched, address), signal.SIGKILL)
    await until(lambda: not engine.up)
    await engine.update_weights(update(models, 2))  # waits for one of them
    response = await engine.agenerate(ask(1, 10))
    assert isinstance(response, ModelResponse)
    assert set(response.output_versions) == {2}
    assert_exact(models, response)
    await engine.close()
