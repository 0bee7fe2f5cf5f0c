"""POST /responses with stream=true: events in the official order.

    response.created, response.in_progress,
    for each item: output_item.added, (content_part.added,) deltas, ...done, output_item.done,
    response.completed (or response.incomplete), which leaves after the record is written.

Items follow one another: reasoning, text, then the function calls, as in the whole response.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing

from agent_rl.api.call import Call
from agent_rl.api.generate import Choice, record
from agent_rl.api.items import call_item, message_item, reasoning_item, text_part
from agent_rl.api.logprobs import entries
from agent_rl.api.responses import (
    ResponseRequest,
    response_object,
    text_logprobs,
)
from agent_rl.api.stream import ChoiceDelta, stream_choices
from agent_rl.types import JsonObject


async def response_events(call: Call, request: ResponseRequest) -> AsyncGenerator[JsonObject, None]:
    writer = _EventWriter(call)
    choices: list[Choice] = []
    async with aclosing(stream_choices(call)) as pieces:
        async for piece in pieces:
            if writer.count == 0:
                started = response_object(call, request)
                yield writer.event("response.created", response=started)
                yield writer.event("response.in_progress", response=started)
            if isinstance(piece, ChoiceDelta):
                for event in writer.write(piece):
                    yield event
            else:
                choices = piece
    for event in writer.write_last(choices[0]):
        yield event
    response = response_object(call, request, choices[0], writer.output)
    record(call, choices, response=response)
    yield writer.event(f"response.{response['status']}", response=response)


class _EventWriter:
    """Events of one response. ``output`` holds the items that are done; one may be open."""

    def __init__(self, call: Call) -> None:
        self.count = 0
        self.output: list[JsonObject] = []
        self._call = call
        self._open: JsonObject | None = None
        self._text = ""
        self._calls: list[JsonObject] = []
        self._held: list[JsonObject] = []  # log-probs of tokens whose text is not shown yet

    def event(self, kind: str, /, **fields: object) -> JsonObject:
        event: JsonObject = {"type": kind, "sequence_number": self.count, **fields}
        self.count += 1
        return event

    def write(self, delta: ChoiceDelta) -> Iterator[JsonObject]:
        if self._call.turn.has_logprobs and delta.tokens is not None:
            ids, logprobs = delta.tokens.token_ids, delta.tokens.logprobs
            self._held += entries(self._call.session.format, ids, logprobs)
        if delta.reasoning_content:
            if self._open is None:
                yield from self._begin(reasoning_item(None, "in_progress"))
            self._text += delta.reasoning_content
            yield self._item_event("reasoning_text.delta", delta=delta.reasoning_content)
        if delta.content:
            yield from self._begin_text()
            self._text += delta.content
            yield self._item_event(
                "output_text.delta", delta=delta.content, logprobs=_event_logprobs(self._held)
            )
            self._held = []
        self._calls += delta.tool_calls

    def write_last(self, choice: Choice) -> Iterator[JsonObject]:
        status = "incomplete" if choice.finish_reason == "length" else "completed"
        is_text_open = self._open is not None and self._open["type"] == "message"
        if not is_text_open and not self._calls and not choice.message["content"]:
            yield from self._begin_text()  # an empty answer is an empty message
        if self._open is not None and self._open["type"] == "message":
            logprobs = text_logprobs(self._call, choice)
            yield from self._end_text(status, logprobs)
        yield from self._end_reasoning()
        for call in self._calls:
            yield from self._tool_call(call)

    def _begin(self, item: JsonObject) -> Iterator[JsonObject]:
        self._open, self._text = item, ""
        yield self.event("response.output_item.added", output_index=len(self.output), item=item)

    def _begin_text(self) -> Iterator[JsonObject]:
        if self._open is not None and self._open["type"] == "message":
            return
        yield from self._end_reasoning()
        yield from self._begin(message_item([], "in_progress"))
        yield self._item_event("content_part.added", part=text_part("", []))

    def _end_text(self, status: str, logprobs: list[JsonObject]) -> Iterator[JsonObject]:
        part = text_part(self._text, logprobs)
        done = _event_logprobs(logprobs)
        yield self._item_event("output_text.done", text=self._text, logprobs=done)
        yield self._item_event("content_part.done", part=part)
        yield from self._end({"status": status, "content": [part]})

    def _end_reasoning(self) -> Iterator[JsonObject]:
        if self._open is not None and self._open["type"] == "reasoning":
            yield self._item_event("reasoning_text.done", text=self._text)
            content = [{"type": "reasoning_text", "text": self._text}]
            yield from self._end({"status": "completed", "content": content})

    def _tool_call(self, call: JsonObject) -> Iterator[JsonObject]:
        done = call_item(call, "completed")
        yield from self._begin({**done, "status": "in_progress", "arguments": ""})
        arguments = done["arguments"]
        index = {"item_id": done["id"], "output_index": len(self.output)}
        yield self.event("response.function_call_arguments.delta", delta=arguments, **index)
        yield self.event(
            "response.function_call_arguments.done",
            arguments=arguments,
            name=done["name"],
            **index,
        )
        yield from self._end({"status": "completed", "arguments": arguments})

    def _end(self, changes: JsonObject) -> Iterator[JsonObject]:
        assert self._open is not None, "only an open item can end"
        item = {**self._open, **changes}
        yield self.event("response.output_item.done", output_index=len(self.output), item=item)
        self.output.append(item)
        self._open = None

    def _item_event(self, kind: str, /, **fields: object) -> JsonObject:
        assert self._open is not None, "deltas belong to an open item"
        return self.event(
            f"response.{kind}",
            item_id=self._open["id"],
            output_index=len(self.output),
            content_index=0,
            **fields,
        )


def _event_logprobs(logprobs: list[JsonObject]) -> list[JsonObject]:
    """In events the entries have no bytes."""
    return [
        {
            "token": entry["token"],
            "logprob": entry["logprob"],
            "top_logprobs": [
                {"token": top["token"], "logprob": top["logprob"]} for top in entry["top_logprobs"]
            ],
        }
        for entry in logprobs
    ]
