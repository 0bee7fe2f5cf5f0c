from __future__ import annotations

import asyncio
from typing import Any

import pytest

pytest.importorskip("dspy", reason="needs pip install -e '.[dspy]'")

import dspy
from dspy_agent import DSPyClerk
from scenario import check_broken_engine, check_conversation, check_failing_tool
from shop import PRICES, questions

from agent_rl import ArealOpenAI
from agent_rl.integrations.dspy import dspy_lm


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


class ThreadClerk:
    async def run(self, data: dict[str, Any], client: ArealOpenAI) -> float:
        return await asyncio.to_thread(self.answer, data, client)

    def answer(self, data: dict[str, Any], client: ArealOpenAI) -> float:
        clerk = dspy.Predict("question -> answer")
        with dspy.context(lm=dspy_lm(client, max_tokens=64)):
            found = clerk(question=questions(data)[0])
        return float(found.answer == str(PRICES[data["item"]]))


def test_in_a_worker_thread() -> None:
    def one(item: str) -> list[str]:
        return [f"[[ ## answer ## ]]\n{PRICES[item]}\n\n[[ ## completed ## ]]"]

    check_conversation(ThreadClerk, replies=one)
