from __future__ import annotations

import asyncio
import threading

import pytest

from agent_rl.errors import CollectorError
from agent_rl.loop_thread import LoopThread


@pytest.fixture
def loop_thread():
    died = threading.Event()
    found = LoopThread("collector", error=CollectorError, on_death=died.set)
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


async def test_run_gives_the_result_to_another_loop(loop_thread) -> None:
    here = asyncio.get_running_loop()

    async def where() -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()

    assert await loop_thread.run(where()) is not here


async def test_cancelled_run_cancels_the_work(loop_thread) -> None:
    began, ended = threading.Event(), threading.Event()

    async def hang() -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    task = asyncio.create_task(loop_thread.run(hang()))
    await asyncio.to_thread(began.wait, 30)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await asyncio.to_thread(ended.wait, 30)


async def test_close_is_an_error_to_whoever_waits(loop_thread) -> None:
    """Not a cancellation, which nobody asked for."""
    began = threading.Semaphore(0)

    async def hang() -> None:
        began.release()
        await asyncio.Event().wait()

    waiting = [
        asyncio.create_task(loop_thread.run(hang())),
        asyncio.create_task(asyncio.to_thread(loop_thread.call, hang())),
    ]
    for _ in waiting:
        assert await asyncio.to_thread(began.acquire, timeout=30)
    await asyncio.to_thread(loop_thread.close)
    for task in waiting:
        with pytest.raises(CollectorError, match="the collector was closed during the call"):
            await task


def test_work_handed_over_just_before_the_end_is_not_forgotten(loop_thread) -> None:
    """The loop stops before it gets there: the futures end all the same."""
    began, release = threading.Event(), threading.Event()

    def fail() -> None:
        began.set()
        release.wait(30)
        raise RuntimeError("fault")

    loop_thread.post(fail)
    assert began.wait(30)
    futures = [loop_thread.submit(answer()) for _ in range(3)]
    release.set()
    assert loop_thread.died.wait(30)
    assert all(future.done() for future in futures)


def test_exit_of_a_task_does_not_end_the_loop(loop_thread, caplog) -> None:
    async def leave() -> None:
        raise SystemExit(3)

    with pytest.raises(SystemExit):
        loop_thread.call(leave())
    assert loop_thread.call(answer()) == 42
    assert "a task of the collector raised SystemExit(3)" in caplog.text


def test_interrupts_of_several_tasks_end_it_in_order(monkeypatch) -> None:
    """Case B195: the first stops the loop, those that follow nothing more."""
    unhandled: list[object] = []
    tasks: list[asyncio.Future[None]] = []
    monkeypatch.setattr(threading, "excepthook", unhandled.append)
    ended, died = threading.Event(), threading.Event()

    async def at_end() -> None:
        ended.set()

    async def interrupt() -> None:
        raise KeyboardInterrupt

    async def interrupt_at_the_end() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            raise KeyboardInterrupt

    async def start() -> None:
        work = (interrupt(), interrupt(), interrupt_at_the_end(), asyncio.sleep(60))
        tasks.extend(asyncio.ensure_future(each) for each in work)
        await asyncio.wait(tasks)

    thread = LoopThread("collector", on_death=died.set, at_end=at_end)
    with pytest.raises(RuntimeError, match="was closed during the call") as caught:
        thread.call(start(), timeout_s=30)
    assert isinstance(caught.value.__cause__, KeyboardInterrupt)
    assert died.wait(30) and ended.is_set() and unhandled == []
    assert [type(task.exception()) for task in tasks[:3]] == [KeyboardInterrupt] * 3
    assert tasks[3].cancelled()


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
    with pytest.raises(CollectorError, match="the collector is closed"):
        loop_thread.call(answer(), timeout_s=30)
    assert not loop_thread.died.is_set()


def test_close_gives_up_on_a_blocked_loop(monkeypatch, caplog) -> None:
    """case B133: an agent that blocks its thread cannot hang the program."""
    monkeypatch.setattr("agent_rl.loop_thread._JOIN_TIMEOUT_S", 0.05)
    found, release = LoopThread("collector"), threading.Event()
    found.post(lambda: release.wait(30) and None)
    found.close()
    assert "blocks the event loop" in caplog.text
    release.set()


def test_close_gives_up_on_a_task_that_ignores_its_cancellation(monkeypatch, caplog) -> None:
    """case B133: the thread ends all the same."""
    monkeypatch.setattr("agent_rl.loop_thread._CANCEL_GRACE_S", 0.05)
    found = LoopThread("collector")
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
    assert "left behind" not in caplog.text
