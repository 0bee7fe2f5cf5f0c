"""An agent on the Anthropic SDK: the Messages API, and a tool loop that you write.

python examples/frameworks/anthropic_agent.py
"""

from __future__ import annotations

from typing import Any

from anthropic.types import MessageParam, ToolParam
from shop import INSTRUCTIONS, MAX_TURNS, price, questions, reward, train

from agent_rl import ArealOpenAI
from agent_rl.integrations.anthropic import anthropic_client

ITEM = {"type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]}
TOOL = ToolParam(name="price", description=price.__doc__ or "", input_schema=ITEM)


class AnthropicClerk:
    async def run(self, data: dict[str, Any], client: ArealOpenAI) -> float:
        claude = anthropic_client(client)
        messages: list[MessageParam] = []
        for question in questions(data):
            messages.append({"role": "user", "content": question})
            for _ in range(MAX_TURNS):
                answer = await claude.messages.create(
                    model="local",
                    max_tokens=64,
                    system=INSTRUCTIONS,
                    messages=messages,
                    tools=[TOOL],
                )
                messages.append({"role": "assistant", "content": answer.content})
                calls = [block for block in answer.content if block.type == "tool_use"]
                if not calls:
                    break
                results: Any = [
                    {
                        "type": "tool_result",
                        "tool_use_id": call.id,
                        "content": str(price(**call.input)),
                    }
                    for call in calls
                ]
                messages.append({"role": "user", "content": results})
        return reward(data, "".join(b.text for b in answer.content if b.type == "text"))


if __name__ == "__main__":
    train(AnthropicClerk)
