"""What Python takes for JSON and others do not is refused, and the place is named."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoTokenizer

from agent_rl import ScriptedEngine, small_model
from agent_rl.api import routes
from agent_rl.api.body import MAX_DEPTH, fault_in, parse_body
from agent_rl.api.session import Session
from agent_rl.errors import RequestError
from agent_rl.record.cache import InteractionCache
from agent_rl.tokens.format import ChatFormat


@pytest.mark.parametrize(
    ("content", "param", "why"),
    [
        (b'{"a": [{"b": "x\\ud83d"}]}', "a[0].b", "half of a surrogate pair"),
        (b'{"a": "\xed\xa0\xbd"}', "a", "half of a surrogate pair"),
        (b'{"a": {"\\ude42": 1}}', "a", "a key with half of a surrogate pair"),
        (b'{"temperature": NaN}', "temperature", "is nan"),
        (b'{"a": {"b": [1, -Infinity]}}', "a.b[1]", "is -inf"),
        (b'{"a": 1e999, "b": NaN}', "b", "is nan"),
        (b'{"a": [1.5, -1e999]}', "a[1]", "is -inf"),
        (b"NaN", None, "the body is nan"),
        (b"[1]", None, "must be a JSON object"),
        (b"\xff", None, "not JSON"),
        (b'{"a": ' + b"[" * 100_000, None, "nested too deeply"),
        (b'{"a": ' + b"[" * 100 + b"]" * 100 + b"}", None, "nested too deeply"),
        (b'{"a": ' + b'["]", ' * 100 + b"1" + b"]" * 100 + b"}", None, "nested too deeply"),
    ],
)
def test_what_is_refused(content: bytes, param: str | None, why: str) -> None:
    with pytest.raises(RequestError, match=why) as caught:
        parse_body(content)
    assert caught.value.param == param


def test_what_only_looks_like_it_is_taken() -> None:
    content = b'{"a": "NaN \\ud83d\\ude42", "b": "{\\"x\\": \\"\\\\ud83d\\"}", "c": "Infinity"}'
    shallow = b'{"a": [' + b"[{}, {}]," * 200 + b"[" * 98 + b"]" * 98 + b"]}"
    assert len(parse_body(shallow)["a"]) == 201
    assert parse_body(content) == {"a": "NaN 🙂", "b": '{"x": "\\ud83d"}', "c": "Infinity"}


def test_a_walk_ends_in_a_body_that_holds_itself() -> None:
    loop: list[Any] = []
    loop += [loop, loop]
    fault = fault_in({"messages": loop})
    assert fault is not None and f"more than {MAX_DEPTH} levels" in str(fault)
    assert fault_in({"messages": [[1.0, "🙂", None]]}) is None


@pytest.mark.parametrize("depth", [50, 300, 500, 700, 900])
@pytest.mark.parametrize("field", ["arguments", "tools"])
async def test_deep_nesting_is_an_answer_or_a_refusal(depth: int, field: str) -> None:
    """Arguments as a mapping, or a schema, that Python code may be unable to walk over."""
    smollm = AutoTokenizer.from_pretrained(small_model())
    engine = ScriptedEngine(["ok"], tokenizer=smollm, repeat=True)
    session = Session(engine=engine, format=ChatFormat.of(smollm), cache=InteractionCache())
    deep = '{"a":' * depth + "1" + "}" * depth
    function = f'{{"name": "f", "{"arguments" if field == "arguments" else "parameters"}": {deep}}}'
    call = f'{{"id": "x", "type": "function", "function": {function}}}'
    messages = '{"role": "user", "content": "a"}'
    if field == "arguments":
        messages += f', {{"role": "assistant", "tool_calls": [{call}]}}'
    tools = f', "tools": [{call}]' if field == "tools" else ""
    body = f'{{"model": "m", "messages": [{messages}]{tools}}}'
    reply = await routes.answer(session, "POST", "chat/completions", body.encode())
    assert reply.status == 200 or (reply.body and "nested" in reply.body["error"]["message"])
    assert len(session.cache) == (reply.status == 200)
