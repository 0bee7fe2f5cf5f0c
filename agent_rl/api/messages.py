"""POST /messages, Anthropic's endpoint: the request body, the whole answer, and its errors.

The same turns as chat completions, so both record the same interactions. What the API's wire form
cannot say (log-probs, n) is in the record. ``thread`` continues from the record itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from agent_rl.api.blocks import content_blocks, messages_of, system_message, tools_of
from agent_rl.api.call import Call, read_prompt
from agent_rl.api.demands import read_demands
from agent_rl.api.failure import Failure
from agent_rl.api.fields import Fields
from agent_rl.api.generate import Choice, generate, record
from agent_rl.api.sampling import build_sampling
from agent_rl.api.session import Session
from agent_rl.api.turn import Turn, check_messages, effort_kwargs
from agent_rl.errors import NotSupportedError
from agent_rl.record.interaction import InteractionWithTokenLogpReward
from agent_rl.types import JsonObject

_MAX_STOPS = 16
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
# Agents shorten their history when an error begins with this.
_TOO_LONG = "prompt is too long: "


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageRequest:
    turn: Turn
    is_streamed: bool
    shows_thinking: bool


async def create_message(call: Call, request: MessageRequest) -> JsonObject:
    choices = await generate(call)
    message = message_object(call, request, choices[0])
    record(call, choices, completion=message)
    return message


def count_tokens(session: Session, body: JsonObject) -> JsonObject:
    """POST /messages/count_tokens: the ids that the same request would send."""
    turn = read_message_request(session, body).turn
    return {"input_tokens": len(read_prompt(session, turn).input_ids)}


def read_message_request(session: Session, body: JsonObject) -> MessageRequest:
    """Raises RequestError naming the first field that is wrong or cannot be honoured."""
    fields = Fields(body)
    messages, tools = _conversation(fields, session)
    if messages[-1]["role"] == "assistant":
        raise fields.refusal("messages", "end with the assistant's turn, which cannot be gone on")
    images = check_messages(messages, session.engine)
    answer_format, effort = _output_config(fields, session)
    choice = Fields(_tool_choice(fields))
    demands = read_demands(choice, session, tools, answer_format, where="output_config.format")
    gconfig = build_sampling(
        session, _sampling(fields), max_new_tokens=fields.integer("max_tokens", low=1)
    )
    thinking, shows_thinking = _thinking(fields, session)
    kwargs = {**(fields.mapping("chat_template_kwargs") or {}), **thinking, **effort}
    turn = Turn(
        model=fields.string("model") or session.model,
        messages=messages,
        gconfig=demands.applied(gconfig, session, top_logprobs=0),
        stop=gconfig.stop,
        grammar_param=demands.param,
        tools=tools,
        can_call_tools=demands.tool_use != "none",
        chat_template_kwargs=kwargs,
        image_data=images,
        labels=_labels(fields),
    )
    is_streamed = fields.boolean("stream")
    _refuse_other_products(fields)
    fields.finish()
    return MessageRequest(turn=turn, is_streamed=is_streamed, shows_thinking=shows_thinking)


def message_object(call: Call, request: MessageRequest, choice: Choice | None = None) -> JsonObject:
    """The Message as far as it is known: without ``choice`` it is only begun."""
    content: list[JsonObject] = []
    ending: JsonObject = {"stop_reason": None, "stop_sequence": None}
    if choice is not None:
        content = content_blocks(
            choice.message, signature=call.id, shows_thinking=request.shows_thinking
        )
        ending = stop_of(call, choice)
    return {
        "id": call.id,
        "type": "message",
        "role": "assistant",
        "model": call.turn.model,
        "content": content,
        **ending,
        "usage": message_usage(call, choice),
    }


def stop_of(call: Call, choice: Choice) -> JsonObject:
    """Why the answer ended, and the first of the stop sequences if that is why."""
    hit = None
    if call.turn.stop and choice.finish_reason == "stop":
        text = call.session.format.decode(choice.response.output_tokens)
        places = [(place, stop) for stop in call.turn.stop if (place := text.find(stop)) >= 0]
        hit = min(places)[1] if places else None
    reason = "stop_sequence" if hit is not None else _STOP_REASONS[choice.finish_reason]
    return {"stop_reason": reason, "stop_sequence": hit}


def message_usage(call: Call, choice: Choice | None) -> JsonObject:
    """Real tokens, the sampled end of turn too."""
    return {
        "input_tokens": len(call.plan.input_ids),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "output_tokens": len(choice.response.output_tokens) if choice else 0,
        "output_tokens_details": {"thinking_tokens": choice.num_reasoning_tokens if choice else 0},
    }


def message_error(failure: Failure) -> JsonObject:
    """The same failure in Anthropic's shape."""
    error = failure.body["error"]
    is_too_long = error["code"] == "context_length_exceeded"
    return {
        "type": "error",
        "error": {
            "type": _ERROR_TYPES.get(
                failure.status, "invalid_request_error" if failure.status < 500 else "api_error"
            ),
            "message": (_TOO_LONG if is_too_long else "") + error["message"],
            # Clients of threads look here whether to send the whole conversation again.
            "details": {"error_code": error["code"]},
        },
    }


def _conversation(
    fields: Fields, session: Session
) -> tuple[list[JsonObject], list[JsonObject] | None]:
    """(messages, tools). A thread that is continued keeps those of the recorded message."""
    system = fields.raw("system")
    if system is not None and not isinstance(system, str | list):
        raise fields.refusal("system", "must be a string or a list of text blocks")
    messages = system_message(system) + messages_of(fields.array("messages"))
    tools = tools_of(fields.array("tools"))
    previous = _thread(fields, session)
    if previous is None:
        return messages, tools
    messages = [*previous.messages, *previous.output_message_list, *messages]
    return messages, tools or (list(previous.tools) if previous.tools else None)


def _thread(fields: Fields, session: Session) -> InteractionWithTokenLogpReward | None:
    thread = Fields(fields.mapping("thread") or {}, where="thread")
    kind = thread.choice("type", ("create", "continue"))
    previous = thread.string("previous_message_id")
    thread.finish()
    if kind != "continue":
        return None
    interaction = session.cache.get(previous or "")
    if interaction is None:
        raise NotSupportedError(
            f"thread.previous_message_id {previous!r} is not recorded; send the whole conversation",
            param="thread.previous_message_id",
            code="thread_not_found",
        )
    return interaction


def _sampling(fields: Fields) -> dict[str, Any]:
    stops = fields.array("stop_sequences") or []
    if len(stops) > _MAX_STOPS or not all(isinstance(stop, str) and stop for stop in stops):
        raise fields.refusal("stop_sequences", f"must be up to {_MAX_STOPS} non-empty strings")
    sent = {
        "temperature": fields.number("temperature", low=0),
        "top_p": fields.number("top_p", low=1e-9, high=1),
        "top_k": fields.integer("top_k", low=0),
        "stop": tuple(stops) or None,
    }
    return {name: value for name, value in sent.items() if value is not None}


def _tool_choice(fields: Fields) -> JsonObject:
    """The same demand in chat's words."""
    choice = Fields(fields.mapping("tool_choice") or {}, where="tool_choice")
    kind = choice.choice("type", ("auto", "any", "tool", "none"))
    name = choice.string("name")
    is_single = choice.boolean("disable_parallel_tool_use")
    choice.finish()
    words: JsonObject = {"any": "required", "auto": "auto", "none": "none"}
    demand = words.get(kind or "")
    if kind == "tool":
        demand = {"type": "function", "function": {"name": name}}
    return {"tool_choice": demand, "parallel_tool_calls": not is_single}


def _output_config(fields: Fields, session: Session) -> tuple[JsonObject | None, dict[str, Any]]:
    """(format of the answer, what the template is told of the effort)."""
    inner = Fields(fields.mapping("output_config") or {}, where="output_config")
    answer_format = inner.mapping("format")
    effort = effort_kwargs(inner, "effort", session)
    inner.finish()
    return answer_format, effort


def _thinking(fields: Fields, session: Session) -> tuple[dict[str, Any], bool]:
    """(what the template is told, is the thinking shown).

    Thinking is a permission, which a model without it makes no use of. How many tokens it may take
    cannot be told to a template; ``max_tokens`` bounds it.
    """
    config = Fields(fields.mapping("thinking") or {}, where="thinking")
    kind = config.choice("type", ("enabled", "adaptive", "disabled"))
    config.integer("budget_tokens", low=1)
    shows_thinking = config.choice("display", ("summarized", "omitted")) != "omitted"
    config.finish()
    if kind is None or "enable_thinking" not in session.format.template.source:
        return {}, shows_thinking
    return {"enable_thinking": kind != "disabled"}, shows_thinking


def _labels(fields: Fields) -> dict[str, Any]:
    metadata = Fields(fields.mapping("metadata") or {}, where="metadata")
    user_id = metadata.string("user_id")
    metadata.finish()
    return {} if user_id is None else {"user": user_id}


def _refuse_other_products(fields: Fields) -> None:
    """Parameters of hosted tools, billing and the server's own editing of the context."""
    for hint in ("cache_control", "diagnostics"):
        fields.raw(hint)
    fields.only("service_tier", "auto", "standard_only")
    fields.only("speed", "standard")
    for name in ("container", "compaction", "fallbacks", "inference_geo", "user_profile_id"):
        fields.only(name)
    fields.only("mcp_servers", [])
    management = Fields(fields.mapping("context_management") or {}, where="context_management")
    for edit in management.array("edits") or ():
        # The one edit that changes nothing; coding agents send it with every request.
        if not isinstance(edit, dict) or edit.get("keep") != "all":
            raise management.refusal("edits", f"has {edit!r}, which is not supported here")
    management.finish()
