from __future__ import annotations

import pytest

pytest.importorskip("claude_agent_sdk", reason="needs pip install 'agent-rl[claude]'")

from claude_agent import ClaudeClerk
from scenario import call_of, check_conversation, check_failing_tool, usual_replies


def replies(item: str) -> list[str]:
    return [reply.replace('"price"', '"mcp__shop__price"') for reply in usual_replies(item)]


def test_the_example() -> None:
    """Claude Code moves its cache marks and adds nothing else: one row."""
    check_conversation(ClaudeClerk, replies=replies)
    first = call_of("gold").replace('"price"', '"mcp__shop__price"')
    check_failing_tool(ClaudeClerk, first=first, replies=replies)
