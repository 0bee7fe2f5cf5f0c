"""The choices of a Turn while they are sampled: readable deltas, then the finished choices.

Invariants: deltas joined are what the whole answer shows; the finished choices come last, when all
of them are complete; closing the stream at any point ends the generation and leaves no record.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TypeAlias, cast

from agent_rl.api.call import Call
from agent_rl.api.generate import (
    Choice,
    asking_engine,
    checked,
    choice_index,
    finish_choice,
    new_reader,
    tool_call,
)
from agent_rl.engine.base import StreamItem
from agent_rl.errors import EngineError
from agent_rl.types import JsonObject, ModelRequest, TokenDelta


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceDelta:
    """What new tokens of choice ``index`` add; the text of some may be held back until later."""

    index: int
    content: str = ""
    reasoning_content: str = ""
    tool_calls: Sequence[JsonObject] = ()
    tokens: TokenDelta | None = None


Piece: TypeAlias = ChoiceDelta | Choice
Pieces: TypeAlias = AsyncGenerator[Piece, None]


async def stream_choices(call: Call) -> AsyncGenerator[ChoiceDelta | list[Choice], None]:
    """Deltas of all choices as they come, then one list with every finished choice."""
    streams = [_stream_choice(call, request) for request in call.requests()]
    merged = streams[0] if len(streams) == 1 else _merged(streams)
    finished: list[Choice] = []
    async with aclosing(merged):
        async for piece in merged:
            if isinstance(piece, ChoiceDelta):
                yield piece
            else:
                finished.append(piece)
    yield sorted(finished, key=lambda choice: choice.index)


async def _stream_choice(call: Call, request: ModelRequest) -> Pieces:
    reader = new_reader(call)
    tool_calls: list[JsonObject] = []
    # The seam says "iterator"; every engine gives a generator, whose closing frees the slot.
    items = cast(AsyncGenerator[StreamItem, None], call.session.engine.astream(request))
    async with aclosing(items):
        while True:
            with asking_engine(call.turn):
                item = await anext(items, None)
            if item is None:
                raise EngineError(f"the engine's stream of {request.rid} ended without a response")
            tokens = item if isinstance(item, TokenDelta) else None
            if isinstance(item, TokenDelta):
                delta = reader.feed(item.token_ids)
            else:
                delta = reader.finish(checked(item, request.rid).stop_reason)
            new_calls = [tool_call(each) for each in delta.tool_calls]
            tool_calls += new_calls
            if delta or tokens:
                yield ChoiceDelta(
                    index=choice_index(request.rid),
                    content=delta.content,
                    reasoning_content=delta.reasoning_content,
                    tool_calls=new_calls,
                    tokens=tokens,
                )
            if not isinstance(item, TokenDelta):
                yield finish_choice(call, request.rid, item, reader.message, tool_calls)
                return


async def _merged(streams: Sequence[Pieces]) -> Pieces:
    """Pieces of several streams in the order of their arrival. The first failure ends all."""
    waiting = {asyncio.ensure_future(anext(stream, None)): stream for stream in streams}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                stream = waiting.pop(task)
                piece = task.result()
                if piece is not None:
                    waiting[asyncio.ensure_future(anext(stream, None))] = stream
                    yield piece
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        for stream in streams:
            await stream.aclose()
