"""SharedMemorySender: weights to servers on this machine, through memory that both of them map.

One buffer of this machine's memory is filled with bucket after bucket (``buckets.py``); servers get
its name by HTTP and copy what is in it. It is freed with the update, however that ends. Only names
are pickled here, and nothing is unpickled.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing, closing
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing import reductions

from agent_rl.engine.base import NamedTensor, WeightUpdate
from agent_rl.engine.buckets import labelled_buckets
from agent_rl.engine.server import Failures, Server, on_all
from agent_rl.engine.server_api import SharedMemoryApi
from agent_rl.errors import EngineError

_BUCKET_BYTES = 256 << 20
_FOLDER = "/dev/shm"
_ALIGNMENT = 16


class SharedMemorySender:
    """To be used on the engine's event loop.

    Args:
        timeout_s: of each bucket.
    """

    def __init__(
        self, api: SharedMemoryApi, *, timeout_s: float = 600.0, bucket_bytes: int = _BUCKET_BYTES
    ) -> None:
        self._api = api
        self._timeout_s = timeout_s
        self._bucket_bytes = bucket_bytes

    async def send(
        self, servers: Sequence[Server], update: WeightUpdate, *, keeps_cache: bool
    ) -> Failures:
        """Servers that failed, and why; with any, the others have only a part of the weights."""
        num_workers: dict[Server, int] = {}

        async def begin(server: Server) -> None:
            num_workers[server] = await self._api.num_workers(server.connection)
            await self._api.begin_receiving(server.connection)

        async def end(server: Server) -> None:
            await self._api.end_receiving(server.connection)

        failures = await on_all(servers, begin, timeout_s=self._timeout_s)
        if not failures:
            failures = await self._send_buckets(num_workers, update, keeps_cache)
        return failures or await on_all(servers, end, timeout_s=self._timeout_s)

    async def _send_buckets(
        self, num_workers: Mapping[Server, int], update: WeightUpdate, keeps_cache: bool
    ) -> Failures:
        buckets = labelled_buckets(update, self._bucket_bytes)
        with closing(SharedBuffer()) as buffer:
            async with aclosing(buckets):
                async for bucket, label in buckets:
                    places = await asyncio.to_thread(buffer.fill, bucket)
                    take = partial(
                        self._take,
                        handle=buffer.handle(places, num_readers=sum(num_workers.values())),
                        num_workers=num_workers,
                        label=label,
                        keeps_cache=keeps_cache,
                    )
                    failures = await on_all(num_workers, take, timeout_s=self._timeout_s)
                    if failures:
                        return failures
        return {}

    async def close(self) -> None:
        """Nothing is kept between updates."""

    async def _take(
        self,
        server: Server,
        *,
        handle: bytes,
        num_workers: Mapping[Server, int],
        label: str | None,
        keeps_cache: bool,
    ) -> None:
        await self._api.receive_shared(
            server.connection, [handle] * num_workers[server], label, keeps_cache=keeps_cache
        )


class SharedBuffer:
    """Memory that other processes of this user map by name; freed when it is closed and nobody has
    it any more."""

    def __init__(self) -> None:
        self._flat_N = torch.empty(0, dtype=torch.uint8)
        self._name: tuple[Any, ...] = ()

    def close(self) -> None:
        """Take its name away. May be called twice.

        Those who were to read it and never did are counted as having it: they would keep it for as
        long as this process lives. One more is counted, so that the last does not do this again.
        """
        if not self._name:
            return
        self._flat_N.untyped_storage()._shared_incref()  # type: ignore[no-untyped-call]
        _, name, _ = self._name
        Path(_FOLDER, name.decode().lstrip("/")).unlink(missing_ok=True)
        self._flat_N, self._name = torch.empty(0, dtype=torch.uint8), ()

    def fill(self, bucket: Sequence[NamedTensor]) -> list[SimpleNamespace]:
        """Put the tensors in, one after another, each where its type may begin. Returns name, type,
        shape and place of each, as SGLang reads them.

        Raises:
            EngineError: there is not so much shared memory.
        """
        places, start = [], 0
        for name, tensor in bucket:
            end = start + tensor.nbytes
            form = {"name": name, "dtype": tensor.dtype, "shape": tensor.shape}
            places.append(
                SimpleNamespace(**form, start_idx=start, end_idx=end, numel=tensor.nbytes)
            )
            start = -(-end // _ALIGNMENT) * _ALIGNMENT
        if end > len(self._flat_N):
            self.close()
            self._flat_N = _allocate(end)
            self._name = _share(self._flat_N.untyped_storage())
        for place, (_, tensor) in zip(places, bucket, strict=True):
            plain = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
            self._flat_N[place.start_idx : place.end_idx] = plain
        return places

    def handle(self, places: Sequence[SimpleNamespace], *, num_readers: int) -> bytes:
        """The pickle with which each of so many processes gets at what was put in.

        By name: with a file descriptor, as ``multiprocessing`` would do it, they would need a
        secret of this process.
        """
        for _ in range(num_readers):  # each gives one back
            self._flat_N.untyped_storage()._shared_incref()  # type: ignore[no-untyped-call]
        storage = _Call(reductions.rebuild_storage_filename, torch.UntypedStorage, *self._name)
        typed = _Call(reductions.rebuild_typed_storage, storage, torch.uint8)
        form = (0, self._flat_N.shape, (1,), False)
        flat = _Call(reductions.rebuild_tensor, torch.Tensor, typed, form)
        return pickle.dumps({"flattened_tensor": flat, "metadata": list(places)})


def _allocate(size_bytes: int) -> Tensor:
    """Memory beyond what the machine gives would not fail here, but kill whoever writes there."""
    free_bytes = shutil.disk_usage(_FOLDER).free if Path(_FOLDER).is_dir() else 0
    if size_bytes > free_bytes:
        raise EngineError(
            f"{_FOLDER} has {free_bytes} bytes left, and a bucket of weights needs {size_bytes}; "
            "make it larger, or set engine.update to disk"
        )
    return torch.empty(size_bytes, dtype=torch.uint8)


def _share(storage: torch.UntypedStorage) -> tuple[Any, ...]:
    """Move it there; returns what ``rebuild_storage_filename`` finds it by.

    The first call starts a process that counts who has which memory, and may live as long as a
    server: if that had our stderr, whoever reads it to the end would wait as long.
    """
    os.set_inheritable(2, False)
    try:
        return tuple(storage._share_filename_cpu_())
    finally:
        os.set_inheritable(2, True)


class _Call:
    """Is pickled as a call: whoever unpickles it gets the result."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._made_by = function, arguments

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self._made_by
