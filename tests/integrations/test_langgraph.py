from __future__ import annotations

from functools import partial
from typing import Any

import pytest

pytest.importorskip("langgraph", reason="needs pip install -e '.[langgraph]'")

from langchain_core.messages import SystemMessage
from langgraph.graph import START, MessagesState, StateGraph
from langgraph_agent import LangGraphClerk, compiled
from scenario import Stage, check_conversation, check_failing_tool, check_individual, played
from shop import questions, reward

from agent_rl import ArealOpenAI
from agent_rl.integrations.langchain import ChatArealOpenAI, use_client, wrap


def test_the_example() -> None:
    check_conversation(LangGraphClerk)
    check_individual(LangGraphClerk)
    check_failing_tool(LangGraphClerk)


class StreamingClerk:
    """``stream_mode="messages"`` makes the graph stream its model calls by itself."""

    async def run(self, data: dict[str, Any], client: ArealOpenAI) -> float:
        texts = {}
        with use_client(client):
            events = compiled.astream({"questions": questions(data)}, stream_mode="messages")
            async for chunk, _ in events:
                texts[chunk.id] = texts.get(chunk.id, "") + chunk.text
        return reward(data, list(texts.values())[-1])


def test_a_graph_that_streams() -> None:
    check_conversation(StreamingClerk)
    check_failing_tool(StreamingClerk)


def test_two_agents_of_a_graph_are_two_rows() -> None:
    """Other instructions, another conversation; each goes on where it was."""

    async def speak(state: MessagesState, system: str) -> dict[str, Any]:
        answer = await ChatArealOpenAI().ainvoke([SystemMessage(system), *state["messages"]])
        return {"messages": [answer]}

    talk = StateGraph(MessagesState)
    talk.add_node("buyer", partial(speak, system="You buy."))
    talk.add_node("seller", partial(speak, system="You sell."))
    talk.add_edge(START, "buyer")
    talk.add_edge("buyer", "seller")
    agent = wrap(
        talk.compile(),
        to_input=lambda data: {"messages": [("user", data["item"])]},
        reward=lambda data, state: float(state["messages"][-1].text == "42"),
    )
    stage = Stage({"corn": ["How much?", "42"]})
    stage.play(agent)
    played(stage, "corn", num_rows=2)
    assert stage.stats["rollout/reward"] == 1.0
