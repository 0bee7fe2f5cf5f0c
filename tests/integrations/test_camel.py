from __future__ import annotations

import asyncio
from typing import Any

import pytest

pytest.importorskip("camel", reason="needs pip install -e '.[camel]'")

from camel.agents import ChatAgent
from camel.toolkits import FunctionTool
from camel_agent import CamelClerk
from pydantic import BaseModel
from scenario import Stage, check_conversation, check_failing_tool, check_individual
from shop import INSTRUCTIONS, PRICES, price, questions, reward

from agent_rl import ArealOpenAI
from agent_rl.integrations.camel import camel_model


def test_the_example() -> None:
    check_conversation(CamelClerk)
    check_individual(CamelClerk)
    check_failing_tool(CamelClerk)


class ThreadClerk:
    async def run(self, data: dict[str, Any], client: ArealOpenAI) -> float:
        return await asyncio.to_thread(self.answer, data, client)

    def answer(self, data: dict[str, Any], client: ArealOpenAI) -> float:
        clerk = ChatAgent(INSTRUCTIONS, model=camel_model(client), tools=[FunctionTool(price)])
        for question in questions(data):
            response = clerk.step(question)
        return reward(data, response.msgs[0].content)


class StreamingClerk:
    async def run(self, data: dict[str, Any], client: ArealOpenAI) -> float:
        model = camel_model(client, stream=True)
        tools = [FunctionTool(price)]
        clerk = ChatAgent(INSTRUCTIONS, model=model, tools=tools, stream_accumulate=False)
        for question in questions(data):
            texts = [r.msgs[0].content async for r in await clerk.astep(question) if r.msgs]
        return reward(data, "".join(texts))


@pytest.mark.parametrize("agent", [ThreadClerk, StreamingClerk])
def test_other_ways(agent: type) -> None:
    check_conversation(agent)


class Cents(BaseModel):
    cents: int


def test_structured_output() -> None:
    class Accountant:
        async def run(self, data: dict[str, Any], client: ArealOpenAI) -> float:
            agent = ChatAgent("You count.", model=camel_model(client))
            response = await agent.astep(questions(data)[0], response_format=Cents)
            return float(response.msgs[0].parsed.cents == PRICES[data["item"]])

    stage = Stage({"corn": ['{"cents": 42}']})
    stage.play(Accountant)
    group = stage.groups["corn"]
    assert group is not None and group["rewards"].tolist() == [1.0]
