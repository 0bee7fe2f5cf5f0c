"""A CrewAI agent: only its LLM is ours.

python examples/frameworks/crewai_agent.py
"""

from __future__ import annotations

import os
from typing import Any

os.environ["CREWAI_DISABLE_TELEMETRY"] = "true"
os.environ["CREWAI_TRACING_ENABLED"] = "false"

from crewai import Agent, Crew, Task
from crewai.tools import tool
from shop import INSTRUCTIONS, MAX_TURNS, price, questions, reward, train

from agent_rl import ArealOpenAI
from agent_rl.integrations.crewai import CrewArealLLM
from agent_rl.integrations.tools import ToolErrors


class CrewAIClerk:
    async def run(self, data: dict[str, Any], client: ArealOpenAI) -> float:
        async with ToolErrors() as errors:
            clerk = Agent(
                role="clerk",
                goal="tell prices",
                backstory=INSTRUCTIONS,
                llm=CrewArealLLM(client),
                tools=[tool("price")(errors.watch(price))],
                max_iter=MAX_TURNS,
            )
            tasks = [
                Task(description=question, expected_output="a price", agent=clerk)
                for question in questions(data)
            ]
            result = await Crew(agents=[clerk], tasks=tasks).kickoff_async()
        return reward(data, result.raw)


if __name__ == "__main__":
    train(CrewAIClerk)
