from __future__ import annotations

import asyncio
import threading

import pytest

from agent_rl.errors import CollectorError
from agent_rl.rollout.loop_thread import LoopThread


@pytest.fixture
def loop_thread():
    died = threading.Event()
    found = LoopThread("agent-rl-test", on_death=died.set)
    found.died = died
    yield found
    found.close()


async def answer() -> int:
    await asyncio.sleep(0)
    return 42


def test_call_returns_the_result(loop_thread) -> None:
    assert loop_thread.call(answer(), timeout_s=30) == 42


def test_call_raises_what_the_coroutine_raises(loop_thread) -> None:
    async def fail() -> None:
        raise TimeoutError("its own")

    with pytest.raises(TimeoutError, match="its own"):
        loop_thread.call(fail(), timeout_s=30)


def test_call_gives_up(loop_thread) -> None:
    with pytest.raises(TimeoutError, match=r"within 0\.05 s"):
        loop_thread.call(asyncio.Event().wait(), timeout_s=0.05)
    assert loop_thread.call(answer(), timeout_s=30) == 42


def test_blocking_calls_from_the_loop_itself_are_refused(loop_thread) -> None:
    async def inside() -> None:
        loop_thread.call(answer(), timeout_s=30)

    with pytest.raises(CollectorError, match="from a coroutine"):
        loop_thread.call(inside(), timeout_s=30)

    async def close() -> None:
        loop_thread.close()

    with pytest.raises(CollectorError, match="close"):
        loop_thread.call(close(), timeout_s=30)


def test_fault_in_a_posted_function_ends_the_thread(loop_thread) -> None:
    fault = RuntimeError("fault")

    def fail() -> None:
        raise fault

    loop_thread.post(fail)
    with pytest.raises(CollectorError):
        loop_thread.call(asyncio.Event().wait(), timeout_s=30)
    assert loop_thread.cause is fault
    assert loop_thread.died.wait(30)


def test_closed_thread_answers_no_more(loop_thread) -> None:
    loop_thread.close()
    loop_thread.close()
    loop_thread.post(lambda: None)
    with pytest.raises(CollectorError, match="after it ended"):
        loop_thread.call(answer(), timeout_s=30)
    assert not loop_thread.died.is_set()


def test_close_gives_up_on_a_blocked_loop(monkeypatch, caplog) -> None:
    """case B133: an agent that blocks its thread cannot hang the program."""
    monkeypatch.setattr("agent_rl.rollout.loop_thread._JOIN_TIMEOUT_S", 0.05)
    found, release = LoopThread("agent-rl-blocked", on_death=lambda: None), threading.Event()
    found.post(lambda: release.wait(30) and None)
    found.close()
    assert "blocks the event loop" in caplog.text
    release.set()


def test_close_gives_up_on_a_task_that_ignores_its_cancellation(monkeypatch) -> None:
    """case B133"""
    monkeypatch.setattr("agent_rl.rollout.loop_thread._CANCEL_GRACE_S", 0.05)
    found = LoopThread("agent-rl-stubborn", on_death=lambda: None)
    tasks = []

    async def stubborn() -> None:
        event = asyncio.Event()
        for _ in range(2):
            try:
                await event.wait()
            except asyncio.CancelledError:
                continue

    async def start() -> None:
        tasks.append(asyncio.create_task(stubborn()))
        await asyncio.sleep(0)

    found.call(start(), timeout_s=30)
    found.close()
    assert not found.is_alive
    assert not tasks[0].done()
