from __future__ import annotations

import asyncio
from typing import Any

import pytest

pytest.importorskip("pydantic_ai", reason="needs pip install -e '.[pydantic-ai]'")

from openai import AsyncOpenAI
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai_agent import PydanticAIClerk
from scenario import (
    Stage,
    call_of,
    check_broken_engine,
    check_conversation,
    check_failing_tool,
    check_individual,
)
from shop import INSTRUCTIONS, PRICES, price, questions, reward


def chat_model(client: AsyncOpenAI) -> OpenAIChatModel:
    return OpenAIChatModel("local", provider=OpenAIProvider(openai_client=client))


def test_the_example() -> None:
    check_conversation(PydanticAIClerk)
    check_individual(PydanticAIClerk)
    check_failing_tool(PydanticAIClerk)
    check_broken_engine(PydanticAIClerk)


class StreamingClerk:
    """``iter`` and ``node.stream`` go on to the end; ``run_stream`` stops at the first text."""

    async def run(self, data: dict[str, Any], client: AsyncOpenAI) -> float:
        clerk = Agent(chat_model(client), system_prompt=INSTRUCTIONS, tools=[price])
        history: Any = []
        for question in questions(data):
            async with clerk.iter(question, message_history=history) as run:
                async for node in run:
                    if Agent.is_model_request_node(node):
                        async with node.stream(run.ctx) as stream:
                            async for _ in stream:
                                pass
            history = run.all_messages()
        assert run.result is not None
        return reward(data, run.result.output)


class ResponsesClerk:
    async def run(self, data: dict[str, Any], client: AsyncOpenAI) -> float:
        model = OpenAIResponsesModel("local", provider=OpenAIProvider(openai_client=client))
        clerk = Agent(model, system_prompt=INSTRUCTIONS, tools=[price])
        history: Any = []
        for question in questions(data):
            result = await clerk.run(question, message_history=history)
            history = result.all_messages()
        return reward(data, result.output)


class ThreadClerk:
    """``run_sync`` in a worker thread has an event loop of its own."""

    async def run(self, data: dict[str, Any], client: AsyncOpenAI) -> float:
        return await asyncio.to_thread(self.answer, data, client)

    def answer(self, data: dict[str, Any], client: AsyncOpenAI) -> float:
        clerk = Agent(chat_model(client), system_prompt=INSTRUCTIONS, tools=[price])
        history: Any = []
        with asyncio.Runner() as runner:
            asyncio.set_event_loop(runner.get_loop())
            for question in questions(data):
                result = clerk.run_sync(question, message_history=history)
                history = result.all_messages()
        return reward(data, result.output)


@pytest.mark.parametrize("agent", [StreamingClerk, ResponsesClerk, ThreadClerk])
def test_other_ways(agent: type) -> None:
    check_conversation(agent)
    check_failing_tool(agent)


class Cents(BaseModel):
    cents: int


@pytest.mark.parametrize(
    ("output", "reply"),
    [
        (NativeOutput(Cents), '{"cents": 42}'),
        (Cents, '<tool_call>\n{"name": "final_result", "arguments": {"cents": 42}}\n</tool_call>'),
    ],
)
def test_structured_output(output: Any, reply: str) -> None:
    class Accountant:
        async def run(self, data: dict[str, Any], client: AsyncOpenAI) -> float:
            agent = Agent(chat_model(client), output_type=output)
            result = await agent.run(questions(data)[0])
            return float(result.output.cents == PRICES[data["item"]])

    stage = Stage({"corn": [reply]})
    stage.play(Accountant)
    group = stage.groups["corn"]
    assert group is not None and group["rewards"].tolist() == [1.0]


def test_an_agent_that_is_a_tool_of_another() -> None:
    """The inner agent's call is a conversation of its own: a second row."""

    class Manager:
        async def run(self, data: dict[str, Any], client: AsyncOpenAI) -> float:
            clerk = Agent(chat_model(client), system_prompt="You know prices.", tools=[])
            manager = Agent(chat_model(client), system_prompt="Ask the clerk.")

            @manager.tool_plain
            async def ask_clerk(item: str) -> str:
                return (await clerk.run(f"What does {item} cost?")).output

            result = await manager.run(questions(data)[0])
            return float(str(2 * PRICES[data["item"]]) in result.output)

    def replies(item: str) -> list[str]:
        ask = call_of(item).replace("price", "ask_clerk")
        return [ask, f"{PRICES[item]} cents", f"{2 * PRICES[item]} cents"]

    stage = Stage({item: replies(item) for item in ("corn", "flax")})
    stage.play(Manager)
    for item in ("corn", "flax"):
        first, inner, last = stage.clients[item].interactions.values()
        assert (inner.parent, last.parent) == (None, first)
        inner_row, outer_row = stage.rows(item)
        assert inner_row["input_ids"] == stage.prompts[item][1] + stage.sampled[item][1]
        assert outer_row["input_ids"] == stage.prompts[item][2] + stage.sampled[item][2]
        trained = [sum(row["loss_mask"]) for row in (inner_row, outer_row)]
        sampled = [len(ids) for ids in stage.sampled[item]]
        assert trained == [sampled[1], sampled[0] + sampled[2]]
