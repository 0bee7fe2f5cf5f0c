"""A Strands agent: only its model is ours. It always streams.

python examples/frameworks/strands_agent.py
"""

from __future__ import annotations

from typing import Any

from openai import AsyncOpenAI
from shop import INSTRUCTIONS, price, questions, reward, train
from strands import Agent, tool
from strands.models.openai import OpenAIModel

from agent_rl.integrations.tools import ToolErrors


class StrandsClerk:
    async def run(self, data: dict[str, Any], client: AsyncOpenAI) -> float:
        model = OpenAIModel(client=client, model_id="local")
        async with ToolErrors() as errors:
            clerk = Agent(
                model=model,
                system_prompt=INSTRUCTIONS,
                tools=[tool(errors.watch(price))],
                callback_handler=None,
            )
            for question in questions(data):
                answer = await clerk.invoke_async(question)
        return reward(data, str(answer))


if __name__ == "__main__":
    train(StrandsClerk)
