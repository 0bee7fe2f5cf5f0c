"""Mailbox: hands results from the decode thread to the event loop that waits for them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from agent_rl.engine.base import StreamItem
from agent_rl.errors import AgentRLError


class Mailbox:
    """Made on the waiting loop; ``put`` may be called from any thread."""

    def __init__(self, *, wants_deltas: bool) -> None:
        self.wants_deltas = wants_deltas
        self._loop = asyncio.get_running_loop()
        self._items: asyncio.Queue[StreamItem | AgentRLError] = asyncio.Queue()

    def put(self, item: StreamItem | AgentRLError) -> None:
        call_on(self._loop, lambda: self._items.put_nowait(item))

    async def get(self) -> StreamItem:
        item = await self._items.get()
        if isinstance(item, AgentRLError):
            raise item
        return item


def call_on(loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
    """Run it on that event loop; on a closed one nobody waits any more."""
    try:
        loop.call_soon_threadsafe(callback)
    except RuntimeError:
        return
