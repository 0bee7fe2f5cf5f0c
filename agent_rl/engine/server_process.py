"""ServerProcess: one inference server of this machine, as a process that can be started again.

It runs under a warden of its own (``warden.py``), always at the same port, and writes to one log
file. That file is this user's alone, because servers write their options there, keys among them;
so is the file in which a key may be on its way. It knows neither requests nor other servers.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import httpx

from agent_rl.engine.command import ServerCommand

_WARDEN = Path(__file__).with_name("warden.py")
_SHOWN_LOG_LINES = 15
_SHOWN_LOG_BYTES = 1 << 16
_HEALTH_TIMEOUT_S = 10.0


class ServerProcess:
    """Started by ``start``, not by being made.

    Args:
        env: all its environment variables.
        log: emptied now, and added to by each start.
        grace_s: how long it may take to end when it is asked to.
    """

    def __init__(
        self,
        command: ServerCommand,
        model: str,
        port: int,
        *,
        env: Mapping[str, str],
        log: Path,
        api_key: str | None,
        grace_s: float,
    ) -> None:
        self.address = f"http://127.0.0.1:{port}"
        self.log = log
        self._api_key = api_key
        self._grace_s = grace_s
        self._env = dict(env)
        self._key_file: Path | None = None
        if api_key is not None and command.key_variable is not None:
            self._env[command.key_variable] = api_key
        elif api_key is not None:
            self._key_file = log.with_suffix(".key.yaml")
        self._line = command.line(model, port, self._key_file)
        self._log_start = 0
        self._warden: subprocess.Popen[bytes] | None = None
        self._may_remain = False
        _write_private(log, "")

    @property
    def pid(self) -> int:
        """Of the warden: the server ends with it."""
        assert self._warden is not None, "it was started"
        return self._warden.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return None if self._warden is None else self._warden.poll()

    def start(self) -> None:
        """For the first time, or when it has ended."""
        self._kill_remains()
        if self._key_file is not None:
            _write_private(self._key_file, f"api-key: {json.dumps(self._api_key)}\n")
        warden_line = [sys.executable, "-I", str(_WARDEN), str(os.getpid()), str(self._grace_s)]
        with open(self.log, "ab", opener=_open_private) as output:
            self._log_start = output.tell()
            self._warden = subprocess.Popen(
                [*warden_line, *self._line],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self._env,
                start_new_session=True,
            )
        self._may_remain = True

    def is_ready(self) -> bool:
        """It answers, and is not another process at the port of one that has ended."""
        try:
            answer = httpx.get(f"{self.address}/health", timeout=_HEALTH_TIMEOUT_S, trust_env=False)
        except httpx.TransportError:
            return False
        if answer.status_code != 200 or self.exit_code is not None:
            return False
        self._remove_key()  # it was read
        return True

    def last_words(self) -> str:
        """The last lines that it wrote since its start, without its key."""
        try:
            with self.log.open("rb") as file:
                end = file.seek(0, os.SEEK_END)
                file.seek(max(self._log_start, end - _SHOWN_LOG_BYTES))
                text = file.read().decode(errors="replace")
        except OSError as error:
            return f"its log cannot be read: {error}"
        if self._api_key is not None:
            text = text.replace(self._api_key, "***")
        lines = "\n".join(text.splitlines()[-_SHOWN_LOG_LINES:])
        return f"the end of {self.log}:\n{lines}"

    def ask_to_end(self) -> None:
        if self._warden is not None:
            self._warden.terminate()

    def wait_ended(self) -> None:
        """Once it was asked to; it is made to when that takes too long."""
        if self._warden is not None:
            try:
                self._warden.wait(2 * self._grace_s)
            except subprocess.TimeoutExpired:
                self._warden.kill()
                self._warden.wait()
        self._kill_remains()
        self._remove_key()

    def _kill_remains(self) -> None:
        """A warden that was killed has left what it watched over."""
        if self._may_remain and self._warden is not None and (self._warden.returncode or 0) < 0:
            self._may_remain = False
            with suppress(ProcessLookupError):
                os.killpg(self._warden.pid, signal.SIGKILL)

    def _remove_key(self) -> None:
        if self._key_file is not None:
            self._key_file.unlink(missing_ok=True)


def _write_private(path: Path, text: str) -> None:
    """A new file, which nobody but this user can read."""
    path.unlink(missing_ok=True)
    with open(path, "x", opener=_open_private) as file:
        file.write(text)


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
