"""LoopThread: one event loop in a daemon thread of its own, used from any other thread.

It owns the tasks on its loop: those that still run at its end are cancelled, and whoever waits for
one then gets an error. It outlives what tasks throw: SystemExit is logged and the loop goes on.
KeyboardInterrupt, or a fault of the loop itself, ends it; ``cause`` then says why. It knows nothing
of what runs on it.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")
logger = logging.getLogger(__name__)

_CANCEL_GRACE_S = 2.0
_JOIN_TIMEOUT_S = 5.0


class LoopThread:
    """Starts with the object and ends with ``close``.

        thread = LoopThread("gateway")
        thread.call(gateway.start())
        thread.close()

    Args:
        name: of what runs on it, for messages and the thread's name.
        error: raised by calls that come after the end, or that would wait for themselves.
        on_death: called in the thread when it ends without having been closed.
        at_end: run on the loop after all tasks were cancelled.
    """

    def __init__(
        self,
        name: str,
        *,
        error: type[RuntimeError] = RuntimeError,
        on_death: Callable[[], None] | None = None,
        at_end: Callable[[], Coroutine[Any, Any, None]] | None = None,
    ) -> None:
        self.cause: BaseException | None = None
        self._name = name
        self._error = error
        self._on_death = on_death
        self._at_end = at_end
        self._lock = threading.Lock()  # between what is handed over and the end
        self._is_closing = False
        self._has_ended = False
        self._waited_for: set[Future[Any]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=f"agent-rl-{name}", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return not self._has_ended

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
            except BaseException as error:  # the thread's edge: ``cause`` tells its owner
                self.cause = error
                self._stop_serving()

        with self._lock:
            if not self._has_ended:
                self._loop.call_soon_threadsafe(guarded)

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run the coroutine in the loop; to cancel the future is to cancel the coroutine.

        It sees the caller's contextvars. At the loop's end the future is cancelled.
        """
        with self._lock:
            if self._is_closing or self._has_ended:
                work.close()
                raise self._error(f"the {self._name} is closed") from self.cause
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
            self._waited_for.add(future)
        future.add_done_callback(self._waited_for.discard)
        return future

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """``submit``, awaited on the caller's loop; cancelling the caller cancels the work."""
        future = self.submit(work)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._has_ended and task is not None and not task.cancelling():
                raise self._error(f"the {self._name} was closed during the call") from self.cause
            raise

    def call(self, work: Coroutine[Any, Any, T], *, timeout_s: float | None = None) -> T:
        """``submit``, and wait for the result; work that nobody waits for any more is cancelled.

        Raises:
            TimeoutError: no result within ``timeout_s``.
        """
        if self.is_current:
            work.close()
            raise self._error(f"a blocking call was made from a coroutine of the {self._name}")
        future = self.submit(work)
        try:
            if not concurrent.futures.wait([future], timeout_s).done:
                raise TimeoutError(f"no answer within {timeout_s:g} s")
            return future.result()
        except concurrent.futures.CancelledError:
            raise self._error(f"the {self._name} was closed during the call") from self.cause
        finally:
            future.cancel()

    def close(self) -> None:
        """Cancel all tasks, stop the loop, join the thread; gives up on what ignores both.

        May be called twice.
        """
        if self.is_current:
            raise self._error(f"close() was called from a coroutine of the {self._name}")
        self._is_closing = True
        self.post(self._stop_serving)
        self._thread.join(_JOIN_TIMEOUT_S)
        if self._thread.is_alive():
            logger.warning(
                "something blocks the event loop of the %s, so its thread is left behind; "
                "blocking calls belong into a worker thread (asyncio.to_thread)",
                self._name,
            )

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._serve()
        except BaseException as error:  # as in ``post``
            self.cause = error
        with self._lock:
            self._has_ended = True
        try:
            self._end_tasks()
        finally:
            for future in list(self._waited_for):
                future.cancel()
            self._loop.close()
            if self._on_death is not None and not self._is_closing:
                self._on_death()

    def _serve(self) -> None:
        while not self._is_closing and self.cause is None:
            try:
                self._loop.run_forever()
            except SystemExit as error:
                logger.warning("a task of the %s raised SystemExit(%s)", self._name, error.code)

    def _stop_serving(self) -> None:
        """Not while tasks are being cancelled: that needs the loop, and ends by itself."""
        if not self._has_ended:
            self._loop.stop()

    def _end_tasks(self) -> None:
        self._finish(asyncio.sleep(0))  # what was handed over last is a task now
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        if tasks:
            self._finish(asyncio.wait(tasks, timeout=_CANCEL_GRACE_S))
        if self._at_end is not None:
            self._finish(self._at_end())
        self._finish(self._loop.shutdown_asyncgens())

    def _finish(self, work: Coroutine[Any, Any, object]) -> None:
        """Whatever the tasks that end beside it raise."""
        task = self._loop.create_task(work)
        while not task.done():
            try:
                self._loop.run_until_complete(task)
            except (KeyboardInterrupt, SystemExit) as error:
                logger.debug("a task of the %s ended with %r", self._name, error)
