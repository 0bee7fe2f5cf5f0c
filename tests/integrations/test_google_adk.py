from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("google.adk", reason="needs pip install -e '.[google-adk]'")

from google.adk.agents import LlmAgent
from google.adk.agents.run_config import RunConfig, StreamingMode
from google_adk_agent import GoogleADKClerk, converse, model_of
from openai import AsyncOpenAI
from scenario import check_conversation, check_failing_tool, check_individual
from shop import INSTRUCTIONS, price, questions, reward


def test_the_example() -> None:
    check_conversation(GoogleADKClerk)
    check_individual(GoogleADKClerk)
    check_failing_tool(GoogleADKClerk)


class StreamingClerk:
    async def run(self, data: dict[str, Any], client: AsyncOpenAI) -> float:
        clerk = LlmAgent(
            name="clerk", model=model_of(client), instruction=INSTRUCTIONS, tools=[price]
        )
        how = RunConfig(streaming_mode=StreamingMode.SSE)
        return reward(data, await converse(clerk, questions(data), how))


def test_streaming() -> None:
    check_conversation(StreamingClerk)
