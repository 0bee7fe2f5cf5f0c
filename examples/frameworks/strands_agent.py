"""A Strands agent: only its model is ours. It always streams.

python examples/frameworks/strands_agent.py
"""

from __future__ import annotations

from typing import Any

from openai import AsyncOpenAI
from shop import INSTRUCTIONS, price, questions, reward, train
from strands import Agent, tool
from strands.models.openai import OpenAIModel
from strands.types.exceptions import MaxTokensReachedException

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
            try:
                for question in questions(data):
                    answer = await clerk.invoke_async(question)
            except MaxTokensReachedException:
                return 0.0  # an answer without end is the policy's fault, not a broken episode
        return reward(data, str(answer))


if __name__ == "__main__":
    train(StrandsClerk)
