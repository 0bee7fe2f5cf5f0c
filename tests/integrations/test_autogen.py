from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("autogen_agentchat", reason="needs pip install -e '.[autogen]'")

from autogen_agent import AutoGenClerk, model_of
from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.conditions import MaxMessageTermination
from autogen_agentchat.messages import StructuredMessage
from autogen_agentchat.teams import RoundRobinGroupChat
from openai import AsyncOpenAI
from pydantic import BaseModel
from scenario import Stage, check_conversation, check_failing_tool, check_individual
from shop import INSTRUCTIONS, MAX_TURNS, PRICES, price, questions, reward


def test_the_example() -> None:
    check_conversation(AutoGenClerk)
    check_individual(AutoGenClerk)
    check_failing_tool(AutoGenClerk)


class StreamingClerk:
    async def run(self, data: dict[str, Any], client: AsyncOpenAI) -> float:
        clerk = AssistantAgent(
            "clerk",
            model_client=model_of(client),
            tools=[price],
            system_message=INSTRUCTIONS,
            max_tool_iterations=MAX_TURNS,
            model_client_stream=True,
        )
        for question in questions(data):
            async for event in clerk.run_stream(task=question):
                last = event
        return reward(data, last.messages[-1].to_text())  # type: ignore[union-attr]


def test_streaming() -> None:
    check_conversation(StreamingClerk)


class Cents(BaseModel):
    cents: int


def test_structured_output() -> None:
    class Accountant:
        async def run(self, data: dict[str, Any], client: AsyncOpenAI) -> float:
            agent = AssistantAgent(
                "accountant", model_client=model_of(client), output_content_type=Cents
            )
            result = await agent.run(task=questions(data)[0])
            found = result.messages[-1]
            assert isinstance(found, StructuredMessage)
            return float(found.content.cents == PRICES[data["item"]])

    stage = Stage({"corn": ['{"cents": 42}']})
    stage.play(Accountant)
    group = stage.groups["corn"]
    assert group is not None and group["rewards"].tolist() == [1.0]


def test_a_team_is_a_row_for_each_member() -> None:
    """Each member has its own view of the talk; its later call extends its earlier one."""

    class Team:
        async def run(self, data: dict[str, Any], client: AsyncOpenAI) -> float:
            members: list[Any] = [
                AssistantAgent(name, model_client=model_of(client), system_message=f"You {name}.")
                for name in ("ask", "answer")
            ]
            team = RoundRobinGroupChat(members, termination_condition=MaxMessageTermination(5))
            result = await team.run(task=questions(data)[0])
            return reward(data, result.messages[-1].to_text())

    def replies(item: str) -> list[str]:
        return ["How much is it?", "It is cheap.", "How much for two?", f"{2 * PRICES[item]} cents"]

    stage = Stage({item: replies(item) for item in ("corn", "flax")})
    stage.play(Team)
    for item in ("corn", "flax"):
        first, second, third, fourth = stage.clients[item].interactions.values()
        assert (third.parent, fourth.parent) == (first, second)
        rows, expected = stage.rows(item), stage.expected_rows(item)
        assert len(rows) == len(expected) == 2
        assert [row["input_ids"] for row in rows] == [row["input_ids"] for row in expected]
