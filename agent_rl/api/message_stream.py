"""POST /messages with stream=true: events in the official order.

    message_start,
    for each block: content_block_start, content_block_delta..., content_block_stop,
    message_delta with the stop reason, which leaves after the record is written, message_stop.

Blocks follow one another: thinking, text, then the tool uses, as in the whole message.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing

from agent_rl.api.blocks import tool_use_block
from agent_rl.api.call import Call
from agent_rl.api.events import chat_event
from agent_rl.api.failure import Failure
from agent_rl.api.generate import Choice, record
from agent_rl.api.messages import (
    MessageRequest,
    message_error,
    message_object,
)
from agent_rl.api.stream import ChoiceDelta, stream_choices
from agent_rl.types import JsonObject


async def message_events(call: Call, request: MessageRequest) -> AsyncGenerator[JsonObject, None]:
    writer = _BlockWriter(call.id, shows_thinking=request.shows_thinking)
    choices: list[Choice] = []
    has_begun = False
    async with aclosing(stream_choices(call)) as pieces:
        async for piece in pieces:
            if not has_begun:
                has_begun = True
                yield {"type": "message_start", "message": message_object(call, request)}
            if isinstance(piece, ChoiceDelta):
                for event in writer.write(piece):
                    yield event
            else:
                choices = piece
    for event in writer.write_last():
        yield event
    message = message_object(call, request, choices[0])
    record(call, choices, completion=message)
    ending = {name: message[name] for name in ("stop_reason", "stop_sequence")}
    yield {"type": "message_delta", "delta": ending, "usage": message["usage"]}
    yield {"type": "message_stop"}


def message_event(event: JsonObject) -> bytes:
    """Every event carries its name, an error too."""
    if "type" not in event:
        event = message_error(Failure(status=500, body=event, is_final=True))
    return f"event: {event['type']}\n".encode() + chat_event(event)


class _BlockWriter:
    """Events of the blocks; at most one block is open."""

    def __init__(self, signature: str, *, shows_thinking: bool) -> None:
        self._signature = signature
        self._shows_thinking = shows_thinking
        self._index = 0
        self._open: str | None = None
        self._calls: list[JsonObject] = []

    def write(self, delta: ChoiceDelta) -> Iterator[JsonObject]:
        if delta.reasoning_content:
            yield from self._go_on({"type": "thinking", "thinking": "", "signature": ""})
            if self._shows_thinking:
                yield self._delta({"type": "thinking_delta", "thinking": delta.reasoning_content})
        if delta.content:
            yield from self._go_on({"type": "text", "text": ""})
            yield self._delta({"type": "text_delta", "text": delta.content})
        self._calls += delta.tool_calls

    def write_last(self) -> Iterator[JsonObject]:
        yield from self._end()
        for call in self._calls:
            yield from self._go_on(tool_use_block(call))
            arguments = call["function"]["arguments"]
            yield self._delta({"type": "input_json_delta", "partial_json": arguments})
            yield from self._end()

    def _go_on(self, block: JsonObject) -> Iterator[JsonObject]:
        """In the open block if it is of that type, else in a new one that begins as ``block``."""
        if self._open == block["type"]:
            return
        yield from self._end()
        self._open = block["type"]
        yield {"type": "content_block_start", "index": self._index, "content_block": block}

    def _end(self) -> Iterator[JsonObject]:
        if self._open is None:
            return
        if self._open == "thinking":
            yield self._delta({"type": "signature_delta", "signature": self._signature})
        yield {"type": "content_block_stop", "index": self._index}
        self._open = None
        self._index += 1

    def _delta(self, delta: JsonObject) -> JsonObject:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}
