"""POST /completions, the old endpoint: prompts that no chat template touches.

A prompt's ids are sent as they are. Its interaction stands alone: no parent, nobody's parent, and
its messages are the prompt as one user message. Choice i of prompt k has index ``k * n + i``.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from agent_rl.api.call import Call, check_room, check_size, new_id
from agent_rl.api.chat import read_stream_options, usage
from agent_rl.api.fields import Fields
from agent_rl.api.generate import Choice, generate, record, together
from agent_rl.api.logprobs import token_text
from agent_rl.api.sampling import read_sampling, refuse_unsupported
from agent_rl.api.session import Session
from agent_rl.api.stream import ChoiceDelta, stream_choices
from agent_rl.api.turn import Turn, read_labels
from agent_rl.record.plan import PromptPlan, Request
from agent_rl.types import JsonObject, ModelResponse

_MAX_PROMPTS = 2048  # of one request, as in the OpenAI API


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest:
    """One turn for each prompt."""

    turns: list[Turn]
    prompts: list[tuple[int, ...]]
    is_streamed: bool
    has_usage_chunk: bool


async def text_completions(session: Session, request: CompletionRequest) -> JsonObject:
    calls = _calls(session, request)
    groups = await together([generate(call) for call in calls])
    pairs = list(zip(calls, groups, strict=True))
    completion = {
        **_head(calls[0]),
        "choices": [_choice(call, choice) for call, choices in pairs for choice in choices],
        "usage": _summed([usage(call, choices) for call, choices in pairs]),
    }
    for call, choices in pairs:
        record(call, choices, completion=completion)
    return completion


async def text_chunks(
    session: Session, request: CompletionRequest
) -> AsyncGenerator[JsonObject, None]:
    """Chunks of the one prompt. Log-probs come with the last chunk of each choice."""
    (call,) = _calls(session, request)
    head = _head(call)
    choices: list[Choice] = []
    async with aclosing(stream_choices(call)) as pieces:
        async for piece in pieces:
            if not isinstance(piece, ChoiceDelta):
                choices = piece
            elif piece.content:
                yield {**head, "choices": [_text(piece.index, piece.content)]}
    completion = {
        **head,
        "choices": [_choice(call, choice) for choice in choices],
        "usage": usage(call, choices),
    }
    record(call, choices, completion=completion)
    for choice in completion["choices"]:
        yield {**head, "choices": [{**choice, "text": ""}]}
    if request.has_usage_chunk:
        yield {**head, "choices": [], "usage": completion["usage"]}


def read_completion_request(session: Session, body: JsonObject) -> CompletionRequest:
    """Raises RequestError naming the first field that is wrong or cannot be honoured."""
    fields = Fields(body)
    model = fields.string("model") or session.model
    prompts = _prompts(fields, session)
    top_logprobs = fields.integer("logprobs", low=0, high=5)
    gconfig = read_sampling(fields, session, max_new_tokens=fields.integer("max_tokens", low=1))
    gconfig = replace(gconfig, top_logprobs=top_logprobs or 0)
    n = fields.integer("n", low=1, high=128) or 1
    store = fields.boolean("store", default=True)
    has_token_ids = fields.boolean("return_token_ids")
    labels = read_labels(fields)
    is_streamed = fields.boolean("stream")
    has_usage_chunk = read_stream_options(fields, is_streamed=is_streamed)
    fields.only("best_of", 1)
    fields.only("echo", False)
    fields.only("suffix", "")
    fields.finish()
    refuse_unsupported(gconfig, session.engine, grammar_param="grammar")
    if is_streamed and len(prompts) > 1:
        raise fields.refusal("prompt", "must be a single one with stream=true")
    turns = [
        Turn(
            model=model,
            messages=[{"role": "user", "content": text}],
            gconfig=gconfig,
            stop=gconfig.stop,
            n=n,
            has_logprobs=top_logprobs is not None,
            has_token_ids=has_token_ids,
            is_raw=True,
            store=store,
            labels=labels,
        )
        for text, _ in prompts
    ]
    return CompletionRequest(
        turns=turns,
        prompts=[ids for _, ids in prompts],
        is_streamed=is_streamed,
        has_usage_chunk=has_usage_chunk,
    )


def _prompts(fields: Fields, session: Session) -> list[tuple[str, tuple[int, ...]]]:
    """(text, ids) of each prompt; a text is encoded with the tokenizer's own special tokens."""
    prompt = fields.raw("prompt")
    is_list = isinstance(prompt, list) and bool(prompt)
    several = prompt if is_list and isinstance(prompt[0], str | list) else [prompt]
    if len(several) > _MAX_PROMPTS:
        raise fields.refusal("prompt", f"holds {len(several)} prompts; {_MAX_PROMPTS} may be sent")
    prompts = []
    for one in several:
        if isinstance(one, str):
            check_size(session, len(one))
            ids = tuple(session.format.tokenizer.encode(one))
            prompts.append((one, ids))
        elif isinstance(one, list) and all(_is_id(token_id) for token_id in one):
            prompts.append((session.format.decode(one), tuple(one)))
        else:
            raise fields.refusal("prompt", "must be a text, a list of token ids, or a list of them")
        if not prompts[-1][1]:
            raise fields.refusal("prompt", "is empty")
    return prompts


def _is_id(value: object) -> bool:
    """What a tokenizer can decode; whether the model has the token is the engine's to say."""
    return type(value) is int and 0 <= value < 1 << 31


def _calls(session: Session, request: CompletionRequest) -> list[Call]:
    """One for each prompt. No other request's messages lead to them: their keys are their own."""
    name, created_at = new_id("cmpl-"), time.time()
    calls = []
    for index, (turn, input_ids) in enumerate(zip(request.turns, request.prompts, strict=True)):
        check_room(session, turn, len(input_ids))
        rendered = Request(
            messages=turn.messages,
            tools=None,
            chat_template_type=session.chat_template_type,
            chat_template_kwargs=None,
        )
        plan = PromptPlan(request=rendered, key=hash((name, index)), input_ids=input_ids)
        calls.append(
            Call(
                session=session,
                turn=turn,
                plan=plan,
                id=name,
                created_at=created_at,
                first_index=turn.n * index,
            )
        )
    return calls


def _head(call: Call) -> JsonObject:
    return {
        "id": call.id,
        "object": "text_completion",
        "created": int(call.created_at),
        "model": call.turn.model,
    }


def _choice(call: Call, choice: Choice) -> JsonObject:
    result = _text(choice.index, choice.message["content"])
    result["finish_reason"] = choice.finish_reason
    if call.turn.has_logprobs:
        result["logprobs"] = _logprobs(call.session, choice.response)
    if call.turn.has_token_ids:
        result["token_ids"] = list(choice.response.output_tokens)
    return result


def _text(index: int, text: str) -> JsonObject:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": None}


def _logprobs(session: Session, response: ModelResponse) -> JsonObject:
    """The old shape: parallel lists, alternatives as a mapping from text to log-prob."""
    texts = [token_text(session.format, token_id)[0] for token_id in response.output_tokens]
    offsets = [0]
    for text in texts[:-1]:
        offsets.append(offsets[-1] + len(text))
    tops = response.output_top_logprobs
    return {
        "tokens": texts,
        "token_logprobs": list(response.output_logprobs),
        "text_offset": offsets[: len(texts)],
        "top_logprobs": None if tops is None else [_top(session, top) for top in tops],
    }


def _top(session: Session, alternatives: Any) -> dict[str, float]:
    return {token_text(session.format, i)[0]: logprob for i, logprob in alternatives}


def _summed(usages: list[JsonObject]) -> JsonObject:
    names = ("prompt_tokens", "completion_tokens", "total_tokens")
    return {name: sum(one[name] for one in usages) for name in names}
