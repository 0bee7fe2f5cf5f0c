from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("agents", reason="needs pip install -e '.[openai-agents]'")

import agents
from openai import AsyncOpenAI
from openai_agents_agent import QUIETLY, TOOL, OpenAIAgentsClerk
from pydantic import BaseModel
from scenario import Stage, call_of, check_conversation, check_failing_tool, check_individual
from shop import INSTRUCTIONS, PRICES, questions, reward


def test_the_example() -> None:
    check_conversation(OpenAIAgentsClerk)
    check_individual(OpenAIAgentsClerk)
    check_failing_tool(OpenAIAgentsClerk)


class StreamingClerk:
    async def run(self, data: dict[str, Any], client: AsyncOpenAI) -> float:
        model = agents.OpenAIChatCompletionsModel("local", openai_client=client)
        clerk = agents.Agent("clerk", instructions=INSTRUCTIONS, model=model, tools=[TOOL])
        history: Any = []
        for question in questions(data):
            history.append({"role": "user", "content": question})
            result = agents.Runner.run_streamed(clerk, history, run_config=QUIETLY)
            async for _ in result.stream_events():
                pass
            history = result.to_input_list()
        return reward(data, result.final_output)


class ResponsesClerk:
    """The SDK's default: the Responses API, history in its items."""

    async def run(self, data: dict[str, Any], client: AsyncOpenAI) -> float:
        model = agents.OpenAIResponsesModel("local", openai_client=client)
        clerk = agents.Agent("clerk", instructions=INSTRUCTIONS, model=model, tools=[TOOL])
        history: Any = []
        for question in questions(data):
            history.append({"role": "user", "content": question})
            result = await agents.Runner.run(clerk, history, run_config=QUIETLY)
            history = result.to_input_list()
        return reward(data, result.final_output)


@pytest.mark.parametrize("agent", [StreamingClerk, ResponsesClerk])
def test_other_ways(agent: type) -> None:
    check_conversation(agent)
    check_failing_tool(agent)


def test_a_handoff_starts_a_branch() -> None:
    """Another agent has other instructions and tools: its prompt cannot extend the first one's."""

    class Handoff:
        async def run(self, data: dict[str, Any], client: AsyncOpenAI) -> float:
            model = agents.OpenAIChatCompletionsModel("local", openai_client=client)
            clerk = agents.Agent("clerk", instructions=INSTRUCTIONS, model=model, tools=[TOOL])
            door = agents.Agent("door", instructions="Send on.", model=model, handoffs=[clerk])
            asked = questions(data)[0]
            result = await agents.Runner.run(door, asked, run_config=QUIETLY)
            return float(str(PRICES[data["item"]]) in result.final_output)

    def replies(item: str) -> list[str]:
        send = '<tool_call>\n{"name": "transfer_to_clerk", "arguments": {}}\n</tool_call>'
        return [send, call_of(item), f"{PRICES[item]} cents"]

    check_conversation(Handoff, forks={1: "history edited"}, replies=replies)


def test_structured_output() -> None:
    class Sum(BaseModel):
        cents: int

    class Accountant:
        async def run(self, data: dict[str, Any], client: AsyncOpenAI) -> float:
            model = agents.OpenAIChatCompletionsModel("local", openai_client=client)
            agent = agents.Agent("accountant", model=model, output_type=Sum)
            result = await agents.Runner.run(agent, questions(data)[0], run_config=QUIETLY)
            return float(result.final_output.cents == PRICES[data["item"]])

    stage = Stage({"corn": ['{"cents": 42}']})
    stage.play(Accountant)
    group = stage.groups["corn"]
    assert group is not None and group["rewards"].tolist() == [1.0]
