"""Broadcaster: weights straight from the trainer's memory to servers, over a process group.

The trainer is rank 0 of a group made for this alone; each server has as many ranks as workers.
Tensors go in buckets (``buckets.py``), each announced by HTTP, so that memory for one bucket is
enough.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Coroutine, Sequence
from contextlib import aclosing
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed import distributed_c10d as c10d

from agent_rl.engine.base import NamedTensor, WeightUpdate
from agent_rl.engine.buckets import labelled_buckets
from agent_rl.engine.http import ServerConnection
from agent_rl.engine.server import Failures, Server
from agent_rl.engine.server_api import GroupMember, ServerApi, TensorSpec
from agent_rl.errors import AgentRLError

_BUCKET_BYTES = 512 << 20
# Rank 0 has given up: how long the servers may take to notice.
_GRACE_S = 30.0
_BACKENDS = {"cuda": "nccl", "cpu": "gloo"}


class Broadcaster:
    """Keeps the group while the servers are the same. To be used on the engine's event loop.

    Args:
        address: of this machine, as the servers reach it.
        timeout_s: of making the group and of each bucket.
    """

    def __init__(
        self,
        api: ServerApi,
        *,
        address: str = "127.0.0.1",
        timeout_s: float = 600.0,
        bucket_bytes: int = _BUCKET_BYTES,
    ) -> None:
        self._api = api
        self._address = address
        self._timeout_s = timeout_s
        self._bucket_bytes = bucket_bytes
        self._members: tuple[Server, ...] = ()
        self._name = ""
        self._group: distributed.ProcessGroup | None = None

    async def send(
        self, servers: Sequence[Server], update: WeightUpdate, *, keeps_cache: bool
    ) -> Failures:
        """Servers that failed, and why; with any, the others have only a part of the weights."""
        failures = await self._gather(servers)
        if not failures:
            failures = await self._on_all(self._api.begin_receiving)
        if not failures:
            failures = await self._send_buckets(update, keeps_cache)
        if not failures:
            failures = await self._on_all(self._api.end_receiving)
        if failures:
            await self.close()
        return failures

    async def close(self) -> None:
        """Leave the group; what still waits in it fails. May be called twice."""
        members, name = self._members, self._name
        self._members, self._group = (), None  # with the last reference its sockets are closed
        for server in members:
            if server.is_up:
                await _quietly(self._api.leave_group(server.connection, name))

    async def _on_all(
        self, call: Callable[[ServerConnection], Coroutine[Any, Any, None]]
    ) -> Failures:
        calls = [call(server.connection) for server in self._members]
        _, failures = await self._together(_nothing(), calls)
        return failures

    async def _gather(self, servers: Sequence[Server]) -> Failures:
        """One group of this process and all workers of these servers."""
        if self._group is not None and self._members == tuple(servers):
            return {}
        await self.close()
        counts, failures = [], {}
        for server in servers:
            try:
                counts.append(await self._api.num_workers(server.connection))
            except AgentRLError as error:
                failures[server] = str(error)
        if failures:
            return failures
        name, backend = f"weights-{uuid.uuid4().hex[:8]}", _BACKENDS[_device()]
        store = distributed.TCPStore(  # type: ignore[attr-defined]
            self._address, 0, 1 + sum(counts), is_master=True, wait_for_workers=False
        )
        calls: list[Coroutine[Any, Any, None]] = []
        for index, server in enumerate(servers):
            member = GroupMember(
                address=self._address,
                port=store.port,
                rank=1 + sum(counts[:index]),
                world_size=1 + sum(counts),
                group=name,
                backend=backend,
            )
            calls.append(self._api.join_group(server.connection, member))
        ours = asyncio.to_thread(
            join_group,
            store,
            rank=0,
            world_size=1 + sum(counts),
            name=name,
            backend=backend,
            timeout_s=self._timeout_s,
        )
        self._members, self._name = tuple(servers), name
        self._group, failures = await self._together(ours, calls)
        return failures

    async def _send_buckets(self, update: WeightUpdate, keeps_cache: bool) -> Failures:
        async with aclosing(labelled_buckets(update, self._bucket_bytes)) as buckets:
            async for bucket, label in buckets:
                failures = await self._send_bucket(bucket, label, keeps_cache)
                if failures:
                    return failures
        return {}

    async def _send_bucket(
        self, bucket: list[NamedTensor], label: str | None, keeps_cache: bool
    ) -> Failures:
        group = self._group
        assert group is not None, "made before the first bucket"
        specs = [
            TensorSpec(name=name, dtype=str(tensor.dtype)[6:], shape=tuple(tensor.shape))
            for name, tensor in bucket
        ]
        calls = [
            self._api.receive(server.connection, self._name, specs, label, keeps_cache=keeps_cache)
            for server in self._members
        ]
        ours = asyncio.to_thread(_broadcast, group, [tensor for _, tensor in bucket])
        _, failures = await self._together(ours, calls)
        return failures

    async def _together(
        self, ours: Coroutine[Any, Any, Any], calls: Sequence[Coroutine[Any, Any, None]]
    ) -> tuple[Any, Failures]:
        """Our part and the servers' parts at once. When one fails, the others wait in vain."""
        local = asyncio.ensure_future(ours)
        remote = [asyncio.ensure_future(call) for call in calls]
        everyone = [local, *remote]
        _, waiting = await asyncio.wait(
            everyone, timeout=self._timeout_s, return_when=asyncio.FIRST_EXCEPTION
        )
        if waiting:
            self._group = None
            _, waiting = await asyncio.wait(waiting, timeout=_GRACE_S)
            for call in waiting:
                call.cancel()
            await asyncio.wait(everyone)
        failures = {
            server: "no end of its part of the weights"
            if call.cancelled()
            else str(call.exception())
            for server, call in zip(self._members, remote, strict=True)
            if call.cancelled() or call.exception() is not None
        }
        if failures:
            return None, failures
        error = local.exception()
        if error is not None:  # then everybody has a part of the weights only
            return None, dict.fromkeys(self._members, f"the trainer's part failed: {error}")
        return local.result(), {}


def join_group(
    store: c10d.Store,
    *,
    rank: int,
    world_size: int,
    name: str,
    backend: str,
    timeout_s: float,
) -> distributed.ProcessGroup:
    """A group beside the default one, as SGLang joins it: the keys in the store must agree.

    ``new_group`` cannot do this: it makes groups of processes that share a default group.
    """
    group: distributed.ProcessGroup
    group, _ = c10d._new_process_group_helper(
        world_size,
        rank,
        [],
        distributed.Backend(backend),
        c10d.PrefixStore(name, store),
        group_name=c10d.GroupName(name),
        timeout=timedelta(seconds=timeout_s),
    )
    return group


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _broadcast(group: distributed.ProcessGroup, tensors: Sequence[Tensor]) -> None:
    values = [tensor.detach().to(_device()).contiguous() for tensor in tensors]
    works = [group.broadcast(value, 0) for value in values]
    for work in works:
        work.wait()


async def _nothing() -> None:
    """Our part of a call that only servers take part in."""


async def _quietly(work: Coroutine[Any, Any, None]) -> None:
    try:
        async with asyncio.timeout(_GRACE_S):
            await work
    except (AgentRLError, TimeoutError):
        return
