"""A LangGraph graph, compiled once: ``wrap`` makes it an agent, one run of it an episode.

python examples/frameworks/langgraph_agent.py
"""

from __future__ import annotations

from typing import Any

from langchain_core.messages import SystemMessage
from langchain_core.tools import tool
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode
from shop import INSTRUCTIONS, price, questions, reward, train

from agent_rl.integrations.langchain import ChatArealOpenAI, wrap

TOOLS = [tool(price)]
MODEL = ChatArealOpenAI().bind_tools(TOOLS)


class State(MessagesState):
    questions: list[str]


async def ask(state: State) -> dict[str, Any]:
    first, *rest = state["questions"]
    return {"messages": [("user", first)], "questions": rest}


async def answer(state: State) -> dict[str, Any]:
    return {"messages": [await MODEL.ainvoke([SystemMessage(INSTRUCTIONS), *state["messages"]])]}


def what_next(state: State) -> str:
    if state["messages"][-1].tool_calls:
        return "tools"
    return "ask" if state["questions"] else END


graph = StateGraph(State)
graph.add_node("ask", ask)
graph.add_node("answer", answer)
graph.add_node("tools", ToolNode(TOOLS))
graph.add_edge(START, "ask")
graph.add_edge("ask", "answer")
graph.add_edge("tools", "answer")
graph.add_conditional_edges("answer", what_next, ["ask", "tools", END])
compiled = graph.compile()

LangGraphClerk = wrap(
    compiled,
    to_input=lambda data: {"questions": questions(data)},
    reward=lambda data, state: reward(data, state["messages"][-1].text),
)

if __name__ == "__main__":
    train(LangGraphClerk)
