from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("crewai", reason="needs pip install -e '.[crewai]'")

from crewai import Agent
from crewai_agent import CrewAIClerk
from pydantic import BaseModel
from scenario import Stage, check_conversation, check_failing_tool, check_individual
from shop import PRICES, questions

from agent_rl import ArealOpenAI
from agent_rl.integrations.crewai import CrewArealLLM


def test_the_example() -> None:
    """Each task is a conversation of its own; the results of earlier ones are told to it."""
    check_conversation(CrewAIClerk, forks={2: None})
    check_individual(CrewAIClerk)
    check_failing_tool(CrewAIClerk)


class Cents(BaseModel):
    cents: int


def test_structured_output() -> None:
    class Accountant:
        async def run(self, data: dict[str, Any], client: ArealOpenAI) -> float:
            agent = Agent(role="a", goal="count", backstory="b", llm=CrewArealLLM(client))
            found = await agent.kickoff_async(questions(data)[0], response_format=Cents)
            return float(found.pydantic.cents == PRICES[data["item"]])

    stage = Stage({"corn": ['{"cents": 42}'] * 2})
    stage.play(Accountant)
    group = stage.groups["corn"]
    assert group is not None and group["rewards"].tolist() == [1.0]
