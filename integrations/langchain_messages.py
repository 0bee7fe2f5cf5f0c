"""Between the openai SDK's answers and LangChain's messages, for ``langchain.ChatArealOpenAI``."""

from __future__ import annotations

from typing import Any

from langchain_core.messages import AIMessage, AIMessageChunk, ToolCallChunk
from langchain_core.messages.ai import OutputTokenDetails, UsageMetadata
from langchain_core.messages.tool import tool_call_chunk
from langchain_core.output_parsers.openai_tools import make_invalid_tool_call, parse_tool_call
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult


def says(message: AIMessage) -> tuple[Any, ...]:
    reasoning = message.additional_kwargs.get("reasoning_content")
    return (message.content, message.tool_calls, message.invalid_tool_calls, reasoning)


def as_message(sampled: dict[str, Any], **fields: Any) -> AIMessage:
    valid, invalid = [], []
    for call in sampled.get("tool_calls") or []:
        try:
            valid.append(parse_tool_call(call, return_id=True))
        except ValueError as error:  # OutputParserException: arguments are not JSON
            invalid.append(make_invalid_tool_call(call, str(error)))
    reasoning = sampled.get("reasoning_content")
    return AIMessage(
        content=sampled.get("content") or "",
        additional_kwargs={} if reasoning is None else {"reasoning_content": reasoning},
        tool_calls=valid,
        invalid_tool_calls=invalid,
        **fields,
    )


def as_result(completion: Any) -> ChatResult:
    usage = _usage(completion.usage)
    generations = []
    for choice in completion.choices:
        name = f"{completion.id}/{choice.index}" if choice.index else completion.id
        message = as_message(
            choice.message.to_dict(),
            response_metadata={"id": name, **_metadata(completion.model, choice)},
            usage_metadata=usage,
        )
        generations.append(ChatGeneration(message=message))
    return ChatResult(generations=generations)


def as_chunk(event: Any) -> ChatGenerationChunk:
    """The id stands on the chunk that ends the answer: by then it is recorded."""
    usage = None if event.usage is None else _usage(event.usage)
    if not event.choices:
        return ChatGenerationChunk(message=AIMessageChunk(content="", usage_metadata=usage))
    (choice,) = event.choices
    sampled = choice.delta.to_dict()
    reasoning = sampled.get("reasoning_content")
    message = AIMessageChunk(
        content=sampled.get("content") or "",
        additional_kwargs={} if reasoning is None else {"reasoning_content": reasoning},
        tool_call_chunks=[_call_chunk(call) for call in sampled.get("tool_calls") or []],
        usage_metadata=usage,
    )
    if choice.finish_reason is not None:
        message.response_metadata = {"id": event.id, **_metadata(event.model, choice)}
    return ChatGenerationChunk(message=message)


def _call_chunk(call: dict[str, Any]) -> ToolCallChunk:
    function = call["function"]
    return tool_call_chunk(
        name=function.get("name"),
        args=function.get("arguments"),
        id=call.get("id"),
        index=call["index"],
    )


def _metadata(model: str, choice: Any) -> dict[str, Any]:
    found = {"finish_reason": choice.finish_reason, "model_name": model}
    return found if choice.logprobs is None else {**found, "logprobs": choice.logprobs.to_dict()}


def _usage(usage: Any) -> UsageMetadata:
    reasoning = usage.completion_tokens_details.reasoning_tokens
    return UsageMetadata(
        input_tokens=usage.prompt_tokens,
        output_tokens=usage.completion_tokens,
        total_tokens=usage.total_tokens,
        output_token_details=OutputTokenDetails(reasoning=reasoning),
    )
