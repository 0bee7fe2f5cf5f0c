"""Whatever is said and sampled: the record is what the engine saw, a stream is the whole."""

from __future__ import annotations

import asyncio
import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_rl import ArealOpenAI, ScriptedEngine

TOOLS: Any = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
TEXTS = st.lists(
    st.sampled_from(
        [
            *(
                "a",
                " ",
                "\n",
                "\r",
                "\x00",
                "\u200d",
                "\u202e",
                "\u05d0",
                "e\u0301",
                "\ufffd",
                "\u2028",
            ),
            *("\U0001f468\u200d\U0001f469", "END", "EN", "<", "<|im_end|>", "<think>", "</think>"),
            *("<tool_call>", "</tool_call>", '<tool_call>{"name": "f"}</tool_call>'),
            '<tool_call>{"name": "f", "arguments": {"x": "\\ud83d</tool_call>"}}</tool_call>',
            '<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>',
        ]
    ),
    max_size=5,
).map("".join)
ANSWERS = st.tuples(
    TEXTS | st.lists(st.integers(3, 300), max_size=6),  # random ids, hardly ever canonical
    st.sampled_from(["stop", "length"]),
    st.integers(0, 3),  # ids cut off the end: it may be inside a character
)
NEXT = st.sampled_from(["go on", "go on", "parts", "strip", "lose ids", "edit", "again", "anew"])
TURNS = st.lists(
    st.tuples(st.lists(ANSWERS, min_size=1, max_size=2), NEXT, TEXTS, st.booleans()),
    min_size=1,
    max_size=4,
)


def sampled(tokenizer: Any, answer: tuple[Any, Any, int]) -> dict[str, Any]:
    said, stop_reason, num_cut = answer
    ids = tokenizer.encode(said) if isinstance(said, str) else said
    ids = ids[: len(ids) - num_cut] + [2] * (stop_reason == "stop")
    return {"output_tokens": ids, "stop_reason": stop_reason}


def gone_on(messages: list[Any], answer: Any, how: str, text: str) -> list[Any]:
    """What a framework makes of an answer, and the next message."""
    if how == "anew":
        return [{"role": "user", "content": text}]
    if how == "again":
        return messages
    replay = json.loads(json.dumps(answer))
    if how == "parts":
        replay["content"] = [{"type": "text", "text": replay["content"] or ""}]
    if how == "strip":
        replay["content"] = (replay["content"] or "").strip()
    if how == "edit":
        replay["content"] = text
    calls = replay.get("tool_calls") or []
    for index, call in enumerate(calls):
        call["id"] = f"lost {index}" if how == "lose ids" else call["id"]
    results = [{"role": "tool", "tool_call_id": call["id"], "content": text} for call in calls]
    return [*messages, replay, *(results or [{"role": "user", "content": text}])]


async def streamed(client: ArealOpenAI, **params: Any) -> tuple[str, list[Any], list[Any]]:
    """The id, the choices as messages, and their finish reasons."""
    messages: dict[int, Any] = {}
    reasons: dict[int, str] = {}
    async for chunk in await client.chat.completions.create(**params, stream=True):
        for choice in chunk.choices:
            told = messages.setdefault(choice.index, {"content": "", "calls": []})
            told["content"] += choice.delta.content or ""
            told["calls"] += [call.function for call in choice.delta.tool_calls or ()]
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    told = [messages[index] for index in sorted(messages)]
    return chunk.id, told, [reasons[index] for index in sorted(reasons)]


def check_record(client: ArealOpenAI, engine: ScriptedEngine, call_id: str, given: Any) -> None:
    """What the engine was sent last and gave is what is recorded, and what would be trained."""
    for index, answer in enumerate(given):
        found = client.interactions[f"{call_id}/{index}" if index else call_id]
        prompt, output = engine.requests[-len(given) + index].input_ids, answer["output_tokens"]
        assert found.tokens == (*prompt, *output)
        response = found.model_response
        assert response is not None and response.stop_reason == answer["stop_reason"]
        row = found.as_row(len(prompt)).to_row()
        assert list(row.loss_mask) == [0] * len(prompt) + [1] * len(output)
        assert row.logprobs[len(prompt) :].tolist() == pytest.approx(response.output_logprobs)
        if found.parent is not None:
            assert found.tokens[: found.parent.num_tokens] == found.parent.tokens


@pytest.mark.parametrize("style", ["hf", "concat"])
@settings(max_examples=15, deadline=None)
@given(turns=TURNS)
def test_record_stream_and_whole_agree(tokenizer: Any, style: Any, turns: Any) -> None:
    async def talk() -> None:
        replies: list[Any] = []
        engine = ScriptedEngine([lambda request: replies.pop(0)], repeat=True)
        client = ArealOpenAI(engine, tokenizer, chat_template_type=style)
        messages: list[Any] = [{"role": "user", "content": "hi"}]
        for answers, how, text, has_stop in turns:
            given = [sampled(tokenizer, answer) for answer in answers]
            params: dict[str, Any] = {"messages": messages, "tools": TOOLS, "n": len(given)}
            params |= {"model": "m"} | ({"stop": ["END"]} if has_stop else {})
            replies[:] = given
            whole = await client.chat.completions.create(**params)
            check_record(client, engine, whole.id, given)
            replies[:] = given
            call_id, told, reasons = await streamed(client, **params)
            check_record(client, engine, call_id, given)
            assert reasons == [choice.finish_reason for choice in whole.choices]
            for choice, said in zip(whole.choices, told, strict=True):
                calls = choice.message.tool_calls or []
                assert (choice.message.content or "") == said["content"]
                assert [(call.function.name, call.function.arguments) for call in calls] == [
                    (call.name, call.arguments) for call in said["calls"]
                ]
                assert not has_stop or "END" not in said["content"]
            messages = gone_on(messages, whole.choices[-1].message.model_dump(), how, text)
        own = client.export_interactions("individual").values()
        rows = client.export_interactions("individual" if style == "hf" else "concat").values()
        num_sampled = sum(len(row.path.output) for row in own)
        assert sum(itertools.chain(*(row.to_row().loss_mask for row in rows))) == num_sampled

    asyncio.run(talk())
