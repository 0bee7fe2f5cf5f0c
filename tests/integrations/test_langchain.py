from __future__ import annotations

from typing import Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.runnables import RunnableLambda
from langchain_core.tools import tool
from transformers import AutoTokenizer

from agent_rl import ArealOpenAI, ScriptedEngine, small_model
from agent_rl.integrations.langchain import ChatArealOpenAI, wrap

CALL = '<tool_call>\n{"name": "price", "arguments": {"item":  "corn"}}\n</tool_call>'


@tool
def price(item: str) -> int:
    """Price of an item in cents."""
    return {"corn": 42}[item]


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(small_model())


def make_client(tokenizer: Any, *replies: str) -> ArealOpenAI:
    engine = ScriptedEngine(replies, tokenizer=tokenizer)
    return ArealOpenAI(engine, tokenizer, chat_template_type="concat")


async def test_a_tool_conversation_is_one_path_of_the_record(tokenizer: Any) -> None:
    client = make_client(tokenizer, CALL, "42 cents")
    model = ChatArealOpenAI(client=client).bind_tools([price])
    messages: list[Any] = [HumanMessage("What does corn cost?")]
    answer = await model.ainvoke(messages)
    (call,) = answer.tool_calls
    assert (call["name"], call["args"]) == ("price", {"item": "corn"})
    messages += [answer, ToolMessage(str(price.invoke(call["args"])), tool_call_id=call["id"])]
    final = await model.ainvoke(messages)

    assert final.content == "42 cents"
    first, second = client.interactions.values()
    assert final.response_metadata["id"] == second.interaction_id
    assert second.parent is first
    assert final.usage_metadata is not None
    assert final.usage_metadata["output_tokens"] == len(second.model_response.output_tokens)
    client.set_last_reward(1.0)
    client.apply_reward_discount()
    (row,) = client.export_interactions("concat").values()
    sampled = [*first.model_response.output_tokens, *second.model_response.output_tokens]
    tensors = row.to_tensor_dict()
    trained = tensors["input_ids"][tensors["loss_mask"].bool()].tolist()
    assert trained == sampled


async def test_malformed_calls_stay_visible(tokenizer: Any) -> None:
    client = make_client(tokenizer, '<tool_call>\n{"name": "price"\n</tool_call>')
    answer = await ChatArealOpenAI(client=client).bind_tools([price]).ainvoke("corn?")
    assert answer.tool_calls == []
    assert '{"name": "price"' in answer.content


def test_synchronous_calls_are_on_the_same_record(tokenizer: Any) -> None:
    client = make_client(tokenizer, "hello")
    assert ChatArealOpenAI(client=client).invoke("hi").content == "hello"
    assert len(client.interactions) == 1


async def test_wrap_makes_an_agent_of_a_runnable(tokenizer: Any) -> None:
    def build(model: ChatArealOpenAI) -> Any:
        return RunnableLambda(lambda datum: datum["q"]) | model

    def reward(data: dict[str, Any], output: AIMessage) -> float:
        return float(output.content == data["answer"])

    agent = wrap(build, reward=reward, to_input=lambda data: {"q": data["question"]})
    client = make_client(tokenizer, "4")
    assert await agent().run({"question": "2+2?", "answer": "4"}, client=client) == 1.0
    assert len(client.interactions) == 1
