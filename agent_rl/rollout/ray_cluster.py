"""The Ray of this process: which cluster it belongs to, and how it gets there.

Ray is of the process: the first pool connects it, all others find it connected, and nobody ends it.
An address is honoured or refused: a process that belongs to one cluster does not use another one.
"""

from __future__ import annotations

import os
import socket
import threading
from typing import Any

from agent_rl.config import RayConfig
from agent_rl.errors import AgentHostError, MissingDependencyError
from agent_rl.loop_thread import LoopThread

_REACH_TIMEOUT_S = 10.0
_opening = threading.Lock()
_thread: LoopThread | None = None
_joined: tuple[str, str] | None = None
"""The cluster that a pool has let this process join, and the address with which it did."""


def ray_thread() -> LoopThread:
    """Where all pools connect and create actors, one after the other.

    It never ends: the kernel kills the servers that Ray starts when the thread that started them
    ends, as those do that ``asyncio.to_thread`` uses, with their event loop.
    """
    global _thread
    with _opening:
        if _thread is None:
            _thread = LoopThread("ray")
        return _thread


def require_ray() -> Any:
    """
    Raises:
        MissingDependencyError: Ray is not installed.
    """
    # Ray asks home for usage statistics unless told not to, before it is imported.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError as error:
        raise MissingDependencyError(
            "rollout.agent.mode=ray needs Ray; run: pip install ray"
        ) from error
    return ray


def connect(config: RayConfig) -> None:
    """Let this process belong to the cluster of ``config.address``. Blocks until it does.

    Raises:
        AgentHostError: there is none, it is too slow, or the process belongs to another one.
    """
    try:
        ray_thread().call(connected(config), timeout_s=config.connect_timeout_s)
    except TimeoutError as error:
        raise AgentHostError(
            f"rollout.agent.ray.address={config.address}: Ray was not ready after "
            f"rollout.agent.ray.connect_timeout_s={config.connect_timeout_s:g} s"
        ) from error


async def connected(config: RayConfig) -> None:
    """The same, on ``ray_thread``."""
    global _joined
    ray = require_ray()
    if ray.is_initialized():
        _check_cluster(ray, config.address)
        return
    if config.address is not None:
        _reach(config.address, min(_REACH_TIMEOUT_S, config.connect_timeout_s))
    try:
        ray.init(address=config.address, include_dashboard=False)
    except (ConnectionError, RuntimeError, ValueError) as error:  # what ray.init raises itself
        why = first_line(error)
        raise AgentHostError(f"rollout.agent.ray.address={config.address}: {why}") from error
    if config.address is not None:
        _joined = ray.get_runtime_context().gcs_address, config.address


def first_line(error: Exception) -> str:
    """What Ray says below it is in the traceback."""
    return str(error).partition("\n")[0]


def _check_cluster(ray: Any, address: str | None) -> None:
    """``auto`` is any cluster, and null is the one that there is."""
    if address in (None, "auto"):
        return
    present = ray.get_runtime_context().gcs_address
    if _joined != (present, address) and not _is_same(
        present, address, ray.util.get_node_ip_address()
    ):
        raise AgentHostError(
            f"rollout.agent.ray.address={address}, but this process belongs to the Ray cluster at "
            f"{present}: set that address or null, or do not call ray.init before"
        )


def _is_same(present: str, wanted: str, own_ip: str) -> bool:
    """10.0.0.5:6379 is also head:6379, where the name means that, and localhost:6379 there."""
    present_host, _, present_port = present.rpartition(":")
    host, _, port = wanted.rpartition(":")
    ips = _ips(host)
    if any(ip.startswith("127.") for ip in ips):
        ips = ips | {own_ip}
    return port == present_port and bool(ips & (_ips(present_host) | {present_host}))


def _ips(host: str) -> set[str]:
    try:
        return {str(info[4][0]) for info in socket.getaddrinfo(host, None)}
    except OSError:
        return set()


def _reach(address: str, timeout_s: float) -> None:
    """Ray itself tries for minutes to reach a cluster that is not there."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not port.isdecimal():
        return  # auto, or what Ray refuses at once
    try:
        socket.create_connection((host, int(port)), timeout=timeout_s).close()
    except OSError as error:
        raise AgentHostError(
            f"rollout.agent.ray.address={address}: no Ray cluster can be reached there ({error}); "
            "check the address, and that the cluster runs"
        ) from error
