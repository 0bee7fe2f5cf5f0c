"""Servers as child processes: readiness, logs, and that none is left behind."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import httpx
import pytest

from agent_rl.engine.launch import LaunchedServers, ServerCommand, gpu_envs
from agent_rl.errors import EngineError

SERVER = """
import argparse, http.server, os, sys
parser = argparse.ArgumentParser()
for flag in ("--model-path", "--host", "--port", "--api-key"):
    parser.add_argument(flag)
options = parser.parse_args()
print("serving", options.model_path, os.environ.get("CUDA_VISIBLE_DEVICES"), flush=True)
if options.model_path == "broken":
    sys.exit("no such model")
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(503 if options.model_path == "slow" else 200)
        self.end_headers()
        self.wfile.write(str(os.getpid()).encode())
    def log_message(self, *arguments):
        pass
http.server.HTTPServer((options.host, int(options.port)), Handler).serve_forever()
"""


@pytest.fixture
def command(tmp_path: Path) -> ServerCommand:
    program = tmp_path / "server.py"
    program.write_text(SERVER)
    return ServerCommand.of("sglang", (sys.executable, str(program)))


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_servers_are_ready_logged_and_stopped(command: ServerCommand, tmp_path: Path) -> None:
    envs = gpu_envs(2, 1, 4)
    with LaunchedServers(command, "m", envs, log_dir=tmp_path / "logs") as servers:
        servers.wait_ready(60.0)
        pids = [int(httpx.get(f"{address}/").text) for address in servers.addresses]
        assert len(set(pids)) == len(set(servers.addresses)) == 2
    assert not any(map(is_alive, pids))
    assert (tmp_path / "logs/server-0.log").read_text() == "serving m 4\n"
    assert (tmp_path / "logs/server-1.log").read_text() == "serving m 5\n"
    servers.close()


def test_a_server_that_ends_shows_its_log(command: ServerCommand, tmp_path: Path) -> None:
    servers = LaunchedServers(command, "broken", [{}], log_dir=tmp_path)
    with pytest.raises(EngineError, match=r"ended with code 1; (?s:.*)\nno such model$"):
        servers.wait_ready(60.0)


def test_a_server_that_is_too_slow_is_stopped(command: ServerCommand, tmp_path: Path) -> None:
    servers = LaunchedServers(command, "slow", [{}], log_dir=tmp_path)
    with pytest.raises(EngineError, match=r"was not ready after 0\.1 s"):
        servers.wait_ready(0.1)
    with pytest.raises(httpx.ConnectError):
        httpx.get(servers.addresses[0])


def test_a_program_that_is_not_there(tmp_path: Path) -> None:
    command = ServerCommand.of("vllm", ("/no/such/program",))
    with pytest.raises(EngineError, match="cannot start /no/such/program"):
        LaunchedServers(command, "m", [{}], log_dir=tmp_path)


def test_command_lines() -> None:
    assert ServerCommand.of("sglang", ("sgl",)).line("m", 5, "k") == [
        *("sgl", "--model-path", "m", "--host", "127.0.0.1", "--port", "5", "--api-key", "k")
    ]
    assert ServerCommand.of("vllm", ("v",)).line("m", 5, None)[-2:] == [
        "--logprobs-mode",
        "processed_logprobs",
    ]
    assert gpu_envs(2, 2, 4) == [
        {"CUDA_VISIBLE_DEVICES": "4,5"},
        {"CUDA_VISIBLE_DEVICES": "6,7"},
    ]
    assert gpu_envs(1, 0, 0) == [{}]
