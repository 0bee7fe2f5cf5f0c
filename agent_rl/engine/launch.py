"""LaunchedServers: inference servers of this machine, started, waited for, and stopped again.

Neither they nor their workers outlive ``close`` or the end of this process, whatever ends it. It
decides neither when one that has ended is started again nor what is asked of it.
"""

from __future__ import annotations

import atexit
import os
import random
import shutil
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NoReturn, Self

from agent_rl.engine.command import ServerCommand
from agent_rl.engine.server_process import ServerProcess
from agent_rl.errors import EngineError

_PORTS = range(20_000, 30_000)
_POLL_S = 0.2


class LaunchedServers:
    """
    Args:
        log_dir: gets ``server-{i}.log`` of each.
        envs: environment variables of each server, on top of the command's and this process's.
        max_restarts: how often one that ends is to be started again in succession.
        ready_timeout_s: how long one may take to start; None: as long as it likes.
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
        max_restarts: int = 5,
        ready_timeout_s: float | None = 900.0,
        grace_s: float = 10.0,
    ) -> None:
        environments = [{**os.environ, **command.env, **env} for env in envs]
        for environment in environments:
            if shutil.which(command.program[0], path=environment.get("PATH")) is None:
                raise EngineError(f"cannot start {command.program[0]}: there is no such program")
        log_dir.mkdir(parents=True, exist_ok=True)
        self.max_restarts = max_restarts
        self.ready_timeout_s = ready_timeout_s
        self._lock = threading.Lock()
        self._is_closed = False
        processes = [
            ServerProcess(
                command,
                model,
                port,
                env=environment,
                log=log_dir / f"server-{index}.log",
                api_key=api_key,
                grace_s=grace_s,
            )
            for index, (environment, port) in enumerate(
                zip(environments, _free_ports(len(envs)), strict=True)
            )
        ]
        self._processes = {process.address: process for process in processes}
        atexit.register(self.close)
        for process in processes:
            process.start()

    @property
    def addresses(self) -> tuple[str, ...]:
        return tuple(self._processes)

    @property
    def pids(self) -> tuple[int, ...]:
        """Of the wardens: a server ends with its own."""
        return tuple(process.pid for process in self._processes.values())

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    def process(self, address: str) -> ServerProcess:
        return self._processes[address]

    def start_again(self, address: str) -> None:
        """One that has ended; nothing is started after ``close``."""
        with self._lock:
            if not self._is_closed:
                self._processes[address].start()

    def wait_ready(self) -> Self:
        """Until all answer.

        Raises:
            EngineError: one ended or is too slow; with the last lines of its log. All are stopped.
        """
        limit_s = self.ready_timeout_s
        deadline_s = None if limit_s is None else time.monotonic() + limit_s
        waiting = list(self._processes.values())
        while waiting := [process for process in waiting if not process.is_ready()]:
            for process in waiting:
                if process.exit_code is not None:
                    self._give_up(process, f"ended with code {process.exit_code}")
                if deadline_s is not None and time.monotonic() > deadline_s:
                    self._give_up(process, f"was not ready after {limit_s:g} s")
            time.sleep(_POLL_S)
        return self

    def close(self) -> None:
        """Ask all to end, then make them. May be called twice."""
        atexit.unregister(self.close)
        with self._lock:
            self._is_closed = True
        for process in self._processes.values():
            process.ask_to_end()
        for process in self._processes.values():
            process.wait_ended()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _give_up(self, process: ServerProcess, why: str) -> NoReturn:
        self.close()
        raise EngineError(f"the server {process.address} {why}; {process.last_words()}")


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
