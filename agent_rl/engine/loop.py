"""EngineLoop: one event loop in a thread of its own, where all HTTP of an engine happens.

Connections, timers and counters then belong to one thread, whichever loops the engine is used
from: an agent's, the collector's, a second thread's. It knows nothing of what runs on it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from agent_rl.errors import EngineError

T = TypeVar("T")


class EngineLoop:
    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Its result, awaited on the caller's loop; cancelling the caller cancels the work."""
        return await asyncio.wrap_future(self._start(work))

    def run_blocking(self, work: Coroutine[Any, Any, T]) -> T:
        """The same for callers that are not coroutines. The work must have a timeout of its own."""
        return self._start(work).result()

    def close(self) -> None:
        """Cancel what still runs, end the thread. May be called twice."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()

    def _start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        if self._loop.is_closed():
            work.close()
            raise EngineError("the engine is closed")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            left = asyncio.all_tasks(self._loop)
            for task in left:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        finally:
            self._loop.close()
