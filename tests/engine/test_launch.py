"""Servers as child processes: readiness, logs, and that none is left behind."""

from __future__ import annotations

import http.server
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest

from agent_rl.engine.command import ServerCommand
from agent_rl.engine.launch import LaunchedServers, gpu_envs
from agent_rl.errors import ConfigError, EngineError

SERVER = """
import argparse, http.server, os, sys, time
parser = argparse.ArgumentParser()
for flag in ("--model-path", "--host", "--port", "--api-key"):
    parser.add_argument(flag)
options, _ = parser.parse_known_args()
print("serving", options.model_path, os.environ.get("CUDA_VISIBLE_DEVICES"), flush=True)
if options.model_path == "broken":
    sys.exit("no such model")
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(503 if options.model_path == "slow" else 200)
        self.end_headers()
        self.wfile.write(str(os.getpid()).encode())
        if self.path == "/endless":
            time.sleep(1000)
    def log_message(self, *arguments):
        pass
http.server.HTTPServer((options.host, int(options.port)), Handler).serve_forever()
"""


@pytest.fixture
def command(tmp_path: Path) -> ServerCommand:
    program = tmp_path / "server.py"
    program.write_text(SERVER)
    return ServerCommand.of("sglang", (sys.executable, str(program)))


# A server with two workers that do not end when asked, one of them an orphan in a session of its
# own. All hold the pipe open, so its end is the end of all of them.
FAMILY = """
import os, signal, sys, time
pipe = os.open(sys.argv[sys.argv.index("--model-path") + 1], os.O_WRONLY)
for is_orphan in (False, True):
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if is_orphan:
            os.setsid()
            if os.fork():
                os._exit(0)
        os.write(pipe, b"worker\\n")
        time.sleep(1000)
os.write(pipe, b"server\\n")
time.sleep(0 if "--ends" in sys.argv else 1000)
"""

TRAINER = """
import sys, time
from pathlib import Path
from agent_rl.engine.command import ServerCommand
from agent_rl.engine.launch import LaunchedServers
command = ServerCommand.of("sglang", (sys.executable, sys.argv[1]))
LaunchedServers(command, sys.argv[2], [{}], log_dir=Path(sys.argv[3]), grace_s=0.2)
time.sleep(1000)
"""


@pytest.fixture
def family(tmp_path: Path) -> tuple[Path, Path]:
    """The program and its pipe."""
    program, pipe = tmp_path / "family.py", tmp_path / "pipe"
    program.write_text(FAMILY)
    os.mkfifo(pipe)
    return program, pipe


@contextmanager
def other_server(port: int) -> Iterator[None]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", port), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield
        server.shutdown()
        thread.join()


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_servers_are_ready_logged_and_stopped(command: ServerCommand, tmp_path: Path) -> None:
    envs = gpu_envs(2, 1, 4)
    with LaunchedServers(command, "m", envs, log_dir=tmp_path / "logs") as servers:
        servers.wait_ready()
        pids = [int(httpx.get(f"{address}/").text) for address in servers.addresses]
        assert len(set(pids)) == len(set(servers.addresses)) == 2
    assert not any(map(is_alive, pids))
    assert (tmp_path / "logs/server-0.log").read_text() == "serving m 4\n"
    assert (tmp_path / "logs/server-1.log").read_text() == "serving m 5\n"
    servers.close()


def test_a_server_that_ends_shows_its_log(command: ServerCommand, tmp_path: Path) -> None:
    servers = LaunchedServers(command, "broken", [{}], log_dir=tmp_path)
    with pytest.raises(EngineError, match=r"ended with code 1; (?s:.*)\nno such model$"):
        servers.wait_ready()


def test_a_server_that_is_too_slow_is_stopped(command: ServerCommand, tmp_path: Path) -> None:
    servers = LaunchedServers(command, "slow", [{}], log_dir=tmp_path, ready_timeout_s=0.1)
    with pytest.raises(EngineError, match=r"was not ready after 0\.1 s"):
        servers.wait_ready()
    with pytest.raises(httpx.ConnectError):
        httpx.get(servers.addresses[0])


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_trainer_that_is_killed_takes_its_servers_along(
    family: tuple[Path, Path], tmp_path: Path, number: signal.Signals
) -> None:
    program, pipe = family
    trainer = subprocess.Popen([sys.executable, "-c", TRAINER, program, pipe, tmp_path])
    with pipe.open() as alive:
        assert sorted(alive.readline() for _ in range(3)) == ["server\n", "worker\n", "worker\n"]
        trainer.send_signal(number)
        trainer.wait()
        assert alive.read() == ""


def test_a_warden_that_is_killed_takes_its_server_along(
    command: ServerCommand, tmp_path: Path
) -> None:
    with LaunchedServers(command, "m", [{}], log_dir=tmp_path) as servers:
        servers.wait_ready()
        with httpx.stream("GET", f"{servers.addresses[0]}/endless") as answer:
            assert answer.status_code == 200
            os.kill(servers.pids[0], signal.SIGKILL)
            with suppress(httpx.ReadError):
                answer.read()
        with pytest.raises(httpx.ConnectError):
            httpx.get(servers.addresses[0])


def test_a_server_that_ends_takes_its_workers_along(
    family: tuple[Path, Path], tmp_path: Path
) -> None:
    program, pipe = family
    command = ServerCommand.of("sglang", (sys.executable, str(program), "--ends"))
    with LaunchedServers(command, str(pipe), [{}], log_dir=tmp_path, grace_s=0.2) as servers:
        with pipe.open() as alive:
            assert len(alive.read().splitlines()) == 3
        with pytest.raises(EngineError, match="ended with code 0"):
            servers.wait_ready()


def test_an_answer_on_the_port_of_a_server_that_ended_is_not_its_own(
    command: ServerCommand, tmp_path: Path
) -> None:
    servers = LaunchedServers(command, "broken", [{}], log_dir=tmp_path)
    os.waitid(os.P_PID, servers.pids[0], os.WEXITED | os.WNOWAIT)
    port = int(servers.addresses[0].rpartition(":")[2])
    with other_server(port), pytest.raises(EngineError, match="ended with code 1"):
        servers.wait_ready()


def test_a_program_that_is_not_there(tmp_path: Path) -> None:
    command = ServerCommand.of("vllm", ("/no/such/program",))
    with pytest.raises(EngineError, match="cannot start /no/such/program"):
        LaunchedServers(command, "m", [{}], log_dir=tmp_path)


def test_command_lines() -> None:
    assert ServerCommand.of("sglang", ("sgl",)).line("m", 5, Path("k.yaml")) == [
        *("sgl", "--model-path", "m", "--host", "127.0.0.1", "--port", "5"),
        *("--grammar-backend", "llguidance", "--config", "k.yaml"),
    ]
    assert ServerCommand.of("vllm", ("v",)).line("m", 5)[-4:] == [
        *("--logprobs-mode", "processed_logprobs"),
        *("--structured-outputs-config.backend", "guidance"),
    ]
    assert "--worker-extension-cls" not in ServerCommand.of("vllm").args
    receiving = ServerCommand.of("vllm", gpus_per_server=2, takes_broadcasts=True)
    assert receiving.args[-4:] == (
        *("--worker-extension-cls", "agent_rl.engine.vllm_receiver.WeightReceiver"),
        *("--tensor-parallel-size", "2"),
    )
    assert receiving.env == {"VLLM_SERVER_DEV_MODE": "1"}
    assert ServerCommand.of("sglang", gpus_per_server=4).args[-2:] == ("--tp-size", "4")
    assert gpu_envs(2, 2, 4) == [
        {"CUDA_VISIBLE_DEVICES": "4,5"},
        {"CUDA_VISIBLE_DEVICES": "6,7"},
    ]
    assert gpu_envs(1, 0, 0) == [{}]


@pytest.mark.parametrize("args", [("--config", "mine.yaml"), ("--config=mine.yaml",)])
def test_a_second_file_of_options_is_refused(args: tuple[str, ...], tmp_path: Path) -> None:
    """SGLang reads one: with two it ends, or ignores the key."""
    command = ServerCommand(program=("true",), model_flag="--model-path", args=args)
    with LaunchedServers(command, "m", [{}], log_dir=tmp_path):
        pass
    with pytest.raises(ConfigError, match=r"engine\.launch\.args has --config"):
        LaunchedServers(command, "m", [{}], log_dir=tmp_path, api_key="k")
