"""Claude Code by its Agent SDK: a process of its own, at the address of the episode.

python examples/frameworks/claude_agent.py
"""

from __future__ import annotations

import tempfile
from typing import Any

from claude_agent_sdk import (
    ClaudeAgentOptions,
    ClaudeSDKClient,
    ResultMessage,
    create_sdk_mcp_server,
    tool,
)
from shop import INSTRUCTIONS, MAX_TURNS, price, questions, reward, train

from agent_rl.integrations.anthropic import claude_code_env
from agent_rl.integrations.tools import ToolErrors


class ClaudeClerk:
    async def run(self, data: dict[str, Any], base_url: str, api_key: str) -> float:
        with tempfile.TemporaryDirectory() as folder:
            async with ToolErrors() as errors:
                lookup = errors.watch(price)

                @tool("price", price.__doc__ or "", {"item": str})
                async def price_tool(values: dict[str, Any]) -> dict[str, Any]:
                    return {"content": [{"type": "text", "text": str(lookup(values["item"]))}]}

                options = ClaudeAgentOptions(
                    model="local",
                    system_prompt=INSTRUCTIONS,
                    tools=[],  # none of its own: no shell, no files
                    mcp_servers={"shop": create_sdk_mcp_server("shop", tools=[price_tool])},
                    allowed_tools=["mcp__shop__price"],
                    setting_sources=[],
                    max_turns=2 * MAX_TURNS,
                    cwd=folder,
                    env=claude_code_env(base_url, api_key, folder),
                )
                answer = ""
                async with ClaudeSDKClient(options) as claude:
                    for question in questions(data):
                        await claude.query(question)
                        async for message in claude.receive_response():
                            if isinstance(message, ResultMessage):
                                answer = message.result or ""
                                if message.is_error:  # it does not raise: the API failed, say
                                    raise RuntimeError(answer)
        return reward(data, answer)


if __name__ == "__main__":
    train(ClaudeClerk)
