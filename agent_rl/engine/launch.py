"""LaunchedServers: inference servers of this machine, started, waited for, and stopped again.

Each runs under a warden of its own (``warden.py``) and writes to its own log file. Neither it nor
its workers outlive ``close`` or the end of this process, whatever ends it. It knows command lines
and ports, nothing of requests.
"""

from __future__ import annotations

import atexit
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Self

import httpx

from agent_rl.engine.sglang import SGLANG_ARGS
from agent_rl.engine.vllm import RECEIVER_ARGS, VLLM_ARGS
from agent_rl.errors import EngineError

_WARDEN = Path(__file__).with_name("warden.py")
_PORTS = range(20_000, 30_000)
_POLL_S = 0.2
_SHOWN_LOG_LINES = 15


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerCommand:
    """How a server is started: ``program``, the model, the port, then ``args``, with ``env``."""

    program: tuple[str, ...]
    model_flag: str
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        backend: Literal["sglang", "vllm"],
        program: Sequence[str] = (),
        *,
        gpus_per_server: int = 1,
        takes_broadcasts: bool = False,
    ) -> ServerCommand:
        """The backend's own program in this Python, or another that takes its arguments."""
        args: tuple[str, ...] = ()
        if backend == "sglang":
            own, model_flag, flag = "sglang.launch_server", "--model-path", "--tp-size"
            args = SGLANG_ARGS
        else:
            own, model_flag = "vllm.entrypoints.openai.api_server", "--model"
            flag = "--tensor-parallel-size"
            args = (*VLLM_ARGS, *(RECEIVER_ARGS if takes_broadcasts else ()))
        if gpus_per_server > 1:
            args = (*args, flag, str(gpus_per_server))
        program = tuple(program) or (sys.executable, "-m", own)
        env = {"VLLM_SERVER_DEV_MODE": "1"} if backend == "vllm" else {}
        return cls(program=program, model_flag=model_flag, args=args, env=env)

    def line(self, model: str, port: int, api_key: str | None) -> list[str]:
        line = [*self.program, self.model_flag, model, "--host", "127.0.0.1", "--port", str(port)]
        return [*line, *self.args, *(["--api-key", api_key] if api_key else [])]


class LaunchedServers:
    """
    Args:
        log_dir: gets ``server-{i}.log`` of each.
        envs: environment variables of each server, on top of the command's and this process's.
        grace_s: how long processes may take to end when they are asked to.
    """

    def __init__(
        self,
        command: ServerCommand,
        model: str,
        envs: Sequence[Mapping[str, str]],
        *,
        log_dir: Path,
        api_key: str | None = None,
        grace_s: float = 10.0,
    ) -> None:
        environments = [{**os.environ, **command.env, **env} for env in envs]
        for environment in environments:
            if shutil.which(command.program[0], path=environment.get("PATH")) is None:
                raise EngineError(f"cannot start {command.program[0]}: there is no such program")
        log_dir.mkdir(parents=True, exist_ok=True)
        self._grace_s = grace_s
        self._wardens: list[subprocess.Popen[bytes]] = []
        self._logs = [log_dir / f"server-{index}.log" for index in range(len(envs))]
        ports = _free_ports(len(envs))
        self.addresses = tuple(f"http://127.0.0.1:{port}" for port in ports)
        atexit.register(self.close)
        for environment, log, port in zip(environments, self._logs, ports, strict=True):
            warden_line = [sys.executable, "-I", str(_WARDEN), str(os.getpid()), str(grace_s)]
            with log.open("wb") as output:
                warden = subprocess.Popen(
                    [*warden_line, *command.line(model, port, api_key)],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    start_new_session=True,
                )
            self._wardens.append(warden)

    @property
    def pids(self) -> tuple[int, ...]:
        """Of the wardens: a server ends with its own."""
        return tuple(warden.pid for warden in self._wardens)

    def wait_ready(self, timeout_s: float | None) -> Self:
        """Until all answer ``/health``.

        Raises:
            EngineError: one ended or is too slow; with the last lines of its log. All are stopped.
        """
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        waiting = dict(zip(self.addresses, self._wardens, strict=True))
        while waiting:
            for address, warden in list(waiting.items()):
                is_healthy = _is_healthy(address)
                # First of all: another process may answer at the port of one that has ended.
                if warden.poll() is not None:
                    self._give_up(address, f"ended with code {warden.returncode}")
                elif is_healthy:
                    del waiting[address]
                elif deadline_s is not None and time.monotonic() > deadline_s:
                    self._give_up(address, f"was not ready after {timeout_s:g} s")
            if waiting:
                time.sleep(_POLL_S)
        return self

    def close(self) -> None:
        """Ask all to end, then make them. May be called twice."""
        atexit.unregister(self.close)
        for warden in self._wardens:
            warden.terminate()
        deadline_s = time.monotonic() + 2 * self._grace_s
        for warden in self._wardens:
            try:
                warden.wait(max(0.0, deadline_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                warden.kill()
                warden.wait()
            if warden.returncode < 0:  # it was killed, and left what it watched over
                with suppress(ProcessLookupError):
                    os.killpg(warden.pid, signal.SIGKILL)
        self._wardens = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _give_up(self, address: str, why: str) -> None:
        log = self._logs[self.addresses.index(address)]
        lines = log.read_text(errors="replace").splitlines()[-_SHOWN_LOG_LINES:]
        self.close()
        raise EngineError(f"the server {address} {why}; the end of {log}:\n" + "\n".join(lines))


def gpu_envs(num_servers: int, gpus_per_server: int, first_gpu: int) -> list[dict[str, str]]:
    """2 servers of 2 GPUs from GPU 4 on: CUDA_VISIBLE_DEVICES "4,5" and "6,7"."""
    if gpus_per_server == 0:
        return [{} for _ in range(num_servers)]
    starts = [first_gpu + index * gpus_per_server for index in range(num_servers)]
    return [
        {"CUDA_VISIBLE_DEVICES": ",".join(str(start + n) for n in range(gpus_per_server))}
        for start in starts
    ]


def _free_ports(count: int) -> list[int]:
    """Different ones, held together until all are known.

    Not those that the system gives to outgoing connections: a server binds its port minutes later.
    """
    with ExitStack() as held:
        ports: list[int] = []
        for port in random.SystemRandom().sample(_PORTS, len(_PORTS)):
            if len(ports) == count:
                return ports
            one = held.enter_context(socket.socket())
            try:
                one.bind(("127.0.0.1", port))
            except OSError:
                continue
            ports.append(port)
    raise EngineError(
        f"of the ports {_PORTS.start} to {_PORTS.stop - 1} fewer than {count} are free"
    )


def _is_healthy(address: str) -> bool:
    try:
        return httpx.get(f"{address}/health", timeout=10.0, trust_env=False).status_code == 200
    except httpx.TransportError:
        return False
