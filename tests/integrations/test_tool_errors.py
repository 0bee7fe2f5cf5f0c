from __future__ import annotations

import asyncio
import inspect

import pytest

from agent_rl.integrations.tools import ToolErrors


def broken(item: str) -> int:
    """A price."""
    raise KeyError(item)


async def broken_later(item: str) -> int:
    await asyncio.sleep(0)
    raise KeyError(item)


async def deaf_framework(tool, calls: list[str]) -> str:
    """Tells the model of errors, and would go on for ever."""
    while True:
        calls.append("model")
        try:
            result = tool("gold")
            await result if inspect.isawaitable(result) else None
        except KeyError:
            await asyncio.sleep(0)


@pytest.mark.parametrize("tool", [broken, broken_later])
async def test_the_exception_ends_the_block(tool) -> None:
    calls: list[str] = []
    with pytest.raises(KeyError, match="gold"):
        async with ToolErrors() as errors:
            await deaf_framework(errors.watch(tool), calls)
    assert 1 <= len(calls) <= 3


async def test_in_a_worker_thread() -> None:
    def run(tool) -> str:
        try:
            return str(tool("gold"))
        except KeyError:
            return "answer"

    with pytest.raises(KeyError, match="gold"):
        async with ToolErrors() as errors:
            await asyncio.to_thread(run, errors.watch(broken))


async def test_a_block_that_ends_before_its_cancellation_arrives() -> None:
    task = asyncio.current_task()
    assert task is not None
    with pytest.raises(KeyError, match="gold"):
        async with ToolErrors() as errors:
            with pytest.raises(KeyError):
                errors.watch(broken)("gold")
    await asyncio.sleep(0)
    assert task.cancelling() == 0


async def test_cancellation_from_outside_stays_one() -> None:
    async def episode() -> None:
        async with ToolErrors() as errors:
            with pytest.raises(KeyError):
                errors.watch(broken)("gold")
            task.cancel()
            await asyncio.sleep(60)

    task = asyncio.create_task(episode())
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_other_exceptions_and_results_pass() -> None:
    with pytest.raises(ZeroDivisionError):
        async with ToolErrors():
            _ = 1 / 0
    async with ToolErrors() as errors:
        watched = errors.watch(len)
        assert watched("four") == 4
    assert inspect.signature(errors.watch(broken)) == inspect.signature(broken)
    assert errors.watch(broken).__doc__ == "A price."
