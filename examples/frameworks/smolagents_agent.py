"""A smolagents ToolCallingAgent: it is synchronous, so it runs in a thread on client.sync.

It writes its own calls into the history as text, so that each model call is a row of its own. It
demands a tool call every time: the engine must honour grammars (LocalEngine does with
`pip install -e '.[guided]'`).

python examples/frameworks/smolagents_agent.py
"""

from __future__ import annotations

import asyncio
from typing import Any

from shop import INSTRUCTIONS, MAX_TURNS, price, questions, reward, train
from smolagents import OpenAIModel, ToolCallingAgent, tool
from smolagents.monitoring import LogLevel

from agent_rl import ArealOpenAI
from agent_rl.integrations.tools import ToolErrors


class SmolagentsClerk:
    async def run(self, data: dict[str, Any], client: ArealOpenAI) -> float:
        async with ToolErrors() as errors:
            lookup = tool(price)
            lookup.forward = errors.watch(lookup.forward)
            return await asyncio.to_thread(self.answer, data, client, lookup)

    def answer(self, data: dict[str, Any], client: ArealOpenAI, lookup: Any) -> float:
        model = OpenAIModel("local", api_key="none")
        model.client = client.sync
        clerk = ToolCallingAgent(
            tools=[lookup],
            model=model,
            instructions=INSTRUCTIONS,
            max_steps=MAX_TURNS,
            verbosity_level=LogLevel.OFF,
        )
        for question in questions(data):
            found = clerk.run(question, reset=False)
        return reward(data, str(found))


if __name__ == "__main__":
    train(SmolagentsClerk)
