"""The queue between the gateway's loop and the trainer: nothing lost, nobody held up for ever."""

from __future__ import annotations

import asyncio
import threading

import pytest

from agent_rl.errors import CollectorError
from agent_rl.online.sample_queue import SampleQueue


def test_drain_takes_exactly_what_it_returns() -> None:
    """Case B137: the rest of a sweep is the beginning of the next batch."""
    queue: SampleQueue[int] = SampleQueue(100)
    for number in range(11):
        queue.put(number)
    assert [queue.drain(4), queue.drain(4), queue.drain(3)] == [
        [0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]
    ]  # fmt: skip
    assert len(queue) == 0


def test_drain_waits_for_the_rest_and_warns_when_nothing_comes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    queue: SampleQueue[int] = SampleQueue(100, no_progress_warning_s=0.01)
    queue.put(1)
    got: list[list[int]] = []
    trainer = threading.Thread(target=lambda: got.append(queue.drain(2)))
    trainer.start()
    while "1 of 2 are there" not in caplog.text:
        trainer.join(0.01)
    queue.put(2)
    trainer.join()
    assert got == [[1, 2]]


def test_a_closed_queue_gives_what_it_has_and_then_raises() -> None:
    """Case B131: nobody waits for a source that is gone."""
    queue: SampleQueue[int] = SampleQueue(100)
    queue.put(1)
    queue.put(2)
    queue.close()
    assert queue.drain(1) == [1]
    with pytest.raises(CollectorError, match="1 of 2 are left"):
        queue.drain(2)


async def test_places_are_given_back_and_bound_what_is_judged() -> None:
    queue: SampleQueue[int] = SampleQueue(2)
    entered: list[int] = []
    release = asyncio.Event()

    async def work(number: int, *, is_fruitful: bool) -> None:
        async with queue.place():
            entered.append(number)
            await release.wait()
            if is_fruitful:
                queue.put(number)

    tasks = [asyncio.create_task(work(n, is_fruitful=n != 0)) for n in range(5)]
    for _ in range(10):
        await asyncio.sleep(0)
    assert entered == [0, 1]
    release.set()
    await tasks[2]  # the place of number 0, which left no sample
    for _ in range(10):
        await asyncio.sleep(0)
    assert (len(queue), entered) == (2, [0, 1, 2])
    queue.drain(1)
    await tasks[3]
    queue.drain(2)
    await tasks[4]
    assert queue.drain(1) == [4]


async def test_a_cancelled_wait_for_a_place_takes_none() -> None:
    queue: SampleQueue[int] = SampleQueue(1)
    queue.put(0)

    async def work() -> None:
        async with queue.place():
            queue.put(1)

    lost, kept = asyncio.create_task(work()), asyncio.create_task(work())
    await asyncio.sleep(0)
    lost.cancel()
    queue.drain(1)
    await kept
    assert queue.drain(1) == [1]


def test_removing_keeps_the_order_of_the_others() -> None:
    queue: SampleQueue[int] = SampleQueue(100)
    for number in range(6):
        queue.put(number)
    assert queue.remove(lambda number: number % 2 == 0) == 3
    assert queue.drain(3) == [1, 3, 5]
