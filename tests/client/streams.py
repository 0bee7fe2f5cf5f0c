"""Chunks of a streamed completion, put together by hand."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from openai.types.chat import ChatCompletionChunk

HI = [{"role": "user", "content": "hi"}]


class Joined:
    """Chunks put together by hand, choice by choice."""

    def __init__(self) -> None:
        self.chunks: list[ChatCompletionChunk] = []
        self.content: dict[int, str] = defaultdict(str)
        self.reasoning: dict[int, str] = defaultdict(str)
        self.calls: dict[int, dict[int, list[str]]] = defaultdict(dict)
        self.finish: dict[int, str] = {}
        self.logprobs: dict[int, list[Any]] = defaultdict(list)

    def add(self, chunk: ChatCompletionChunk) -> None:
        ChatCompletionChunk.model_validate(chunk.to_dict())
        self.chunks.append(chunk)
        for choice in chunk.choices:
            delta = choice.delta
            self.content[choice.index] += delta.content or ""
            self.reasoning[choice.index] += getattr(delta, "reasoning_content", None) or ""
            for call in delta.tool_calls or ():
                parts = self.calls[choice.index].setdefault(call.index, [call.id or "", "", ""])
                assert call.function is not None
                parts[1] += call.function.name or ""
                parts[2] += call.function.arguments or ""
            if choice.logprobs is not None:
                self.logprobs[choice.index] += choice.logprobs.content or []
            if choice.finish_reason is not None:
                assert choice.index not in self.finish
                self.finish[choice.index] = choice.finish_reason


async def joined(client: Any, **params: Any) -> Joined:
    call = {"model": "m", "messages": HI, "stream": True, **params}
    result = Joined()
    async for chunk in await client.chat.completions.create(**call):
        result.add(chunk)
    return result
