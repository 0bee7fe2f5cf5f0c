from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("langgraph", reason="needs pip install 'agent-rl[langgraph]'")

from langgraph_agent import LangGraphClerk, compiled
from scenario import check_conversation, check_failing_tool, check_individual
from shop import questions, reward

from agent_rl import ArealOpenAI
from agent_rl.integrations.langchain import use_client


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
