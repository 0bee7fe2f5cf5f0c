"""An AutoGen AssistantAgent: only its model client is ours.

python examples/frameworks/autogen_agent.py
"""

from __future__ import annotations

from typing import Any

from autogen_agentchat.agents import AssistantAgent
from autogen_core.models import ModelInfo
from autogen_ext.models.openai import BaseOpenAIChatCompletionClient
from openai import AsyncOpenAI
from shop import INSTRUCTIONS, MAX_TURNS, price, questions, reward, train

from agent_rl.integrations.tools import ToolErrors


def model_of(client: AsyncOpenAI) -> BaseOpenAIChatCompletionClient:
    abilities = ModelInfo(
        vision=False,
        function_calling=True,
        json_output=True,
        structured_output=True,
        family="unknown",
    )
    return BaseOpenAIChatCompletionClient(
        client=client, create_args={"model": "local"}, model_info=abilities
    )


class AutoGenClerk:
    async def run(self, data: dict[str, Any], client: AsyncOpenAI) -> float:
        async with ToolErrors() as errors:
            clerk = AssistantAgent(
                "clerk",
                model_client=model_of(client),
                tools=[errors.watch(price)],
                system_message=INSTRUCTIONS,
                max_tool_iterations=MAX_TURNS,
            )
            for question in questions(data):
                result = await clerk.run(task=question)
        return reward(data, result.messages[-1].to_text())


if __name__ == "__main__":
    train(AutoGenClerk)
