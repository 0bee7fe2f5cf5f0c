"""POST /chat/completions: the request body, and the answer that is not streamed.

Every field of the body is read here or in ``sampling`` and ``turn``; one that nobody reads is
refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from agent_rl.api.call import Call
from agent_rl.api.demands import read_demands
from agent_rl.api.fields import Fields
from agent_rl.api.generate import Choice, generate, record
from agent_rl.api.logprobs import response_entries
from agent_rl.api.sampling import read_logprobs, read_sampling
from agent_rl.api.session import Session
from agent_rl.api.turn import Turn, check_messages, check_tools, effort_kwargs, read_labels
from agent_rl.types import JsonObject


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    turn: Turn
    is_streamed: bool
    has_usage_chunk: bool


async def chat_completions(call: Call) -> JsonObject:
    choices = await generate(call)
    completion = completion_object(call, choices)
    record(call, choices, completion=completion)
    return completion


def completion_object(call: Call, choices: list[Choice]) -> JsonObject:
    completion: JsonObject = {
        "id": call.id,
        "object": "chat.completion",
        "created": int(call.created_at),
        "model": call.turn.model,
        "choices": [_choice(call, choice) for choice in choices],
        "usage": usage(call, choices),
    }
    if call.turn.has_token_ids:
        completion["prompt_token_ids"] = list(call.plan.input_ids)
    return completion


def read_chat_request(session: Session, body: JsonObject) -> ChatRequest:
    """Raises RequestError naming the first field that is wrong or cannot be honoured."""
    fields = Fields(body)
    model = fields.string("model") or session.model
    images = check_messages(fields.raw("messages"), session.engine)
    tools = check_tools(fields.array("tools"))
    demands = read_demands(
        fields, session, tools, fields.mapping("response_format"), where="response_format"
    )
    has_logprobs, top_logprobs = read_logprobs(fields)
    gconfig = read_sampling(fields, session, max_new_tokens=_max_new_tokens(fields))
    turn = Turn(
        model=model,
        messages=body["messages"],
        gconfig=demands.applied(gconfig, session, top_logprobs=top_logprobs),
        stop=gconfig.stop,
        grammar_param=demands.param,
        tools=tools,
        can_call_tools=demands.tool_use != "none",
        n=fields.integer("n", low=1, high=128) or 1,
        has_logprobs=has_logprobs,
        has_token_ids=fields.boolean("return_token_ids"),
        chat_template_kwargs=_template_kwargs(fields, session),
        image_data=images,
        store=fields.boolean("store", default=True),
        labels=read_labels(fields),
    )
    is_streamed = fields.boolean("stream")
    has_usage_chunk = read_stream_options(fields, is_streamed=is_streamed)
    _refuse_other_products(fields)
    fields.finish()
    return ChatRequest(turn=turn, is_streamed=is_streamed, has_usage_chunk=has_usage_chunk)


def usage(call: Call, choices: list[Choice]) -> JsonObject:
    """Real tokens: every sampled one counts, the end-of-turn token too. Unknown reuse is 0."""
    prompt = len(call.plan.input_ids)
    sampled = sum(len(choice.response.output_tokens) for choice in choices)
    reasoning = sum(choice.num_reasoning_tokens for choice in choices)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": sampled,
        "total_tokens": prompt + sampled,
        "prompt_tokens_details": {"cached_tokens": num_cached_tokens(choices)},
        "completion_tokens_details": {"reasoning_tokens": reasoning},
    }


def num_cached_tokens(choices: Sequence[Choice]) -> int:
    """Prompt tokens that the engine had before the call: later choices find the first one's too."""
    known = [choice.response.num_cached_tokens or 0 for choice in choices]
    return min(known, default=0)


def chat_logprobs(content: list[JsonObject]) -> JsonObject:
    return {"content": content, "refusal": None}


def _choice(call: Call, choice: Choice) -> JsonObject:
    logprobs = None
    if call.turn.has_logprobs:
        logprobs = chat_logprobs(response_entries(call.session.format, choice.response))
    result: JsonObject = {
        "index": choice.index,
        "message": choice.message,
        "finish_reason": choice.finish_reason,
        "logprobs": logprobs,
    }
    if call.turn.has_token_ids:
        result["token_ids"] = list(choice.response.output_tokens)
    return result


def _max_new_tokens(fields: Fields) -> int | None:
    old = fields.integer("max_tokens", low=1)
    new = fields.integer("max_completion_tokens", low=1)
    if old is not None and new is not None:
        raise fields.refusal("max_tokens", "and max_completion_tokens are the same limit: send one")
    return old if new is None else new


def _template_kwargs(fields: Fields, session: Session) -> dict[str, Any]:
    """``reasoning_effort`` reaches the model through the template, or not at all."""
    kwargs = dict(fields.mapping("chat_template_kwargs") or {})
    return kwargs | effort_kwargs(fields, "reasoning_effort", session)


def read_stream_options(fields: Fields, *, is_streamed: bool) -> bool:
    options = fields.mapping("stream_options")
    if options is None:
        return False
    if not is_streamed:
        raise fields.refusal("stream_options", "is only allowed with stream=true")
    inner = Fields(options, where="stream_options")
    has_usage_chunk = inner.boolean("include_usage")
    inner.only("include_obfuscation", False)
    inner.finish()
    return has_usage_chunk


def _refuse_other_products(fields: Fields) -> None:
    """Parameters of audio, search, moderation and prediction: nothing here could honour them."""
    fields.only("audio")
    fields.only("function_call", "none")
    fields.only("functions", [])
    fields.only("modalities", ["text"])
    fields.only("moderation")
    fields.only("prediction")
    fields.only("verbosity", "medium")
    fields.only("web_search_options")
