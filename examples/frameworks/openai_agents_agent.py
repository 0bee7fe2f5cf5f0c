"""An agent of the OpenAI Agents SDK: only its model is ours.

python examples/frameworks/openai_agents_agent.py
"""

from __future__ import annotations

from typing import Any

from agents import Agent, OpenAIChatCompletionsModel, RunConfig, Runner, TResponseInputItem
from agents import function_tool as tool
from openai import AsyncOpenAI
from shop import INSTRUCTIONS, MAX_TURNS, price, questions, reward, train

# failure_error_function=None: an exception in the tool ends the episode, it is not told to the
# model. tracing_disabled: the SDK would send its traces to api.openai.com.
TOOL = tool(price, failure_error_function=None)
QUIETLY = RunConfig(tracing_disabled=True)


class OpenAIAgentsClerk:
    async def run(self, data: dict[str, Any], client: AsyncOpenAI) -> float:
        model = OpenAIChatCompletionsModel("local", openai_client=client)
        clerk = Agent("clerk", instructions=INSTRUCTIONS, model=model, tools=[TOOL])
        history: list[TResponseInputItem] = []
        for question in questions(data):
            history.append({"role": "user", "content": question})
            result = await Runner.run(clerk, history, run_config=QUIETLY, max_turns=MAX_TURNS)
            history = result.to_input_list()
        return reward(data, result.final_output)


if __name__ == "__main__":
    train(OpenAIAgentsClerk)
