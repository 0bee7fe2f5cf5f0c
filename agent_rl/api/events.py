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

    async def start(self) -> JsonObject:
        """The first object. Raises what the producer raises before it."""
        self._first = await anext(self._objects)
        return self._first

    async def __anext__(self) -> bytes:
        if self._first is not None:
            first, self._first = self._first, None
            return self._encode(first)
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

    async def aclose(self) -> None:
        self._first, self._end = None, b""
        await self._objects.aclose()


def chat_event(chunk: JsonObject) -> bytes:
    return b"data: " + json.dumps(chunk, ensure_ascii=False).encode() + b"\n\n"


def response_event(event: JsonObject) -> bytes:
    """Events of ``responses`` also carry their name. An error object has none."""
    name = event.get("type", "error")
    return f"event: {name}\n".encode() + chat_event(event)
