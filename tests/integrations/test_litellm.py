from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("litellm", reason="needs pip install -e '.[litellm]'")

import litellm
from litellm_agent import TOOLS, LiteLLMClerk
from openai import AsyncOpenAI
from scenario import check_conversation, check_failing_tool, check_individual
from shop import INSTRUCTIONS, price, questions, reward


def test_the_example() -> None:
    check_conversation(LiteLLMClerk)
    check_individual(LiteLLMClerk)
    check_failing_tool(LiteLLMClerk)


class StreamingClerk:
    async def run(self, data: dict[str, Any], client: AsyncOpenAI) -> float:
        messages: list[Any] = [{"role": "system", "content": INSTRUCTIONS}]
        for question in questions(data):
            messages.append({"role": "user", "content": question})
            while True:
                stream = await litellm.acompletion(
                    model="openai/local", messages=messages, tools=TOOLS, client=client, stream=True
                )
                chunks = [chunk async for chunk in stream]
                answer = litellm.stream_chunk_builder(chunks).choices[0].message
                messages.append(answer.model_dump())
                if not answer.tool_calls:
                    break
                for call in answer.tool_calls:
                    result = str(price(**json.loads(call.function.arguments)))
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        return reward(data, answer.content)


def test_streaming() -> None:
    check_conversation(StreamingClerk)
