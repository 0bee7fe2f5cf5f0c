"""Tool calls as the client gives them: what the model wrote, streamed and not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from streams import HI, joined

from agent_rl import ArealOpenAI, ScriptedEngine

TOOLS: Any = [{"type": "function", "function": {"name": name}} for name in ("f", "g", "now")]
RAW_CALLS = (
    '{"name":"f","arguments":{"x":1,}}',
    '{"name":"f"',
    '{"arguments":{}}',
    "[1,2]",
    "null",
    '{"name": 3, "arguments": {}}',
)


def client_of(tokenizer: Any, *replies: Any, **options: Any) -> ArealOpenAI:
    return ArealOpenAI(ScriptedEngine(replies, tokenizer=tokenizer), tokenizer, **options)


def called(arguments: str, name: str = "f") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        *(
            (called(arguments), "", [("f", arguments)])
            for arguments in (
                '{"t":"use </tool_call> here"}',
                '{"cmd":"mkdir -p t/{a,b"}',
                '{"cmd":"echo })] ok"}',
                '{"a":{"b":{"c":"}"}}}',
                '{"q":"中文 🙂 \\u00e9", "n": 12345678901234567890, "f": 1.0}',
            )
        ),
        (
            "Both.\n" + called('{"x": 1}') + "\n" + called('{"x": 2}', "g"),
            "Both.",
            [("f", '{"x": 1}'), ("g", '{"x": 2}')],
        ),
        ('<tool_call>{"name":"now"}</tool_call>', "", [("now", "{}")]),
        (called("{}"), "", [("f", "{}")]),
        (called("null"), "", [("f", "{}")]),
        *((text := f"<tool_call>\n{raw}\n</tool_call>", text, []) for raw in RAW_CALLS),
    ],
)
async def test_calls_are_the_sampled_text(
    text: str, content: str, calls: list[tuple[str, str]], tokenizer: Any
) -> None:
    """Cases B20, B21, B22, B23, B25, B27, B32: names, arguments and content, streamed and not."""
    client = client_of(tokenizer, text, text)
    whole = await client.chat.completions.create(model="m", messages=HI, tools=TOOLS)
    message = whole.choices[0].message
    found = message.tool_calls or []
    assert (message.content or "", [(c.function.name, c.function.arguments) for c in found]) == (
        content,
        calls,
    )
    assert whole.choices[0].finish_reason == ("tool_calls" if calls else "stop")
    stream = await joined(client, tools=TOOLS)
    assert (stream.content[0], [tuple(each[1:]) for each in stream.calls[0].values()]) == (
        content,
        calls,
    )
    assert len({each.id for each in found}) == len(calls)
    sampled = (*tokenizer.encode(text), tokenizer.eos_token_id)
    assert all(
        row.model_response.output_tokens == sampled
        for row in client.export_interactions("individual").values()
    )


@pytest.mark.parametrize("end", ["", 'p"}}'])
async def test_a_call_cut_by_the_limit_is_not_executed(end: str, tokenizer: Any) -> None:
    """Case B31: "length", no call with invented arguments, all ids recorded; streamed and not."""
    text = '<tool_call>\n{"name":"rm","arguments":{"p":"/tm' + end
    ids = tokenizer.encode(text)
    reply = {"output_tokens": ids, "stop_reason": "length"}
    client = client_of(tokenizer, reply, reply)
    whole = await client.chat.completions.create(model="m", messages=HI, tools=TOOLS)
    stream = await joined(client, tools=TOOLS)
    message = whole.choices[0].message
    assert (message.content, message.tool_calls) == (text, None)
    assert (stream.content[0], stream.calls[0]) == (text, {})
    assert whole.choices[0].finish_reason == stream.finish[0] == "length"
    for interaction in client.interactions.values():
        assert interaction.model_response.output_tokens == tuple(ids)


async def test_arguments_are_never_evaluated(tokenizer: Any, tmp_path: Path) -> None:
    """Case B29: a parameter declared as an array stays the text it is; no file is made."""
    target = tmp_path / "pwn_b"
    code = f'__import__("pathlib").Path("{target}").write_text("x")'
    text = (
        f"<tool_call>\n<function=f>\n<parameter=items>\n{code}\n</parameter>\n</function>\n"
        "</tool_call>"
    )
    schema = {"type": "object", "properties": {"items": {"type": "array"}}}
    tools: Any = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    client = client_of(tokenizer, text, tool_call_parser="qwen3_coder")
    completion = await client.chat.completions.create(model="m", messages=HI, tools=tools)
    [call] = completion.choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == {"items": code}
    assert not target.exists()
