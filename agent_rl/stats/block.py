"""A with-block that is also a decorator, for sync and async functions alike."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, ParamSpec, TypeVar, cast

P = ParamSpec("P")
R = TypeVar("R")


class Block:
    """``with block: ...``, ``async with block: ...``, or ``@block``: a block for each call.

    ``make`` gives a fresh context manager, so one decorated function may run many times at once.
    """

    def __init__(self, make: Callable[[], AbstractContextManager[None]]) -> None:
        self._make = make
        self._open: list[AbstractContextManager[None]] = []

    def __enter__(self) -> None:
        manager = self._make()
        manager.__enter__()
        self._open.append(manager)

    def __exit__(self, *exc_info: Any) -> None:
        self._open.pop().__exit__(*exc_info)

    async def __aenter__(self) -> None:
        self.__enter__()

    async def __aexit__(self, *exc_info: Any) -> None:
        self.__exit__(*exc_info)

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise TypeError(
                f"{function.__qualname__} is a generator: its body runs after the call; use a "
                "with block inside it"
            )
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def call_async(*args: P.args, **kwargs: P.kwargs) -> Any:
                with self._make():
                    return await function(*args, **kwargs)

            return cast("Callable[P, R]", call_async)

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            with self._make():
                return function(*args, **kwargs)

        return call
