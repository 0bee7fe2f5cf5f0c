from __future__ import annotations

import asyncio
from typing import Any

import pytest
from langchain_agent import TOOL, LangChainClerk
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.runnables import RunnableLambda
from pydantic import BaseModel
from scenario import (
    GuidedEngine,
    Stage,
    call_of,
    check_conversation,
    check_failing_tool,
    check_individual,
)
from shop import INSTRUCTIONS, MAX_TURNS, questions, reward

from agent_rl import ArealOpenAI
from agent_rl.integrations.langchain import ChatArealOpenAI, wrap


def make_client(tokenizer: Any, *replies: str, **settings: Any) -> ArealOpenAI:
    engine = GuidedEngine(replies, tokenizer=tokenizer)
    return ArealOpenAI(engine, tokenizer, chat_template_type="concat", **settings)


def test_the_example() -> None:
    check_conversation(LangChainClerk)
    check_individual(LangChainClerk)
    check_failing_tool(LangChainClerk)


async def converse(data: dict[str, Any], ask: Any) -> float:
    """The example's loop over ``ask(messages)``."""
    messages: list[BaseMessage] = [SystemMessage(INSTRUCTIONS)]
    for question in questions(data):
        messages.append(HumanMessage(question))
        for _ in range(MAX_TURNS):
            answer = await ask(messages)
            messages.append(answer)
            if not answer.tool_calls:
                break
            for call in answer.tool_calls:
                result = await TOOL.ainvoke(call["args"])
                messages.append(ToolMessage(str(result), tool_call_id=call["id"]))
    return reward(data, answer.text)


class StreamingClerk:
    async def run(self, data: dict[str, Any], client: ArealOpenAI) -> float:
        model = ChatArealOpenAI(client=client).bind_tools([TOOL])

        async def ask(messages: list[BaseMessage]) -> Any:
            answer: Any = None
            async for chunk in model.astream(messages):
                answer = chunk if answer is None else answer + chunk
            return answer

        return await converse(data, ask)


class ThreadClerk:
    """``invoke`` and ``stream`` in a worker thread."""

    async def run(self, data: dict[str, Any], client: ArealOpenAI) -> float:
        model = ChatArealOpenAI(client=client).bind_tools([TOOL])

        def ask_now(messages: list[BaseMessage]) -> Any:
            if len(messages) < 4:
                return model.invoke(messages)
            first, *rest = model.stream(messages)
            return sum(rest, first)

        return await converse(data, lambda messages: asyncio.to_thread(ask_now, messages))


def chat_openai(client: ArealOpenAI, **settings: Any) -> Any:
    """``langchain_openai`` on our client, in one line."""
    langchain_openai = pytest.importorskip("langchain_openai")
    chat = client.chat.completions
    return langchain_openai.ChatOpenAI(
        model="local", async_client=chat, root_async_client=client, **settings
    )


class ChatOpenAIClerk:
    async def run(self, data: dict[str, Any], client: ArealOpenAI) -> float:
        return await converse(data, chat_openai(client).bind_tools([TOOL]).ainvoke)


class StreamingChatOpenAIClerk:
    async def run(self, data: dict[str, Any], client: ArealOpenAI) -> float:
        model = chat_openai(client, streaming=True)
        return await converse(data, model.bind_tools([TOOL]).ainvoke)


@pytest.mark.parametrize(
    "agent", [StreamingClerk, ThreadClerk, ChatOpenAIClerk, StreamingChatOpenAIClerk]
)
def test_other_ways(agent: type) -> None:
    check_conversation(agent)
    check_failing_tool(agent)


class CreateAgentClerk:
    """``langchain.agents.create_agent``."""

    async def run(self, data: dict[str, Any], client: ArealOpenAI) -> float:
        agents = pytest.importorskip("langchain.agents")
        model = ChatArealOpenAI(client=client)
        clerk = agents.create_agent(model, tools=[TOOL], system_prompt=INSTRUCTIONS)
        messages: list[Any] = []
        for question in questions(data):
            state = await clerk.ainvoke({"messages": [*messages, HumanMessage(question)]})
            messages = state["messages"]
        return reward(data, messages[-1].text)


def test_create_agent() -> None:
    pytest.importorskip("langchain.agents", reason="needs pip install -e '.[langchain]'")
    check_conversation(CreateAgentClerk)
    check_failing_tool(CreateAgentClerk)


@pytest.mark.parametrize("strategy", ["ToolStrategy", "ProviderStrategy"])
def test_structured_output_of_create_agent(strategy: str) -> None:
    agents = pytest.importorskip("langchain.agents", reason="needs pip install -e '.[langchain]'")
    form = getattr(pytest.importorskip("langchain.agents.structured_output"), strategy)(Cents)

    class Accountant:
        async def run(self, data: dict[str, Any], client: ArealOpenAI) -> float:
            agent = agents.create_agent(ChatArealOpenAI(client=client), response_format=form)
            state = await agent.ainvoke({"messages": [HumanMessage(questions(data)[0])]})
            return float(state["structured_response"] == Cents(cents=42))

    called = '<tool_call>\n{"name": "Cents", "arguments": {"cents": 42}}\n</tool_call>'
    stage = Stage({"corn": [called if strategy == "ToolStrategy" else '{"cents": 42}']})
    stage.play(Accountant)
    assert stage.stats["rollout/reward"] == 1.0


async def test_what_a_message_carries(tokenizer: Any) -> None:
    client = make_client(tokenizer, call_of("corn"), call_of("corn"))
    model = ChatArealOpenAI(client=client).bind_tools([TOOL])
    chunks = [chunk async for chunk in model.astream("corn?")]
    streamed = sum(chunks[1:], chunks[0])
    for answer in (await model.ainvoke("corn?"), streamed):
        interaction = client.interactions[answer.response_metadata["id"]]
        assert answer.response_metadata["finish_reason"] == "tool_calls"
        (call,) = answer.tool_calls
        assert (call["name"], call["args"]) == ("price", {"item": "corn"})
        assert answer.usage_metadata is not None
        prompt, sampled = interaction.path.num_prompt, interaction.path.num_output
        used = answer.usage_metadata
        assert (used["input_tokens"], used["output_tokens"]) == (prompt, sampled)
    assert len(client.interactions) == 2


async def test_answers_go_back_as_they_were_sampled(tokenizer: Any) -> None:
    """Also reasoning; but what the agent has changed goes back as changed."""
    client = make_client(tokenizer, call_of("corn"), "42", "43", reasoning_parser="qwen3")
    model = ChatArealOpenAI(client=client).bind_tools([TOOL])
    question = HumanMessage("corn?")
    answer = await model.ainvoke([question])
    told = ToolMessage("42", tool_call_id=answer.tool_calls[0]["id"])
    await model.ainvoke([question, answer, told])
    first, second = client.interactions.values()
    sent = second.messages[1]["tool_calls"][0]["function"]["arguments"]
    assert sent == '{"item":  "corn"}'
    assert second.parent is first

    changed = answer.model_copy(update={"content": "I shall look."})
    await model.ainvoke([question, changed, told])
    assert list(client.interactions.values())[2].messages[1]["content"] == "I shall look."


async def test_reasoning_goes_round(tokenizer: Any) -> None:
    client = make_client(tokenizer, "<think>\nhm\n</think>\n\nyes", "no", reasoning_parser="qwen3")
    model = ChatArealOpenAI(client=client)
    answer = await model.ainvoke("sure?")
    assert answer.content == "yes"
    assert "hm" in answer.additional_kwargs["reasoning_content"]
    await model.ainvoke([HumanMessage("sure?"), answer, HumanMessage("really?")])
    first, second = client.interactions.values()
    assert "hm" in second.messages[1]["reasoning_content"]
    assert second.parent is first


async def test_malformed_calls_stay_visible(tokenizer: Any) -> None:
    client = make_client(tokenizer, '<tool_call>\n{"name": "price"\n</tool_call>')
    answer = await ChatArealOpenAI(client=client).bind_tools([TOOL]).ainvoke("corn?")
    assert answer.tool_calls == []
    assert '{"name": "price"' in answer.content


class Cents(BaseModel):
    """An amount."""

    cents: int


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
async def test_structured_output(tokenizer: Any, method: Any) -> None:
    called = '<tool_call>\n{"name": "Cents", "arguments": {"cents": 42}}\n</tool_call>'
    reply = {"json_schema": '{"cents": 42}', "function_calling": called}[method]
    client = make_client(tokenizer, *[reply] * 3)
    model = ChatArealOpenAI(client=client)
    chain = model.with_structured_output(Cents, method=method)
    assert await chain.ainvoke("corn?") == Cents(cents=42)
    schema = {**Cents.model_json_schema(), "title": "Cents"}
    assert await model.with_structured_output(schema, method=method).ainvoke("?") == {"cents": 42}
    both = await model.with_structured_output(Cents, method=method, include_raw=True).ainvoke("?")
    assert both["parsed"] == Cents(cents=42) and both["parsing_error"] is None
    assert both["raw"].response_metadata["id"] in client.interactions


async def test_structured_output_of_chat_openai(tokenizer: Any) -> None:
    client = make_client(tokenizer, '{"cents": 42}')
    assert await chat_openai(client).with_structured_output(Cents).ainvoke("corn?") == Cents(
        cents=42
    )


async def test_structured_output_that_is_cut(tokenizer: Any) -> None:
    client = make_client(tokenizer, '{"cents": ')
    chain = ChatArealOpenAI(client=client).with_structured_output(Cents, include_raw=True)
    both = await chain.ainvoke("corn?")
    assert both["parsed"] is None and both["parsing_error"] is not None


@pytest.mark.parametrize(
    ("choice", "sent"),
    [("any", "required"), (True, "required"), ("auto", "auto"), ("none", "none")],
)
async def test_tool_choice(choice: Any, sent: str) -> None:
    bound = ChatArealOpenAI().bind_tools([TOOL], tool_choice=choice)
    assert bound.kwargs["tool_choice"] == sent  # type: ignore[attr-defined]
    named = ChatArealOpenAI().bind_tools([TOOL], tool_choice="price")
    function = {"type": "function", "function": {"name": "price"}}
    assert named.kwargs["tool_choice"] == function  # type: ignore[attr-defined]


async def test_choices_have_ids_of_their_own(tokenizer: Any) -> None:
    client = make_client(tokenizer, "one", "two")
    model = ChatArealOpenAI(client=client, model_kwargs={"n": 2})
    result = await model.agenerate([[HumanMessage("?")]])
    ids = [choice.message.response_metadata["id"] for choice in result.generations[0]]  # type: ignore[attr-defined]
    assert ids == list(client.interactions)
    with pytest.raises(ValueError, match="n > 1 cannot be streamed"):
        [chunk async for chunk in model.astream("?")]


async def test_mistakes_are_named(tokenizer: Any) -> None:
    with pytest.raises(ValueError, match="temperature"):
        ChatArealOpenAI(temperature=0.5)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="has no client"):
        await ChatArealOpenAI().ainvoke("hi")


async def test_wrap_takes_a_function_that_builds(tokenizer: Any) -> None:
    def build(model: ChatArealOpenAI) -> Any:
        return RunnableLambda(lambda datum: datum["q"]) | model

    async def is_right(data: dict[str, Any], output: AIMessage) -> float:
        return float(output.content == data["answer"])

    agent = wrap(build, reward=is_right, to_input=lambda data: {"q": data["question"]})
    client = make_client(tokenizer, "4")
    assert await agent().run({"question": "2+2?", "answer": "4"}, client=client) == 1.0
    assert len(client.interactions) == 1
