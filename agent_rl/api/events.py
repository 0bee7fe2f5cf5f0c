"""Server-sent events: JSON objects as they are produced, encoded one by one.

``start`` waits for the first object, so that an error before it can be an ordinary error reply;
a later error becomes an event, as the status has left by then. Closing closes the producer, also
when nothing was read yet.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable

from agent_rl.api.failure import failure_of
from agent_rl.errors import AgentRLError
from agent_rl.types import JsonObject

Encode = Callable[[JsonObject], bytes]


class EventStream(AsyncIterator[bytes]):
    """``end`` is sent after the last object of a stream that did not fail."""

    def __init__(
        self, objects: AsyncGenerator[JsonObject, None], encode: Encode, *, end: bytes = b""
    ) -> None:
        self._objects = objects
        self._encode = encode
        self._end = end
        self._first: JsonObject | None = None
        self._is_reading = False
        self._is_closed = False

    async def start(self) -> JsonObject:
        """The first object. Raises what the producer raises before it."""
        self._first = await anext(self._objects)
        return self._first

    async def __anext__(self) -> bytes:
        if self._first is not None:
            first, self._first = self._first, None
            return self._encode(first)
        self._is_reading = True
        try:
            event = await self._next()
        finally:
            self._is_reading = False
        if self._is_closed:
            await self._objects.aclose()
            raise StopAsyncIteration
        return event

    async def aclose(self) -> None:
        """While another task waits for the next object, the producer ends at that object."""
        self._first, self._end, self._is_closed = None, b"", True
        if not self._is_reading:
            await self._objects.aclose()

    async def _next(self) -> bytes:
        try:
            return self._encode(await anext(self._objects))
        except StopAsyncIteration:
            end, self._end = self._end, b""
            if not end:
                raise
            return end
        except AgentRLError as error:
            self._end = b""
            return self._encode(failure_of(error).body)


def chat_event(chunk: JsonObject) -> bytes:
    return b"data: " + json.dumps(chunk, ensure_ascii=False).encode() + b"\n\n"


def response_event(event: JsonObject) -> bytes:
    """Events of ``responses`` also carry their name. An error object has none."""
    name = event.get("type", "error")
    return f"event: {name}\n".encode() + chat_event(event)
