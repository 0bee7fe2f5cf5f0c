"""LaunchedServers: inference servers of this machine, started, waited for, and stopped again.

Each is a process group of its own that writes to its own log file. None outlives ``close`` or the
end of this interpreter. It knows command lines and ports, nothing of requests.
"""

from __future__ import annotations

import atexit
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

import httpx

from agent_rl.errors import EngineError

# The token endpoint, and log-probs at any temperature: see vllm.py.
VLLM_ARGS = ("--enable-scale-out", "--logprobs-mode", "processed_logprobs")

_POLL_S = 0.2
_STOP_GRACE_S = 10.0
_SHOWN_LOG_LINES = 15


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerCommand:
    """How a server is started: ``program``, the model, the port, then ``args``."""

    program: tuple[str, ...]
    model_flag: str
    args: tuple[str, ...] = ()

    @classmethod
    def of(cls, backend: Literal["sglang", "vllm"], program: Sequence[str] = ()) -> ServerCommand:
        """The backend's own program in this Python, or another that takes its arguments."""
        module = {"sglang": "sglang.launch_server", "vllm": "vllm.entrypoints.openai.api_server"}
        own = (sys.executable, "-m", module[backend])
        model_flag = {"sglang": "--model-path", "vllm": "--model"}[backend]
        args = VLLM_ARGS if backend == "vllm" else ()
        return cls(program=tuple(program) or own, model_flag=model_flag, args=args)

    def line(self, model: str, port: int, api_key: str | None) -> list[str]:
        line = [*self.program, self.model_flag, model, "--host", "127.0.0.1", "--port", str(port)]
        return [*line, *self.args, *(["--api-key", api_key] if api_key else [])]


class LaunchedServers:
    """
    Args:
        log_dir: gets ``server-{i}.log`` of each.
        envs: environment variables of each server, on top of this process's own.
    """

    def __init__(
        self,
        command: ServerCommand,
        model: str,
        envs: Sequence[Mapping[str, str]],
        *,
        log_dir: Path,
        api_key: str | None = None,
    ) -> None:
        log_dir.mkdir(parents=True, exist_ok=True)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._logs = [log_dir / f"server-{index}.log" for index in range(len(envs))]
        ports = _free_ports(len(envs))
        self.addresses = tuple(f"http://127.0.0.1:{port}" for port in ports)
        atexit.register(self.close)
        for env, log, port in zip(envs, self._logs, ports, strict=True):
            with log.open("wb") as output:
                try:
                    process = subprocess.Popen(
                        command.line(model, port, api_key),
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        env={**os.environ, **env},
                        start_new_session=True,
                    )
                except OSError as error:
                    self.close()
                    raise EngineError(f"cannot start {command.program[0]}: {error}") from error
            self._processes.append(process)

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(process.pid for process in self._processes)

    def wait_ready(self, timeout_s: float | None) -> Self:
        """Until all answer ``/health``.

        Raises:
            EngineError: one ended or is too slow; with the last lines of its log. All are stopped.
        """
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        waiting = dict(zip(self.addresses, self._processes, strict=True))
        while waiting:
            for address, process in list(waiting.items()):
                if _is_healthy(address):
                    del waiting[address]
                elif process.poll() is not None:
                    self._give_up(address, f"ended with code {process.returncode}")
                elif deadline_s is not None and time.monotonic() > deadline_s:
                    self._give_up(address, f"was not ready after {timeout_s:g} s")
            if waiting:
                time.sleep(_POLL_S)
        return self

    def close(self) -> None:
        """Ask all to end, then make them. May be called twice."""
        atexit.unregister(self.close)
        for process in self._processes:
            _signal(process, signal.SIGTERM)
        deadline_s = time.monotonic() + _STOP_GRACE_S
        for process in self._processes:
            while not _has_ended(process) and time.monotonic() < deadline_s:
                time.sleep(_POLL_S / 4)
            _signal(process, signal.SIGKILL)  # also what it left behind
            process.wait()
        self._processes = []

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
    """Different ones, held together until all are known."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()


def _is_healthy(address: str) -> bool:
    try:
        return httpx.get(f"{address}/health", timeout=10.0, trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Without reaping it: until then its id names its group and no other."""
    if process.returncode is not None:
        return True
    options = os.WEXITED | os.WNOHANG | os.WNOWAIT
    return os.waitid(os.P_PID, process.pid, options) is not None


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """To the server and its workers."""
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        return
