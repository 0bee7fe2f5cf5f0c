"""POST /chat/completions with stream=true: chunks in OpenAI's shape.

The first chunk leaves when the first token is there, so that an error before it is an ordinary
error reply. The interactions are recorded before the chunk with a finish_reason leaves.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing

from agent_rl.api.call import Call
from agent_rl.api.chat import ChatRequest, chat_logprobs, completion_object
from agent_rl.api.generate import Choice, record
from agent_rl.api.logprobs import entries, response_entries
from agent_rl.api.session import Session
from agent_rl.api.stream import ChoiceDelta, stream_choices
from agent_rl.api.turn import Turn
from agent_rl.types import JsonObject


async def chat_chunks(call: Call, request: ChatRequest) -> AsyncGenerator[JsonObject, None]:
    turn = call.turn
    head: JsonObject = {
        "id": call.id,
        "object": "chat.completion.chunk",
        "created": int(call.created_at),
        "model": turn.model,
    }
    if request.has_usage_chunk:
        head["usage"] = None
    choices: list[Choice] = []
    writers = [_ChoiceWriter(call.session, turn, index) for index in range(turn.n)]
    async with aclosing(stream_choices(call)) as pieces:
        async for piece in pieces:
            if isinstance(piece, ChoiceDelta):
                for chunk in writers[piece.index].write(piece):
                    yield {**head, "choices": [chunk]}
            else:
                choices = piece
    completion = completion_object(call, choices)
    record(call, choices, completion=completion)
    if turn.has_token_ids:
        head["prompt_token_ids"] = completion["prompt_token_ids"]
    for choice in choices:
        for chunk in writers[choice.index].write_last(choice):
            yield {**head, "choices": [chunk]}
    if request.has_usage_chunk:
        yield {**head, "choices": [], "usage": completion["usage"]}


class _ChoiceWriter:
    """Chunks of one choice. Tokens whose text is held back wait for the chunk that shows it."""

    def __init__(self, session: Session, turn: Turn, index: int) -> None:
        self._format = session.format
        self._turn = turn
        self._index = index
        self._has_begun = False
        self._num_calls = 0
        self._token_ids: list[int] = []
        self._logprobs: list[float] = []

    def write(self, delta: ChoiceDelta) -> Iterator[JsonObject]:
        if not self._has_begun:
            yield self._begin()
        if delta.tokens is not None:
            self._token_ids += delta.tokens.token_ids
            self._logprobs += delta.tokens.logprobs
        text: JsonObject = {}
        if delta.reasoning_content:
            text["reasoning_content"] = delta.reasoning_content
        if delta.content:
            text["content"] = delta.content
        if text:
            yield self._chunk(text)
        for call in delta.tool_calls:
            yield self._chunk({"tool_calls": [{"index": self._num_calls, **call}]})
            self._num_calls += 1

    def write_last(self, choice: Choice) -> Iterator[JsonObject]:
        if not self._has_begun:
            yield self._begin()
        last = self._chunk({}) | {"finish_reason": choice.finish_reason}
        if self._turn.gconfig.top_logprobs:
            # The alternatives come with the finished response only.
            last["logprobs"] = chat_logprobs(response_entries(self._format, choice.response))
        yield last

    def _begin(self) -> JsonObject:
        self._has_begun = True
        delta = {"role": "assistant", "content": "", "refusal": None}
        return {"index": self._index, "delta": delta, "finish_reason": None, "logprobs": None}

    def _chunk(self, delta: JsonObject) -> JsonObject:
        chunk = {"index": self._index, "delta": delta, "finish_reason": None, "logprobs": None}
        if self._turn.has_logprobs and not self._turn.gconfig.top_logprobs and self._token_ids:
            chunk["logprobs"] = chat_logprobs(
                entries(self._format, self._token_ids, self._logprobs)
            )
        if self._turn.has_token_ids:
            chunk["token_ids"] = self._token_ids
        self._token_ids, self._logprobs = [], []
        return chunk
