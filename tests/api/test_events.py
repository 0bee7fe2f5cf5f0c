"""EventStream: encoded as they come, errors before and after the first, closing at any time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from agent_rl.api.events import EventStream, chat_event, response_event
from agent_rl.errors import EngineError
from agent_rl.types import JsonObject


class Producer:
    """Counts to ``limit``, waiting for the gate before each number but the first."""

    def __init__(self, limit: int, error: Exception | None = None) -> None:
        self.gate = asyncio.Event()
        self.is_ended = False
        self._limit = limit
        self._error = error

    async def objects(self) -> AsyncGenerator[JsonObject, None]:
        try:
            for number in range(self._limit):
                if number:
                    await self.gate.wait()
                yield {"n": number}
            if self._error is not None:
                raise self._error
        finally:
            self.is_ended = True


async def test_objects_then_the_end() -> None:
    producer = Producer(2)
    producer.gate.set()
    stream = EventStream(producer.objects(), chat_event, end=b"end")
    assert await stream.start() == {"n": 0}
    assert [event async for event in stream] == [
        b'data: {"n": 0}\n\n',
        b'data: {"n": 1}\n\n',
        b"end",
    ]


async def test_error_before_the_first_object_is_raised() -> None:
    stream = EventStream(Producer(0, EngineError("down")).objects(), chat_event)
    with pytest.raises(EngineError):
        await stream.start()


async def test_later_error_is_the_last_event() -> None:
    stream = EventStream(Producer(1, EngineError("down")).objects(), response_event, end=b"end")
    await stream.start()
    first, last = [event async for event in stream]
    assert first == b'event: error\ndata: {"n": 0}\n\n'
    assert b'"message": "down"' in last


async def test_close_before_anything_was_read() -> None:
    producer = Producer(3)
    stream = EventStream(producer.objects(), chat_event)
    await stream.start()
    await stream.aclose()
    assert producer.is_ended
    assert [event async for event in stream] == []


async def test_close_while_another_task_waits() -> None:
    producer = Producer(3)
    stream = EventStream(producer.objects(), chat_event, end=b"end")
    await stream.start()
    await anext(stream)
    reader = asyncio.create_task(anext(stream, None))
    await asyncio.sleep(0)
    await stream.aclose()
    assert not producer.is_ended
    producer.gate.set()
    assert await reader is None
    assert producer.is_ended
