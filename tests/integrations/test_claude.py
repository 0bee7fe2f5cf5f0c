from __future__ import annotations

import pytest

pytest.importorskip("claude_agent_sdk", reason="needs pip install -e '.[claude]'")

from claude_agent import ClaudeClerk
from scenario import Stage, call_of, check_conversation, check_failing_tool, usual_replies

from agent_rl import ModelRequest


def replies(item: str) -> list[str]:
    return [reply.replace('"price"', '"mcp__shop__price"') for reply in usual_replies(item)]


def test_the_example() -> None:
    """Claude Code moves its cache marks and adds nothing else: one row."""
    check_conversation(ClaudeClerk, replies=replies)
    first = call_of("gold").replace('"price"', '"mcp__shop__price"')
    check_failing_tool(ClaudeClerk, first=first, replies=replies)


def test_a_broken_engine_is_no_answer() -> None:
    """Claude Code reports it as a result; only its text says that the engine was to blame."""

    async def break_down(request: ModelRequest) -> list[int]:
        raise ValueError("the decoder broke")

    stage = Stage({"corn": []})
    stage.play(ClaudeClerk, reply=break_down)
    assert stage.groups["corn"] is None
    assert stage.stats["rollout/failed/agent"] == 1.0
    assert "the decoder broke" in str(stage.errors["corn"])
