"""A DSPy ReAct module: only its language model is ours.

ReAct keeps its history as one text that it writes anew, so that each model call is a row of its
own.

python examples/frameworks/dspy_agent.py
"""

from __future__ import annotations

from typing import Any

import dspy
from shop import MAX_TURNS, price, questions, reward, train

from agent_rl import ArealOpenAI
from agent_rl.integrations.dspy import dspy_lm
from agent_rl.integrations.tools import ToolErrors


class DSPyClerk:
    async def run(self, data: dict[str, Any], client: ArealOpenAI) -> float:
        history = dspy.History(messages=[])
        async with ToolErrors() as errors:
            clerk = dspy.ReAct(
                "question, history: dspy.History -> answer",
                tools=[errors.watch(price)],
                max_iters=MAX_TURNS,
            )
            with dspy.context(lm=dspy_lm(client)):
                for question in questions(data):
                    found = await clerk.acall(question=question, history=history)
                    history.messages.append({"question": question, "answer": found.answer})
        return reward(data, found.answer)


if __name__ == "__main__":
    train(DSPyClerk)
