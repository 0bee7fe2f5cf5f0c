"""From a Turn to finished choices: plan the prompt, ask the engine, read the ids, record.

Invariant: an interaction is recorded only when the whole call has succeeded, and between the
record and the answer there is no await, so a cancelled or failed call leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from bisect import bisect_left
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias, TypeVar

from agent_rl.api.grammar import after_reasoning
from agent_rl.api.session import Session
from agent_rl.api.turn import Turn
from agent_rl.engine.base import token_budget
from agent_rl.errors import ContextLengthError, EpisodeError, RequestError, boundary
from agent_rl.record.plan import PromptPlan
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

    index: int
    interaction_id: str
    response: ModelResponse
    message: JsonObject
    finish_reason: FinishReason
    num_reasoning_tokens: int


def new_id(prefix: str) -> str:
    return f"{prefix}{uuid.uuid4().hex}"


def plan_prompt(session: Session, turn: Turn) -> PromptPlan:
    """The ids to send and where they hang in the conversation tree.

    Raises:
        ContextLengthError: there is no room for even one new token; nothing reaches the engine.
    """
    plan = read_prompt(session, turn)
    check_room(session, turn, len(plan.input_ids))
    return plan


def read_prompt(session: Session, turn: Turn) -> PromptPlan:
    """``plan_prompt``, also of a prompt that is only to be counted.

    Raises:
        ContextLengthError: the text alone is more than the context can hold.
    """
    check_size(session, sum(map(_num_chars, turn.messages)))
    return session.cache.plan(
        turn.messages,
        turn.tools,
        session.format,
        session.chat_template_type,
        turn.chat_template_kwargs,
    )


def _num_chars(message: JsonObject) -> int:
    """Of its text; images are not looked at: the whole history is asked, at every turn."""
    content = message.get("content")
    if isinstance(content, str):
        return len(content)
    return sum(len(str(part.get("text") or "")) for part in content or ())


def check_size(session: Session, num_chars: int) -> None:
    """Refuse what cannot fit before it is encoded: that would hold up everybody for minutes."""
    limit = session.engine.max_seq_len
    if num_chars > limit and num_chars > limit * session.format.vocabulary.longest:
        least = num_chars // session.format.vocabulary.longest
        raise ContextLengthError(prompt_tokens=least, limit=limit, is_least=True)


def check_room(session: Session, turn: Turn, num_prompt_tokens: int) -> None:
    """Raises RequestError where not even one new token can follow the prompt."""
    if num_prompt_tokens == 0:
        raise RequestError("the chat template makes no text of these messages", param="messages")
    limit = session.engine.max_seq_len
    if token_budget(turn.gconfig, num_prompt_tokens, limit) < 1:
        limits = [limit, turn.gconfig.max_tokens or limit]
        raise ContextLengthError(prompt_tokens=num_prompt_tokens, limit=min(limits))


def model_request(
    session: Session, turn: Turn, plan: PromptPlan, call_id: str, index: int = 0
) -> ModelRequest:
    """Choice 0 has the call's id, choice 2 of ``chatcmpl-1`` has ``chatcmpl-1/2``.

    With a seed, choice i samples with seed + i: the same seed would give the same choice.
    """
    gconfig = turn.gconfig
    if index and gconfig.seed is not None:
        gconfig = replace(gconfig, seed=gconfig.seed + index)
    if gconfig.grammar is not None and not turn.is_raw:
        grammar = after_reasoning(gconfig.grammar, session.format, plan.input_ids)
        gconfig = replace(gconfig, grammar=grammar)
    return ModelRequest(
        rid=f"{call_id}/{index}" if index else call_id,
        input_ids=plan.input_ids,
        gconfig=gconfig,
        metadata=turn.labels,
        image_data=turn.image_data or None,
    )


async def generate(
    session: Session, turn: Turn, plan: PromptPlan, call_id: str, *, first_index: int = 0
) -> list[Choice]:
    """``turn.n`` choices, sampled concurrently. If one fails, the others are cancelled."""
    indices = range(first_index, first_index + turn.n)
    requests = [model_request(session, turn, plan, call_id, index) for index in indices]
    if len(requests) == 1:
        responses = [await _ask(session, turn, requests[0])]
    else:
        responses = await together([_ask(session, turn, request) for request in requests])
    choices = []
    for request, response in zip(requests, responses, strict=True):
        reader = new_reader(session, turn, plan)
        reader.feed(response.output_tokens)
        reader.finish(response.stop_reason)
        calls = [tool_call(call) for call in reader.message.tool_calls]
        choices.append(finish_choice(session, plan, request.rid, response, reader, calls))
    return choices


@contextmanager
def engine_call(turn: Turn) -> Iterator[None]:
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


async def _ask(session: Session, turn: Turn, request: ModelRequest) -> ModelResponse:
    with engine_call(turn):
        response = await session.engine.agenerate(request)
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


def new_reader(session: Session, turn: Turn, plan: PromptPlan) -> Reader:
    if turn.is_raw:
        fmt = session.format
        return MessageReader(
            fmt.vocabulary,
            end_ids=fmt.stop_token_ids,
            stop=turn.stop,
            prompt_ids=plan.input_ids,
        )
    return session.format.decoder(
        tools=turn.tools if turn.can_call_tools else None,
        stop=turn.stop,
        prompt_ids=plan.input_ids,
    )


def tool_call(call: ParsedToolCall) -> JsonObject:
    """A call as the caller gets it, with an id of its own: the first key to find it again by."""
    return {
        "id": new_id("call_"),
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def finish_choice(
    session: Session,
    plan: PromptPlan,
    interaction_id: str,
    response: ModelResponse,
    reader: Reader,
    calls: list[JsonObject],
) -> Choice:
    """Text and tool calls are a view of the sampled ids; a cut answer is "length", whatever it
    holds."""
    parsed = reader.message
    message: JsonObject = {"role": "assistant", "content": parsed.content, "refusal": None}
    if parsed.reasoning_content is not None:
        message["reasoning_content"] = parsed.reasoning_content
    if calls:
        message |= {"content": parsed.content or None, "tool_calls": calls}
    finish_reason: FinishReason = "tool_calls" if calls else "stop"
    return Choice(
        index=int(interaction_id.partition("/")[2] or 0),
        interaction_id=interaction_id,
        response=response,
        message=message,
        finish_reason="length" if response.stop_reason == "length" else finish_reason,
        num_reasoning_tokens=_count_reasoning(session, plan, response, parsed),
    )


def _count_reasoning(
    session: Session, plan: PromptPlan, response: ModelResponse, parsed: ParsedMessage
) -> int:
    """The least number of sampled tokens that already spell the whole reasoning."""
    size = len(parsed.reasoning_content or "")
    if size == 0:
        return 0
    ids = response.output_tokens

    def num_shown(count: int) -> int:
        reader = session.format.decoder(prompt_ids=plan.input_ids)
        reader.feed(ids[:count])
        reader.finish("length")
        return len(reader.message.reasoning_content or "")

    return bisect_left(range(len(ids)), size, key=num_shown)


def record(
    session: Session,
    turn: Turn,
    plan: PromptPlan,
    choices: Sequence[Choice],
    *,
    completion: JsonObject | None = None,
    response: JsonObject | None = None,
) -> None:
    """Append every choice as an interaction, siblings in order of their index."""
    if not turn.store:
        return
    created_at = time.time()
    for choice in choices:
        session.cache.append(
            plan.interaction(
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
