"""A Google ADK agent: only its model is ours.

python examples/frameworks/google_adk_agent.py
"""

from __future__ import annotations

import os
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else its import looks for a newer one

from google.adk.agents import LlmAgent
from google.adk.agents.run_config import RunConfig
from google.adk.models.lite_llm import LiteLlm
from google.adk.runners import InMemoryRunner
from google.genai.types import Content, Part
from openai import AsyncOpenAI
from shop import INSTRUCTIONS, price, questions, reward, train


def model_of(client: AsyncOpenAI) -> LiteLlm:
    return LiteLlm(model="openai/local", client=client)


async def converse(agent: LlmAgent, asked: list[str], how: RunConfig | None = None) -> str:
    """The last answer of one session."""
    runner = InMemoryRunner(agent)
    session = await runner.session_service.create_session(
        app_name=runner.app_name, user_id="customer"
    )
    answer = ""
    for question in asked:
        async for event in runner.run_async(
            user_id="customer",
            session_id=session.id,
            new_message=Content(role="user", parts=[Part(text=question)]),
            run_config=how,
        ):
            if event.is_final_response() and event.content is not None:
                answer = "".join(part.text or "" for part in event.content.parts or [])
    return answer


class GoogleADKClerk:
    async def run(self, data: dict[str, Any], client: AsyncOpenAI) -> float:
        clerk = LlmAgent(
            name="clerk", model=model_of(client), instruction=INSTRUCTIONS, tools=[price]
        )
        return reward(data, await converse(clerk, questions(data)))


if __name__ == "__main__":
    train(GoogleADKClerk)
