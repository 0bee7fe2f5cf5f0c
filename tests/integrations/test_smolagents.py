from __future__ import annotations

import pytest

pytest.importorskip("smolagents", reason="needs pip install 'agent-rl[smolagents]'")

from scenario import call_of, check_broken_engine, check_conversation, check_failing_tool
from shop import PRICES
from smolagents_agent import SmolagentsClerk


def final(text: str) -> str:
    arguments = f'{{"answer": "{text}"}}'
    return f'<tool_call>\n{{"name": "final_answer", "arguments": {arguments}}}\n</tool_call>'


def replies(item: str) -> list[str]:
    one = PRICES[item]
    return [call_of(item), final(f"{one} cents"), call_of(item), final(f"{2 * one} cents")]


def test_the_example() -> None:
    """Its own calls go back as text, so that no prompt extends the one before."""
    forks = dict.fromkeys((1, 2, 3), "edited")
    check_conversation(SmolagentsClerk, forks=forks, replies=replies)
    check_failing_tool(SmolagentsClerk, replies=replies)
    check_broken_engine(SmolagentsClerk)
