from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("anthropic", reason="needs pip install anthropic")

from anthropic import AsyncAnthropic, beta_async_tool
from anthropic_agent import TOOL, AnthropicClerk
from scenario import call_of, check_conversation, check_failing_tool, check_individual
from shop import INSTRUCTIONS, price, questions, reward

from agent_rl import ArealOpenAI
from agent_rl.integrations.anthropic import anthropic_client


def test_the_example() -> None:
    check_conversation(AnthropicClerk)
    check_individual(AnthropicClerk)
    check_failing_tool(AnthropicClerk)


async def converse(claude: AsyncAnthropic, data: dict[str, Any]) -> float:
    """The example's loop with streamed answers."""
    messages: list[Any] = []
    for question in questions(data):
        messages.append({"role": "user", "content": question})
        while True:
            async with claude.messages.stream(
                model="local",
                max_tokens=64,
                system=INSTRUCTIONS,
                messages=messages,
                tools=[TOOL],
            ) as stream:
                answer = await stream.get_final_message()
            messages.append({"role": "assistant", "content": answer.content})
            calls = [block for block in answer.content if block.type == "tool_use"]
            if not calls:
                break
            results = [
                {"type": "tool_result", "tool_use_id": c.id, "content": str(price(**c.input))}
                for c in calls
            ]
            messages.append({"role": "user", "content": results})
    return reward(data, answer.content[-1].text)


class StreamingClerk:
    async def run(self, data: dict[str, Any], client: ArealOpenAI) -> float:
        return await converse(anthropic_client(client), data)


class GatewayClerk:
    """The address alone: what an SDK of another language, or a command line, would use."""

    async def run(self, data: dict[str, Any], base_url: str, api_key: str) -> float:
        async with AsyncAnthropic(base_url=base_url.removesuffix("/v1"), api_key=api_key) as claude:
            return await converse(claude, data)


class ToolRunnerClerk:
    """The SDK's own loop; it holds the history of one question."""

    async def run(self, data: dict[str, Any], client: ArealOpenAI) -> float:
        @beta_async_tool
        async def price_of(item: str) -> str:
            return str(price(item))

        claude, messages = anthropic_client(client), []
        for question in questions(data):
            messages.append({"role": "user", "content": question})
            runner = claude.beta.messages.tool_runner(
                model="local", max_tokens=64, messages=messages, tools=[price_of], thread=False
            )
            async for answer in runner:
                messages.append({"role": "assistant", "content": answer.content})
                response = await runner.generate_tool_call_response()
                if response is not None:
                    messages.append(response)
        return reward(data, answer.content[-1].text)


@pytest.mark.parametrize("agent", [StreamingClerk, GatewayClerk])
def test_other_ways(agent: type) -> None:
    check_conversation(agent)
    check_failing_tool(agent)


def test_the_tool_runner() -> None:
    def replies(item: str) -> list[str]:
        look = call_of(item).replace('"price"', '"price_of"')
        return [look, f"{item} is cheap.", look, "84 cents" if item == "corn" else "34 cents"]

    check_conversation(ToolRunnerClerk, replies=replies)
