from __future__ import annotations

import asyncio
from typing import Any

import pytest

pytest.importorskip("smolagents", reason="needs pip install -e '.[smolagents]'")

from scenario import call_of, check_broken_engine, check_conversation, check_failing_tool
from shop import PRICES, price, questions, reward
from smolagents import OpenAIModel, ToolCallingAgent, tool
from smolagents.monitoring import LogLevel
from smolagents_agent import SmolagentsClerk

FORKS = dict.fromkeys((1, 2, 3), "history edited")


def final(text: str) -> str:
    arguments = f'{{"answer": "{text}"}}'
    return f'<tool_call>\n{{"name": "final_answer", "arguments": {arguments}}}\n</tool_call>'


def replies(item: str) -> list[str]:
    one = PRICES[item]
    return [call_of(item), final(f"{one} cents"), call_of(item), final(f"{2 * one} cents")]


def test_the_example() -> None:
    """Its own calls go back as text, so that no prompt extends the one before."""
    check_conversation(SmolagentsClerk, forks=FORKS, replies=replies)
    check_failing_tool(SmolagentsClerk, replies=replies)
    check_broken_engine(SmolagentsClerk)


class GatewayClerk:
    """By its address alone, streamed: what is left where no client object can be given."""

    async def run(self, data: dict[str, Any], base_url: str, api_key: str) -> float:
        return await asyncio.to_thread(self.answer, data, base_url, api_key)

    def answer(self, data: dict[str, Any], base_url: str, api_key: str) -> float:
        model = OpenAIModel("local", api_base=base_url, api_key=api_key)
        clerk = ToolCallingAgent(
            tools=[tool(price)], model=model, stream_outputs=True, verbosity_level=LogLevel.OFF
        )
        for question in questions(data):
            found = clerk.run(question, reset=False)
        model.client.close()
        return reward(data, str(found))


def test_behind_the_gateway() -> None:
    check_conversation(GatewayClerk, forks=FORKS, replies=replies)
