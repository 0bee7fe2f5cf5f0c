"""A LangChain agent: a chat model with a tool, in a loop that you write.

python examples/frameworks/langchain_agent.py
"""

from __future__ import annotations

from typing import Any

from langchain_core.messages import BaseMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from shop import INSTRUCTIONS, MAX_TURNS, price, questions, reward, train

from agent_rl import ArealOpenAI
from agent_rl.integrations.langchain import ChatArealOpenAI

TOOL = tool(price)


class LangChainClerk:
    async def run(self, data: dict[str, Any], client: ArealOpenAI) -> float:
        model = ChatArealOpenAI(client=client).bind_tools([TOOL])
        messages: list[BaseMessage] = [SystemMessage(INSTRUCTIONS)]
        for question in questions(data):
            messages.append(HumanMessage(question))
            for _ in range(MAX_TURNS):
                answer = await model.ainvoke(messages)
                messages.append(answer)
                if not answer.tool_calls:
                    break
                for call in answer.tool_calls:
                    result = await TOOL.ainvoke(call["args"])
                    messages.append(ToolMessage(str(result), tool_call_id=call["id"]))
        return reward(data, answer.text)


if __name__ == "__main__":
    train(LangChainClerk)
