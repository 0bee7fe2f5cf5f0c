"""What a request demands of the form of its answer, as a grammar for guided decoding.

The grammar is a text in llguidance's Lark dialect (``%json`` embeds a JSON schema), so that one
string on GenerationConfig says all: a JSON object, a schema, or "call this tool".
https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md

    {"type": "json_object"}      ->  start: %json {"type": "object"}
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

from agent_rl.errors import RequestError
from agent_rl.types import JsonObject

ToolUse: TypeAlias = Literal["none", "auto", "required"]

_HERMES = "hermes"  # the form of tool calls that the grammar below writes
_TAGGED = (_HERMES, "qwen3_coder")  # forms whose calls end with this tag
_CLOSE = "</tool_call>"
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
    choice: Any, tools: Sequence[JsonObject] | None, *, is_parallel: bool, tool_form: str
) -> tuple[ToolUse, str | None]:
    """What ``tool_choice`` means: may, must or must not the model call, and by which grammar.

    ``tool_form`` is ``ChatFormat.tool_form``: how the model writes its calls.
    """
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
    if not tool_form.startswith(_HERMES):
        raise RequestError(
            f"tool_choice can be demanded in the {_HERMES} form only; this model writes its calls "
            f"in the form {tool_form!r}",
            param="tool_choice",
            code="unsupported_parameter",
        )
    schema = json.dumps({"anyOf": [_call_schema(function) for function in allowed]})
    repeat = 'call ("\\n" call)*' if is_parallel and name is None else "call"
    return "required", _CALLS.format(repeat=repeat, schema=schema)


def stop_after_one_call(tool_form: str, supported: frozenset[str]) -> str:
    """The stop string that honours ``parallel_tool_calls=false``: the end of the first call."""
    if "stop" in supported and tool_form.startswith(_TAGGED):
        return _CLOSE
    raise RequestError(
        f"parallel_tool_calls=false cannot be honoured: calls in the form {tool_form!r} do not end "
        "with a tag, or the engine knows no stop strings; leave it out",
        param="parallel_tool_calls",
        code="unsupported_parameter",
    )


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
