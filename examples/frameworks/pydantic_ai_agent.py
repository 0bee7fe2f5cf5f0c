"""A Pydantic AI agent: only its provider is ours.

python examples/frameworks/pydantic_ai_agent.py
"""

from __future__ import annotations

from typing import Any

from openai import AsyncOpenAI
from pydantic_ai import Agent, UsageLimits
from pydantic_ai.messages import ModelMessage
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from shop import INSTRUCTIONS, MAX_TURNS, price, questions, reward, train


class PydanticAIClerk:
    async def run(self, data: dict[str, Any], client: AsyncOpenAI) -> float:
        model = OpenAIChatModel("local", provider=OpenAIProvider(openai_client=client))
        clerk = Agent(model, system_prompt=INSTRUCTIONS, tools=[price])
        history: list[ModelMessage] = []
        limits = UsageLimits(request_limit=MAX_TURNS)
        for question in questions(data):
            result = await clerk.run(question, message_history=history, usage_limits=limits)
            history = result.all_messages()
        return reward(data, result.output)


if __name__ == "__main__":
    train(PydanticAIClerk)
