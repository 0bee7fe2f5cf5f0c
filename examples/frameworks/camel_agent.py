"""A CAMEL ChatAgent: only its model is ours.

python examples/frameworks/camel_agent.py
"""

from __future__ import annotations

from typing import Any

from camel.agents import ChatAgent
from camel.toolkits import FunctionTool
from shop import INSTRUCTIONS, price, questions, reward, train

from agent_rl import ArealOpenAI
from agent_rl.integrations.camel import camel_model
from agent_rl.integrations.tools import ToolErrors


class CamelClerk:
    async def run(self, data: dict[str, Any], client: ArealOpenAI) -> float:
        async with ToolErrors() as errors:
            clerk = ChatAgent(
                INSTRUCTIONS,
                model=camel_model(client),
                tools=[FunctionTool(errors.watch(price))],
            )
            for question in questions(data):
                response = await clerk.astep(question)
        return reward(data, response.msgs[0].content)


if __name__ == "__main__":
    train(CamelClerk)
