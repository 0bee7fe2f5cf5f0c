from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("strands", reason="needs pip install -e '.[strands]'")

from openai import AsyncOpenAI
from pydantic import BaseModel
from scenario import Stage, check_conversation, check_failing_tool, check_individual
from shop import PRICES, questions
from strands import Agent
from strands.models.openai import OpenAIModel
from strands_agent import StrandsClerk


def test_the_example() -> None:
    check_conversation(StrandsClerk)
    check_individual(StrandsClerk)
    check_failing_tool(StrandsClerk)


class Cents(BaseModel):
    cents: int


def test_structured_output() -> None:
    class Accountant:
        async def run(self, data: dict[str, Any], client: AsyncOpenAI) -> float:
            model = OpenAIModel(client=client, model_id="local")
            agent = Agent(model=model, callback_handler=None)
            found = await agent.invoke_async(questions(data)[0], structured_output_model=Cents)
            return float(found.structured_output.cents == PRICES[data["item"]])

    called = '<tool_call>\n{"name": "Cents", "arguments": {"cents": 42}}\n</tool_call>'
    stage = Stage({"corn": [called]})
    stage.play(Accountant)
    group = stage.groups["corn"]
    assert group is not None and group["rewards"].tolist() == [1.0]
