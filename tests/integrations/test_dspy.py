from __future__ import annotations

import pytest

pytest.importorskip("dspy", reason="needs pip install 'agent-rl[dspy]'")

from dspy_agent import DSPyClerk
from scenario import check_broken_engine, check_conversation, check_failing_tool
from shop import PRICES


def step(tool: str, arguments: str) -> str:
    return (
        f"[[ ## next_thought ## ]]\nI look.\n\n[[ ## next_tool_name ## ]]\n{tool}\n\n"
        f"[[ ## next_tool_args ## ]]\n{arguments}\n\n[[ ## completed ## ]]"
    )


def answer(text: str) -> str:
    return (
        f"[[ ## reasoning ## ]]\nI looked.\n\n[[ ## answer ## ]]\n{text}\n\n[[ ## completed ## ]]"
    )


def replies(item: str) -> list[str]:
    look = step("price", f'{{"item":  "{item}"}}')
    one = PRICES[item]
    each = [look, step("finish", "{}")]
    return [*each, answer(f"{one} cents"), *each, answer(f"{2 * one} cents")]


def test_the_example() -> None:
    """ReAct writes its trajectory into one user message: no call replays an answer as such."""
    check_conversation(DSPyClerk, forks=dict.fromkeys(range(1, 6)), replies=replies)
    check_failing_tool(DSPyClerk, first=step("price", '{"item": "gold"}'), replies=replies)
    check_broken_engine(DSPyClerk)
