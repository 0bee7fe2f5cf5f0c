"""From a Call to finished choices: ask the engine, read the ids, record.

Invariant: an interaction is recorded only when the whole call has succeeded, and between the
record and the answer there is no await, so a cancelled or failed call leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypeVar

from agent_rl.api.call import Call, new_id
from agent_rl.api.turn import Turn
from agent_rl.errors import EpisodeError, RequestError, boundary
from agent_rl.tokens.family_reader import FamilyReader
from agent_rl.tokens.parse import MessageReader, ParsedMessage
from agent_rl.tokens.tool_formats import ParsedToolCall
from agent_rl.types import JsonObject, ModelRequest, ModelResponse

Reader: TypeAlias = MessageReader | FamilyReader
FinishReason: TypeAlias = Literal["stop", "length", "tool_calls"]
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One finished answer. ``message`` is what the caller gets and the record keeps."""

    interaction_id: str
    response: ModelResponse
    message: JsonObject
    finish_reason: FinishReason
    num_reasoning_tokens: int

    @property
    def index(self) -> int:
        return choice_index(self.interaction_id)


def choice_index(rid: str) -> int:
    """Of the choice with this id, see ``Call.requests``."""
    return int(rid.partition("/")[2] or 0)


async def generate(call: Call) -> list[Choice]:
    """All choices, sampled concurrently. If one fails, the others are cancelled."""
    requests = call.requests()
    if len(requests) == 1:
        responses = [await _ask(call, requests[0])]
    else:
        responses = await together([_ask(call, request) for request in requests])
    choices = []
    for request, response in zip(requests, responses, strict=True):
        reader = new_reader(call)
        reader.feed(response.output_tokens)
        reader.finish(response.stop_reason)
        tool_calls = [tool_call(each) for each in reader.message.tool_calls]
        choices.append(finish_choice(call, request.rid, response, reader.message, tool_calls))
    return choices


@contextmanager
def asking_engine(turn: Turn) -> Iterator[None]:
    """What the engine raises becomes an error of the engine's boundary.

    A grammar that it refuses is named by the parameter that asked for it.
    """
    try:
        with boundary("engine"):
            yield
    except RequestError as error:
        if error.param != "grammar":
            raise
        param = turn.grammar_param
        raise RequestError(f"{param}: {error}", param=param, code=error.code) from error


async def _ask(call: Call, request: ModelRequest) -> ModelResponse:
    with asking_engine(call.turn):
        response = await call.session.engine.agenerate(request)
    return checked(response, request.rid)


def checked(response: ModelResponse, rid: str) -> ModelResponse:
    """An aborted generation is no answer: whoever aborted it did not want one."""
    if response.stop_reason == "abort":
        count = len(response.output_tokens)
        raise EpisodeError(
            f"the generation of {rid} was aborted after {count} tokens", boundary="engine"
        )
    return response


async def together(coroutines: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Like ``asyncio.gather``, but the first failure cancels the rest and is raised bare."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in coroutines]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]


def new_reader(call: Call) -> Reader:
    fmt, turn, prompt_ids = call.session.format, call.turn, call.plan.input_ids
    if turn.is_raw:
        return MessageReader(
            fmt.vocabulary, end_ids=fmt.stop_token_ids, stop=turn.stop, prompt_ids=prompt_ids
        )
    tools = turn.tools if turn.can_call_tools else None
    return fmt.decoder(tools=tools, stop=turn.stop, prompt_ids=prompt_ids)


def tool_call(call: ParsedToolCall) -> JsonObject:
    """A call as the caller gets it, with an id of its own: the first key to find it again by."""
    return {
        "id": new_id("call_"),
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def finish_choice(
    call: Call,
    interaction_id: str,
    response: ModelResponse,
    parsed: ParsedMessage,
    tool_calls: list[JsonObject],
) -> Choice:
    """Text and tool calls are a view of the sampled ids; a cut answer is "length", whatever it
    holds."""
    message: JsonObject = {"role": "assistant", "content": parsed.content, "refusal": None}
    if parsed.reasoning_content is not None:
        message["reasoning_content"] = parsed.reasoning_content
    if tool_calls:
        message |= {"content": parsed.content or None, "tool_calls": tool_calls}
    finish_reason: FinishReason = "tool_calls" if tool_calls else "stop"
    return Choice(
        interaction_id=interaction_id,
        response=response,
        message=message,
        finish_reason="length" if response.stop_reason == "length" else finish_reason,
        num_reasoning_tokens=_count_reasoning(call, response.output_tokens, parsed),
    )


def _count_reasoning(call: Call, ids: Sequence[int], parsed: ParsedMessage) -> int:
    """The least number of sampled tokens that already spell the whole reasoning."""
    size = len(parsed.reasoning_content or "")
    if size == 0:
        return 0

    def num_shown(count: int) -> int:
        reader = call.session.format.decoder(prompt_ids=call.plan.input_ids)
        reader.feed(ids[:count])
        reader.finish("length")
        return len(reader.message.reasoning_content or "")

    return bisect_left(range(len(ids)), size, key=num_shown)


def record(
    call: Call,
    choices: Sequence[Choice],
    *,
    completion: JsonObject | None = None,
    response: JsonObject | None = None,
) -> None:
    """Append every choice as an interaction, siblings in order of their index."""
    turn = call.turn
    if not turn.store:
        return
    created_at = time.time()
    for choice in choices:
        call.session.cache.append(
            call.plan.interaction(
                interaction_id=choice.interaction_id,
                model_response=choice.response,
                output_message_list=[choice.message],
                completion=completion,
                response=response,
                created_at=created_at,
                temperature=turn.gconfig.logprob_temperature,
                metadata=turn.labels,
            )
        )
