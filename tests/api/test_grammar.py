"""Grammars: what is demanded, in llguidance's Lark dialect."""

from __future__ import annotations

import importlib.util
import json
from typing import Any

import pytest
from transformers import AutoTokenizer

from agent_rl import small_model
from agent_rl.api.grammar import answer_grammar, stop_after_one_call, tool_grammar
from agent_rl.errors import RequestError
from agent_rl.tokens.format import ChatFormat

ARGUMENTS = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "f", "parameters": ARGUMENTS}},
    {"type": "function", "name": "g"},
]


def demand(choice: Any, *, tools: Any = TOOLS, parallel: bool = True, parser: str = "auto") -> Any:
    tokenizer = AutoTokenizer.from_pretrained(small_model())
    fmt = ChatFormat.of(tokenizer, tool_call_parser=parser)
    return tool_grammar(choice, tools, is_parallel=parallel, fmt=fmt)


def schema_of(grammar: str) -> Any:
    return json.loads(grammar.partition("%json ")[2])


def test_answer_formats() -> None:
    assert answer_grammar(None, where="f") is None
    assert answer_grammar({"type": "text"}, where="f") is None
    assert answer_grammar({"type": "json_object"}, where="f") == (
        'start: answer\nanswer: %json {"type": "object"}\n'
    )
    chat = {"type": "json_schema", "json_schema": {"name": "s", "schema": ARGUMENTS}}
    flat = {"type": "json_schema", "name": "s", "schema": ARGUMENTS}
    assert answer_grammar(chat, where="f") == answer_grammar(flat, where="f")
    assert schema_of(answer_grammar(chat, where="f") or "") == ARGUMENTS


def test_tool_choices() -> None:
    assert demand(None) == demand("auto") == ("auto", None)
    assert demand(None, tools=None) == demand("auto", tools=None) == ("none", None)
    assert demand("none") == ("none", None)


def test_required_allows_each_tool_and_several_calls() -> None:
    use, grammar = demand("required")
    assert use == "required"
    names = [s["properties"]["name"]["const"] for s in schema_of(grammar)["anyOf"]]
    assert names == ["f", "g"]
    assert grammar.startswith('start: answer\nanswer: call ("\\n" call)*\n')
    assert demand("required", parallel=False)[1].startswith("start: answer\nanswer: call\n")


@pytest.mark.parametrize(
    "choice",
    [{"type": "function", "function": {"name": "f"}}, {"type": "function", "name": "f"}],
)
def test_named_allows_one_call_of_that_tool(choice: Any) -> None:
    use, grammar = demand(choice)
    assert use == "required" and grammar.startswith("start: answer\nanswer: call\n")
    (only,) = schema_of(grammar)["anyOf"]
    assert only["properties"] == {"name": {"const": "f"}, "arguments": ARGUMENTS}


@pytest.mark.parametrize(
    ("choice", "tools", "message"),
    [
        ("required", None, "needs tools"),
        ({"type": "function", "name": "h"}, TOOLS, "names 'h'"),
        ("always", TOOLS, "must be none, auto"),
        ({"type": "web_search"}, TOOLS, "must be none, auto"),
    ],
)
def test_refused_choices(choice: Any, tools: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        demand(choice, tools=tools)
    assert caught.value.param == "tool_choice"


def test_other_forms_of_calls_cannot_be_demanded() -> None:
    with pytest.raises(RequestError, match="pythonic"):
        demand("required", parser="pythonic")
    assert stop_after_one_call("hermes (fallback)", frozenset({"stop"})) == "</tool_call>"
    with pytest.raises(RequestError, match="cannot be honoured"):
        stop_after_one_call("mistral", frozenset({"stop"}))
    with pytest.raises(RequestError, match="cannot be honoured"):
        stop_after_one_call("hermes", frozenset())


@pytest.mark.skipif(importlib.util.find_spec("llguidance") is None, reason="needs llguidance")
def test_grammars_compile() -> None:
    from llguidance import LLMatcher

    for grammar in (
        answer_grammar({"type": "json_object"}, where="f"),
        demand("required")[1],
        demand({"type": "function", "name": "f"})[1],
    ):
        assert LLMatcher.validate_grammar(grammar, None) == ""
