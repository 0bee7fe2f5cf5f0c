"""An agent whose tools come from an MCP server; the loop is yours.

python examples/frameworks/mcp_agent.py
"""

from __future__ import annotations

from typing import Any

from mcp.server import MCPServer
from openai import AsyncOpenAI
from shop import INSTRUCTIONS, MAX_TURNS, price, questions, reward, train

from agent_rl.integrations.mcp import mcp_tools

SERVER = MCPServer("shop")  # or the URL of one, or the command that starts one
SERVER.tool()(price)


class MCPClerk:
    async def run(self, data: dict[str, Any], client: AsyncOpenAI) -> float:
        messages: list[Any] = [{"role": "system", "content": INSTRUCTIONS}]
        async with mcp_tools(SERVER) as tools:
            for question in questions(data):
                messages.append({"role": "user", "content": question})
                for _ in range(MAX_TURNS):
                    completion = await client.chat.completions.create(
                        model="local", messages=messages, tools=tools.schemas
                    )
                    answer = completion.choices[0].message
                    messages.append(answer)
                    if not answer.tool_calls:
                        break
                    messages += await tools.answer(answer)
        return reward(data, answer.content or "")


if __name__ == "__main__":
    train(MCPClerk)
