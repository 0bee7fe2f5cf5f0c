"""ToolErrors: an exception in a tool ends the episode, whatever the framework does with it.

Many frameworks catch it and tell the model; the episode then goes on in a world where the tool is
broken, and its reward says nothing of the policy. A tool that is watched still raises, and what it
raised comes out of the block, which is cancelled at once.

    async with ToolErrors() as errors:
        agent = Agent(tools=[errors.watch(search), errors.watch(buy)])
        answer = await agent.run(question)

Let a tool *return* the text of a failure that the model should learn to cope with.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable
from types import TracebackType
from typing import ParamSpec, Self, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class ToolErrors:
    """The first exception of the tools it watches is raised by the block that it is."""

    def __init__(self) -> None:
        self.first: Exception | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[object] | None = None
        self._has_cancelled = False

    def watch(self, tool: Callable[P, T]) -> Callable[P, T]:
        """``tool``, plain or asynchronous, in any thread; its name and signature stay."""
        if inspect.iscoroutinefunction(tool):

            @functools.wraps(tool)
            async def call_async(*args: P.args, **kwargs: P.kwargs) -> object:
                try:
                    return await tool(*args, **kwargs)
                except Exception as error:
                    self._note(error)
                    raise

            return call_async  # type: ignore[return-value]

        @functools.wraps(tool)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            try:
                return tool(*args, **kwargs)
            except Exception as error:
                self._note(error)
                raise

        return call

    def _note(self, error: Exception) -> None:
        if self.first is None:
            self.first = error
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._cancel)

    def _cancel(self) -> None:
        if self._task is not None:
            self._has_cancelled = True
            self._task.cancel()

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """A cancellation from outside stays one, as with ``asyncio.timeout``."""
        task, self._task = self._task, None
        assert task is not None, "entered"
        is_cancelled_by_others = False
        if self._has_cancelled:
            is_cancelled_by_others = task.uncancel() > 0
        if self.first is not None and not is_cancelled_by_others:
            raise self.first
