"""POST /responses: items in, items out, over the same turns as chat completions.

The state that ``previous_response_id`` names is the record itself: the messages of an interaction
and its answer. Nothing else is kept between calls.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from agent_rl.api.call import Call
from agent_rl.api.chat import num_cached_tokens
from agent_rl.api.demands import read_demands
from agent_rl.api.fields import Fields
from agent_rl.api.generate import Choice, generate, record
from agent_rl.api.items import messages_of, output_items, tools_of
from agent_rl.api.logprobs import response_entries
from agent_rl.api.sampling import read_sampling
from agent_rl.api.session import Session
from agent_rl.api.turn import Turn, check_messages, effort_kwargs, read_labels
from agent_rl.errors import RequestError
from agent_rl.types import JsonObject

_LOGPROBS = "message.output_text.logprobs"
# Reasoning items carry their text, so a replay needs no encrypted copy of it.
_INCLUDES = (_LOGPROBS, "reasoning.encrypted_content")


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseRequest:
    """``echo``: fields of the request that the Response object repeats."""

    turn: Turn
    is_streamed: bool
    echo: JsonObject


async def create_response(call: Call, request: ResponseRequest) -> JsonObject:
    choices = await generate(call)
    output = output_items(choices[0], logprobs=text_logprobs(call, choices[0]))
    response = response_object(call, request, choices[0], output)
    record(call, choices, response=response)
    return response


def read_response_request(session: Session, body: JsonObject) -> ResponseRequest:
    """Raises RequestError naming the first field that is wrong or cannot be honoured."""
    fields = Fields(body)
    previous = fields.string("previous_response_id")
    messages = _messages(fields, session, previous)
    images = check_messages(messages, session.engine)
    tools = tools_of(fields.array("tools") or ()) or None
    answer_format = _answer_format(fields)
    demands = read_demands(fields, session, tools, answer_format, where="text.format")
    has_logprobs, top_logprobs = _logprobs(fields)
    gconfig = read_sampling(
        fields, session, max_new_tokens=fields.integer("max_output_tokens", low=1)
    )
    reasoning, effort = _reasoning(fields, session)
    kwargs = {**(fields.mapping("chat_template_kwargs") or {}), **effort}
    turn = Turn(
        model=fields.string("model") or session.model,
        messages=messages,
        gconfig=demands.applied(gconfig, session, top_logprobs=top_logprobs),
        stop=gconfig.stop,
        grammar_param=demands.param,
        tools=tools,
        can_call_tools=demands.tool_use != "none",
        has_logprobs=has_logprobs,
        chat_template_kwargs=kwargs,
        image_data=images,
        store=fields.boolean("store", default=True),
        labels=read_labels(fields),
    )
    is_streamed = fields.boolean("stream")
    echo = {
        "instructions": fields.raw("instructions"),
        "max_output_tokens": fields.raw("max_output_tokens"),
        "metadata": fields.raw("metadata") or {},
        "parallel_tool_calls": demands.is_parallel,
        "previous_response_id": previous,
        "reasoning": {"effort": None, "summary": None, **reasoning},
        "temperature": gconfig.temperature,
        "text": {"format": answer_format or {"type": "text"}},
        "tool_choice": fields.raw("tool_choice") or "auto",
        "tools": fields.raw("tools") or [],
        "top_logprobs": top_logprobs,
        "top_p": gconfig.top_p,
        "truncation": "disabled",
        "user": fields.raw("user"),
    }
    _refuse_other_products(fields)
    fields.finish()
    return ResponseRequest(turn=turn, is_streamed=is_streamed, echo=echo)


def response_object(
    call: Call,
    request: ResponseRequest,
    choice: Choice | None = None,
    output: list[JsonObject] | None = None,
) -> JsonObject:
    """The Response as far as it is known: without ``choice`` it is still in progress."""
    status, usage, reason = "in_progress", None, None
    if choice is not None:
        is_cut = choice.finish_reason == "length"
        status = "incomplete" if is_cut else "completed"
        reason = {"reason": "max_output_tokens"} if is_cut else None
        usage = _usage(call, choice)
    return {
        "id": call.id,
        "object": "response",
        "created_at": call.created_at,
        "status": status,
        "background": False,
        "error": None,
        "incomplete_details": reason,
        "model": call.turn.model,
        "output": output or [],
        "service_tier": "default",
        "usage": usage,
        **request.echo,
    }


def text_logprobs(call: Call, choice: Choice) -> list[JsonObject]:
    has_logprobs = call.turn.has_logprobs
    return response_entries(call.session.format, choice.response) if has_logprobs else []


def _messages(fields: Fields, session: Session, previous: str | None) -> list[JsonObject]:
    """Instructions, then the conversation so far, then the new items.

    As in the OpenAI API, the instructions of the previous response are not carried over.
    """
    sent = fields.raw("input")
    if not isinstance(sent, str | list) or (not sent and previous is None):
        raise fields.refusal("input", "must be a string or a non-empty list of items")
    messages = messages_of(sent)
    if previous is not None:
        messages = _history(session, previous) + messages
    instructions = fields.string("instructions")
    if instructions is not None:
        messages = [{"role": "system", "content": instructions}, *messages]
    return messages


def _history(session: Session, previous: str) -> list[JsonObject]:
    interaction = session.cache.get(previous)
    if interaction is None or previous in session.deleted:
        raise RequestError(
            f"previous_response_id {previous!r} is not recorded (store=False keeps nothing)",
            param="previous_response_id",
            code="previous_response_not_found",
        )
    before = interaction.messages
    response = interaction.response
    if isinstance(response, dict) and response["instructions"] is not None:
        before = before[1:]
    return [*before, *interaction.output_message_list]


def _logprobs(fields: Fields) -> tuple[bool, int]:
    includes = fields.array("include") or []
    for name in includes:
        if name not in _INCLUDES:
            raise fields.refusal("include", f"has {name!r}; supported: {', '.join(_INCLUDES)}")
    top = fields.integer("top_logprobs", low=0, high=20) or 0
    return _LOGPROBS in includes or top > 0, top


def _answer_format(fields: Fields) -> JsonObject | None:
    inner = Fields(fields.mapping("text") or {}, where="text")
    answer_format = inner.mapping("format")
    inner.only("verbosity", "medium")
    inner.finish()
    return answer_format


def _reasoning(fields: Fields, session: Session) -> tuple[JsonObject, dict[str, Any]]:
    """(the ``reasoning`` object to repeat, what the template is told)."""
    reasoning = fields.mapping("reasoning") or {}
    inner = Fields(reasoning, where="reasoning")
    effort = effort_kwargs(inner, "effort", session)
    # The reasoning itself is returned, which is more than any summary.
    for name in ("summary", "generate_summary"):
        inner.only(name, "auto", "concise", "detailed")
    inner.finish()
    return reasoning, effort


def _refuse_other_products(fields: Fields) -> None:
    """Parameters of hosted state, background work and built-in tools."""
    for name in ("access_programs", "background_options", "context_management", "conversation"):
        fields.only(name)
    fields.only("background", False)
    fields.only("image")
    fields.only("max_tool_calls")
    fields.only("moderation")
    fields.only("prompt")
    fields.only("truncation", "disabled")
    options = fields.mapping("stream_options") or {}
    inner = Fields(options, where="stream_options")
    inner.only("include_obfuscation", False)
    inner.finish()


def _usage(call: Call, choice: Choice) -> JsonObject:
    prompt, sampled = len(call.plan.input_ids), len(choice.response.output_tokens)
    return {
        "input_tokens": prompt,
        "input_tokens_details": {
            "cached_tokens": num_cached_tokens([choice]),
            "cache_write_tokens": 0,
        },
        "output_tokens": sampled,
        "output_tokens_details": {"reasoning_tokens": choice.num_reasoning_tokens},
        "total_tokens": prompt + sampled,
    }
