"""LiteLLM: an openai/ model takes our client; the loop is yours.

python examples/frameworks/litellm_agent.py
"""

from __future__ import annotations

import json
import os
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else its import looks for a newer one

import litellm
from openai import AsyncOpenAI
from shop import INSTRUCTIONS, MAX_TURNS, price, questions, reward, train

ITEM = {"type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]}
FUNCTION = {"name": "price", "description": price.__doc__, "parameters": ITEM}
TOOLS = [{"type": "function", "function": FUNCTION}]


class LiteLLMClerk:
    async def run(self, data: dict[str, Any], client: AsyncOpenAI) -> float:
        messages: list[Any] = [{"role": "system", "content": INSTRUCTIONS}]
        for question in questions(data):
            messages.append({"role": "user", "content": question})
            for _ in range(MAX_TURNS):
                completion = await litellm.acompletion(
                    model="openai/local", messages=messages, tools=TOOLS, client=client
                )
                answer = completion.choices[0].message
                messages.append(answer.model_dump())
                if not answer.tool_calls:
                    break
                for call in answer.tool_calls:
                    result = str(price(**json.loads(call.function.arguments)))
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        return reward(data, answer.content or "")


if __name__ == "__main__":
    train(LiteLLMClerk)
