"""What a model may write and an agent send back: the call never raises, the turn stays linked."""

from __future__ import annotations

from typing import Any

import pytest

from agent_rl import ArealOpenAI, ScriptedEngine

USER = {"role": "user", "content": "hi"}
TOOLS: Any = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
NESTED = "[" * 90 + "]" * 90
TOO_DEEP = "[" * 480 + "]" * 480


@pytest.mark.parametrize("style", ["hf", "concat"])
@pytest.mark.parametrize(
    ("call", "is_call"),
    [
        ('{"name": "f", "arguments": {"x": ' + NESTED + "}}", True),
        ('{"name": "f", "arguments": {"x": ' + TOO_DEEP + "}}", False),
        ('{"name": "f", "arguments": {"x": "\\ud83d"}}', True),
        ('{"name": "\\ud83d", "arguments": {}}', False),
        ('{"name": "f", "arguments": "{\\"x\\": \\"\\ud83d\\"}"}', False),
    ],
)
async def test_strange_but_valid_json(tokenizer: Any, style: Any, call: str, is_call: bool) -> None:
    """Deep nesting, and escapes that spell half of a surrogate pair, which UTF-8 cannot write."""
    engine = ScriptedEngine([f"<tool_call>\n{call}\n</tool_call>", "ok"], tokenizer=tokenizer)
    client = ArealOpenAI(engine, tokenizer, chat_template_type=style)
    ask = client.chat.completions.create
    first = await ask(model="m", messages=[USER], tools=TOOLS)
    message = first.choices[0].message
    assert bool(message.tool_calls) == is_call
    result = USER
    if message.tool_calls:
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "r"}
    second = await ask(model="m", messages=[USER, message, result], tools=TOOLS)
    assert client.interactions[second.id].parent is client.interactions[first.id]


@pytest.mark.parametrize("calls", [5, "x", [{"id": "a", "function": "f"}], [None]])
async def test_calls_that_are_none_are_refused_by_name(tokenizer: Any, calls: Any) -> None:
    from openai import BadRequestError

    client = ArealOpenAI(ScriptedEngine(["ok"], tokenizer=tokenizer), tokenizer)
    messages: Any = [USER, {"role": "assistant", "content": "a", "tool_calls": calls}]
    with pytest.raises(BadRequestError, match=r"messages\[1\].tool_calls"):
        await client.chat.completions.create(model="m", messages=messages)
    assert not client.interactions
