"""What a request demands of the form of its answer, as a grammar for guided decoding.

The grammar is a text in llguidance's Lark dialect (``%json`` embeds a JSON schema), so that one
string on GenerationConfig says all: a JSON object, a schema, or "call this tool".
https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md

    {"type": "json_object"}      ->  start: %json {"type": "object"}
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal

from agent_rl.api.fields import Fields
from agent_rl.errors import RequestError
from agent_rl.types import JsonObject

# The Hermes/Qwen form, which every parser of ours reads.
_CALLS = """\
start: {repeat}
call: "<tool_call>\\n" body "\\n</tool_call>"
body: %json {schema}
"""


def answer_grammar(response_format: JsonObject | None, *, where: str) -> str | None:
    """``where``: ``response_format`` of chat, ``text.format`` of responses."""
    if response_format is None:
        return None
    kind = response_format.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return _json_grammar({"type": "object"})
    if kind == "json_schema":
        schema = response_format.get("json_schema", response_format).get("schema")
        if not isinstance(schema, dict):
            raise RequestError(f"{where} has no schema", param=where)
        return _json_grammar(schema)
    raise RequestError(
        f"{where}.type is {kind!r}; it must be text, json_object or json_schema",
        param=f"{where}.type",
    )


def tool_grammar(
    choice: Any, tools: Sequence[JsonObject] | None, *, is_parallel: bool
) -> tuple[Literal["none", "auto", "required"], str | None]:
    """What ``tool_choice`` means: may, must or must not the model call, and by which grammar."""
    if choice is None:
        return ("auto" if tools else "none"), None
    name = _named(choice)
    if choice in ("none", "auto"):
        return ("none" if not tools else choice), None
    if choice != "required" and name is None:
        raise RequestError(
            f"tool_choice is {choice!r}; it must be none, auto, required or a function's name",
            param="tool_choice",
        )
    functions = [tool.get("function", tool) for tool in tools or ()]
    allowed = [f for f in functions if "name" in f and name in (None, f["name"])]
    if not allowed:
        what = "needs tools" if name is None else f"names {name!r}, which is not in tools"
        raise RequestError(f"tool_choice {what}", param="tool_choice")
    schema = json.dumps({"anyOf": [_call_schema(function) for function in allowed]})
    repeat = 'call ("\\n" call)*' if is_parallel and name is None else "call"
    return "required", _CALLS.format(repeat=repeat, schema=schema)


def refuse_two_grammars(fields: Fields, answer: str | None, tool: str | None) -> str | None:
    if answer is not None and tool is not None:
        raise fields.refusal("tool_choice", "and a JSON answer format exclude one another")
    return answer or tool


def _json_grammar(schema: JsonObject) -> str:
    return f"start: %json {json.dumps(schema)}\n"


def _named(choice: Any) -> str | None:
    """Chat nests the name, ``responses`` does not."""
    if not isinstance(choice, dict) or choice.get("type") != "function":
        return None
    name = choice.get("function", choice).get("name")
    return name if isinstance(name, str) else None


def _call_schema(function: JsonObject) -> JsonObject:
    return {
        "type": "object",
        "properties": {
            "name": {"const": function["name"]},
            "arguments": function.get("parameters") or {"type": "object"},
        },
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }
