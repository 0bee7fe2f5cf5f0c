"""The tensors of an update in pieces that fit into memory, with its label beside the last.

A server calls its weights by the label it got: half of an update never carries the new one. It
knows no way on which tensors travel.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Iterator

from agent_rl.engine.base import NamedTensor, WeightUpdate


async def labelled_buckets(
    update: WeightUpdate, max_bytes: int
) -> AsyncGenerator[tuple[list[NamedTensor], str | None], None]:
    """Each bucket, with the update's label beside the last and None beside the others.

    The weights are read one bucket ahead, in a thread: that may copy them from a GPU, or collect
    them from other processes.
    """
    assert update.tensors is not None, "checked before"
    buckets = in_buckets(await asyncio.to_thread(update.tensors), max_bytes)
    bucket = await asyncio.to_thread(next, buckets, None)
    assert bucket is not None, "a model has parameters"
    while bucket is not None:
        following = await asyncio.to_thread(next, buckets, None)
        yield bucket, None if following is not None else str(update.version)
        bucket = following


def in_buckets(tensors: Iterable[NamedTensor], max_bytes: int) -> Iterator[list[NamedTensor]]:
    """Neighbours together, up to ``max_bytes``: 3, 4 and 9 bytes in buckets of 8 -> [3, 4], [9]."""
    bucket: list[NamedTensor] = []
    size_bytes = 0
    for name, tensor in tensors:
        if bucket and size_bytes + tensor.nbytes > max_bytes:
            yield bucket
            bucket, size_bytes = [], 0
        bucket.append((name, tensor))
        size_bytes += tensor.nbytes
    if bucket:
        yield bucket
