from __future__ import annotations

import asyncio

import pytest

from agent_rl.rollout.clock import PausableClock, episode_clock, place_in


def test_it_stands_still_while_stopped() -> None:
    now = 100.0
    clock = PausableClock(lambda: now)
    start = clock.now()
    now = 103.0
    clock.stop()
    clock.stop()
    now = 150.0
    assert clock.now() - start == pytest.approx(3.0)
    clock.go()
    clock.go()
    now = 152.0
    assert clock.now() - start == pytest.approx(5.0)


async def test_an_episodes_clock_stands_still_until_it_has_a_place() -> None:
    now = 100.0
    clock, room = episode_clock(lambda: now), asyncio.Semaphore(0)
    start = clock.now()

    async def run() -> float:
        nonlocal now
        async with place_in(room):
            now += 2.0
            return clock.now() - start

    running = asyncio.create_task(run())
    await asyncio.sleep(0)
    now = 500.0
    assert clock.now() == start
    room.release()
    assert await running == 2.0
    assert not room.locked()


async def test_a_place_that_nobody_waits_for_any_more_is_not_taken() -> None:
    clock, room = episode_clock(lambda: 0.0), asyncio.Semaphore(0)

    async def run() -> None:
        async with place_in(room):
            raise AssertionError("it was cancelled before")

    running = asyncio.create_task(run())
    await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    room.release()
    assert not room.locked() and clock.now() == 0.0
