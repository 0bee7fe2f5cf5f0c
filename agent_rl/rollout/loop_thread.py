"""LoopThread: the event loop on which all episodes run, in a thread of its own.

It outlives whatever agents throw: SystemExit from a stray task is logged and the loop goes on.
KeyboardInterrupt, or a fault of the loop itself, ends it; ``cause`` then says why.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from agent_rl.errors import CollectorError

T = TypeVar("T")
logger = logging.getLogger(__name__)

_POLL_S = 0.2
_CANCEL_GRACE_S = 2.0
_JOIN_TIMEOUT_S = 5.0


class LoopThread:
    def __init__(
        self,
        name: str,
        *,
        on_death: Callable[[], None],
        at_end: Callable[[], Coroutine[Any, Any, None]] | None = None,
    ) -> None:
        """
        Args:
            on_death: called in the thread when it ends without having been closed.
            at_end: run on the loop after all tasks were cancelled.
        """
        self.cause: BaseException | None = None
        self._at_end = at_end
        self._on_death = on_death
        self._is_closing = False
        self._is_serving = True
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive() and not self._loop.is_closed()

    @property
    def is_current(self) -> bool:
        return threading.current_thread() is self._thread

    def post(self, function: Callable[[], None]) -> None:
        """Run the function in the loop's thread soon; nothing happens once the loop has ended.

        What it raises is a fault of ours and ends the thread.
        """

        def guarded() -> None:
            try:
                function()
            except BaseException as error:  # the thread's edge: the next call raises it
                self.cause = error
                self._stop_serving()

        try:
            self._loop.call_soon_threadsafe(guarded)
        except RuntimeError:  # the loop closed between the caller's check and here
            logger.debug("dropped a call to the ended collector loop")

    def call(self, coroutine: Coroutine[Any, Any, T], *, timeout_s: float) -> T:
        """Run the coroutine in the loop and wait for it from another thread.

        Raises:
            CollectorError: the loop has ended, or the caller is the loop's own thread.
            TimeoutError: no result within ``timeout_s``; the coroutine is cancelled.
        """
        if self.is_current or not self.is_alive:
            coroutine.close()
            where = "from a coroutine of the collector" if self.is_current else "after it ended"
            raise CollectorError(f"a blocking call was made {where}") from self.cause
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        waited_s = 0.0
        while waited_s < timeout_s:
            try:
                return future.result(timeout=min(_POLL_S, timeout_s - waited_s))
            except concurrent.futures.CancelledError:
                raise CollectorError("the collector was closed during the call") from self.cause
            except concurrent.futures.TimeoutError:
                if future.done():
                    raise  # the coroutine's own TimeoutError
                if not self.is_alive:
                    raise CollectorError("the collector's thread ended") from self.cause
                waited_s += _POLL_S
        future.cancel()
        raise TimeoutError(f"no answer within {timeout_s:g} s")

    def close(self) -> None:
        """Cancel all tasks, stop the loop, join the thread; gives up on what ignores both."""
        if self.is_current:
            raise CollectorError("close() was called from a coroutine of the collector")
        self._is_closing = True
        self.post(self._stop_serving)
        self._thread.join(_JOIN_TIMEOUT_S)
        if self._thread.is_alive():
            logger.warning(
                "an agent blocks the event loop, so its thread is left behind; blocking calls "
                "belong into a worker thread (asyncio.to_thread)"
            )

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._serve()
        except BaseException as error:  # as above
            self.cause = error
        self._is_serving = False
        try:
            self._cancel_tasks()
        finally:
            self._loop.close()
            if not self._is_closing:
                self._on_death()

    def _serve(self) -> None:
        while not self._is_closing and self.cause is None:
            try:
                self._loop.run_forever()
            except SystemExit as error:
                logger.warning("an agent's background task raised SystemExit(%s)", error.code)

    def _stop_serving(self) -> None:
        """Not while tasks are being cancelled: that needs the loop, and ends by itself."""
        if self._is_serving:
            self._loop.stop()

    def _cancel_tasks(self) -> None:
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        if tasks:
            self._loop.run_until_complete(asyncio.wait(tasks, timeout=_CANCEL_GRACE_S))
        if self._at_end is not None:
            self._loop.run_until_complete(self._at_end())
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
