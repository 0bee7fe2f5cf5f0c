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

from agent_rl.api.generate import (
    Choice,
    checked,
    engine_call,
    finish_choice,
    model_request,
    new_reader,
    tool_call,
)
from agent_rl.api.session import Session
from agent_rl.api.turn import Turn
from agent_rl.engine.base import StreamItem
from agent_rl.errors import EngineError
from agent_rl.record.plan import PromptPlan
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


async def stream_choices(
    session: Session, turn: Turn, plan: PromptPlan, call_id: str
) -> AsyncGenerator[ChoiceDelta | list[Choice], None]:
    """Deltas of all choices as they come, then one list with every finished choice."""
    requests = [model_request(session, turn, plan, call_id, index) for index in range(turn.n)]
    streams = [_stream_choice(session, turn, plan, request) for request in requests]
    merged = streams[0] if len(streams) == 1 else _merged(streams)
    finished: list[Choice] = []
    async with aclosing(merged):
        async for piece in merged:
            if isinstance(piece, ChoiceDelta):
                yield piece
            else:
                finished.append(piece)
    yield sorted(finished, key=lambda choice: choice.index)


async def _stream_choice(
    session: Session, turn: Turn, plan: PromptPlan, request: ModelRequest
) -> Pieces:
    reader = new_reader(session, turn, plan)
    calls: list[JsonObject] = []
    index = int(request.rid.partition("/")[2] or 0)
    # The seam says "iterator"; every engine gives a generator, whose closing frees the slot.
    items = cast(AsyncGenerator[StreamItem, None], session.engine.astream(request))
    async with aclosing(items):
        while True:
            with engine_call(turn):
                item = await anext(items, None)
            if item is None:
                raise EngineError(f"the engine's stream of {request.rid} ended without a response")
            tokens = item if isinstance(item, TokenDelta) else None
            if isinstance(item, TokenDelta):
                delta = reader.feed(item.token_ids)
            else:
                delta = reader.finish(checked(item, request.rid).stop_reason)
            new_calls = [tool_call(call) for call in delta.tool_calls]
            calls += new_calls
            if delta or tokens:
                yield ChoiceDelta(
                    index=index,
                    content=delta.content,
                    reasoning_content=delta.reasoning_content,
                    tool_calls=new_calls,
                    tokens=tokens,
                )
            if not isinstance(item, TokenDelta):
                yield finish_choice(session, plan, request.rid, item, reader, calls)
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
