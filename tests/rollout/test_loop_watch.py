"""A loop that is held by the user's code is noticed, by a clock that the test moves."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import contextmanager

import pytest

from agent_rl.loop_thread import LoopThread
from agent_rl.rollout.loop_watch import LoopWatch


def compute_for_long(begun: threading.Event, end: threading.Event) -> None:
    begun.set()
    assert end.wait(60)


@pytest.fixture
def loop():
    thread = LoopThread("test")
    yield thread
    thread.close()


@pytest.fixture
def now() -> list[float]:
    return [0.0]


@pytest.fixture
def watch(loop: LoopThread, now: list[float]) -> LoopWatch:
    """One whose first question the loop has answered."""
    watch = LoopWatch(loop.post, clock=lambda: now[0])
    watch.tick()
    answer(loop)
    return watch


def answer(loop: LoopThread) -> None:
    """What was posted before has run."""
    ran = threading.Event()
    loop.post(ran.set)
    assert ran.wait(60)


@contextmanager
def held(loop: LoopThread, hold: Callable[[threading.Event, threading.Event], None]):
    begun, end = threading.Event(), threading.Event()
    loop.post(lambda: hold(begun, end))
    assert begun.wait(60)
    yield
    end.set()


def test_the_line_that_holds_the_loop_is_named_once(loop, watch, now, caplog) -> None:
    with held(loop, compute_for_long):
        watch.tick()
        now[0] = 0.5
        watch.tick()
        assert caplog.messages == []
        now[0] = 1.5
        watch.tick()
    [said] = caplog.messages
    assert said.startswith("for 1.5 s all episodes have been waiting for ")
    assert "test_loop_watch.py:" in said and "in compute_for_long: assert end.wait(60)" in said
    assert "asyncio.to_thread" in said and "rollout.agent.mode=subproc" in said
    assert watch._ended.is_set()


def test_a_loop_that_answers_is_left_alone(loop, watch, now, caplog) -> None:
    for second in range(5):
        now[0] = float(second)
        watch.tick()
        answer(loop)
    assert caplog.messages == []


def test_a_loop_that_is_late_without_code_of_the_user_is_left_alone(
    loop, watch, now, caplog
) -> None:
    """What it stands in is Python's own."""
    event = threading.Event()
    loop.post(threading.Event.wait.__get__(event))
    watch.tick()
    now[0] = 9.0
    watch.tick()
    event.set()
    assert caplog.messages == []


def test_its_thread_ends(new_threads) -> None:
    watch = LoopWatch(lambda function: function())
    watch.start()
    watch.close()
    assert "agent-rl-watch" not in new_threads()
