"""The engine that a config asks for, where that is a server."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from agent_rl.config import EngineConfig
from agent_rl.engine.command import ServerCommand
from agent_rl.engine.launch import LaunchedServers, gpu_envs
from agent_rl.engine.remote import RemoteEngine
from agent_rl.engine.sglang import SGLang
from agent_rl.engine.vllm import VLLM
from agent_rl.errors import ConfigError


def connect_engine(config: EngineConfig, model: str, log_dir: Path) -> RemoteEngine:
    """An engine over the servers of ``engine.addresses``, or over new ones that serve ``model``.

    Raises:
        EngineError: no server answers, or one cannot be started.
    """
    if config.backend == "local":
        raise ConfigError("engine.backend is local; sglang and vllm have servers")
    api = SGLang() if config.backend == "sglang" else VLLM()
    launched = None if config.launch is None else _launch(config, model, log_dir)
    try:
        return RemoteEngine(
            api,
            config.addresses if launched is None else launched.addresses,
            api_key=config.api_key,
            routing=config.routing,
            on_update=config.on_update,
            max_in_flight=config.max_in_flight,
            timeout_s=config.timeout_s,
            control_timeout_s=config.update_timeout_s,
            unavailable_timeout_s=config.unavailable_timeout_s,
            trainer_address=config.trainer_address,
            launched=launched,
        )
    except BaseException:
        if launched is not None:
            launched.close()
        raise


def _launch(config: EngineConfig, model: str, log_dir: Path) -> LaunchedServers:
    launch = config.launch
    assert launch is not None and config.backend != "local", "asked for by the caller"
    command = ServerCommand.of(
        config.backend,
        launch.command,
        gpus_per_server=launch.gpus_per_server,
        takes_broadcasts=config.update == "distributed",
    )
    gpus = gpu_envs(launch.num_servers, launch.gpus_per_server, launch.first_gpu)
    servers = LaunchedServers(
        replace(command, args=(*command.args, *launch.args)),
        model,
        [{**env, **launch.env} for env in gpus],
        log_dir=log_dir,
        api_key=config.api_key,
        max_restarts=launch.max_restarts,
        ready_timeout_s=launch.ready_timeout_s,
    )
    return servers.wait_ready()
