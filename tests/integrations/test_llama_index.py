from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("llama_index.llms.openai_like", reason="needs pip install -e '.[llama-index]'")

from llama_index.core.agent.workflow import AgentWorkflow, FunctionAgent
from llama_index_agent import LlamaIndexClerk, llm_of
from pydantic import BaseModel
from scenario import Stage, call_of, check_conversation, check_failing_tool, check_individual
from shop import INSTRUCTIONS, PRICES, price, questions

from agent_rl import ArealOpenAI


def test_the_example() -> None:
    """FunctionAgent streams its model calls by default."""
    check_conversation(LlamaIndexClerk)
    check_individual(LlamaIndexClerk)
    check_failing_tool(LlamaIndexClerk)


def test_two_agents_of_a_workflow() -> None:
    """The second agent has other instructions and tools: its calls are a row of their own."""

    class Handoff:
        async def run(self, data: dict[str, Any], client: ArealOpenAI) -> float:
            llm = llm_of(client)
            door = FunctionAgent(
                name="door",
                description="greets",
                llm=llm,
                tools=[],
                system_prompt="Send on.",
                can_handoff_to=["clerk"],
            )
            clerk = FunctionAgent(
                name="clerk",
                description="knows prices",
                llm=llm,
                tools=[price],
                system_prompt=INSTRUCTIONS,
            )
            team = AgentWorkflow(agents=[door, clerk], root_agent="door")
            answer = await team.run(questions(data)[0])
            return float(str(PRICES[data["item"]]) in str(answer))

    def replies(item: str) -> list[str]:
        send = '{"name": "handoff", "arguments": {"to_agent": "clerk", "reason": "price"}}'
        return [f"<tool_call>\n{send}\n</tool_call>", call_of(item), f"{PRICES[item]} cents"]

    check_conversation(Handoff, forks={1: "history edited"}, replies=replies)


class Cents(BaseModel):
    cents: int


def test_structured_output() -> None:
    class Accountant:
        async def run(self, data: dict[str, Any], client: ArealOpenAI) -> float:
            model = llm_of(client, should_use_structured_outputs=True).as_structured_llm(Cents)
            found = await model.acomplete(questions(data)[0])
            return float(found.raw.cents == PRICES[data["item"]])

    stage = Stage({"corn": ['{"cents": 42}']})
    stage.play(Accountant)
    group = stage.groups["corn"]
    assert group is not None and group["rewards"].tolist() == [1.0]
