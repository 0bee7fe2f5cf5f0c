"""ServerCommand: the command line and environment with which an inference server is started.

Everybody on a machine sees command lines, so a key is never in one: vLLM reads it from a variable,
SGLang from a file of options. It starts nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from agent_rl.engine.sglang import SGLANG_ARGS
from agent_rl.engine.vllm import RECEIVER_ARGS, VLLM_ARGS
from agent_rl.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerCommand:
    """``program``, the model, the port, then ``args``, with ``env``.

    ``key_variable``: in which it looks for its key; None: it reads one from a file (``--config``).
    """

    program: tuple[str, ...]
    model_flag: str
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    key_variable: str | None = None

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
        return cls(
            program=tuple(program) or (sys.executable, "-m", own),
            model_flag=model_flag,
            args=args,
            env={"VLLM_SERVER_DEV_MODE": "1"} if backend == "vllm" else {},
            key_variable="VLLM_API_KEY" if backend == "vllm" else None,
        )

    def line(self, model: str, port: int, key_file: Path | None = None) -> list[str]:
        """
        Raises:
            ConfigError: there is a file of options already, and the server reads one only.
        """
        line = [*self.program, self.model_flag, model, "--host", "127.0.0.1", "--port", str(port)]
        if key_file is None:
            return [*line, *self.args]
        if any(arg.partition("=")[0] == "--config" for arg in self.args):
            raise ConfigError(
                "engine.launch.args has --config, and engine.api_key needs it: SGLang reads one "
                "such file; write its options into engine.launch.args, each with its own flag"
            )
        return [*line, *self.args, "--config", str(key_file)]
