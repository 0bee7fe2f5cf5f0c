"""Grammars of tool calls, one for each wire format, in llguidance's Lark dialect.

A grammar here is a list of rules without a ``start``; ``answer`` is one call or several. A tag that
is one token of the vocabulary is demanded as that token, ``<[151657]>``, because only the token
counts as a tag when the answer is read. Arguments are JSON of the tool's schema; between tags a
string is any text up to the closing tag, as the formats have it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from agent_rl.types import JsonObject

Mark = Callable[[str], str]
"""A tag as the grammar writes it: its token, or its text in quotes."""
Functions = Sequence[JsonObject]


def call_rules(form: str, functions: Functions, *, is_single: bool, mark: Mark) -> str | None:
    """None for a wire format that has no grammar here."""
    write = _FORMS.get(form)
    if write is None:
        return None
    return "".join(f"{rule}\n" for rule in write(functions, is_single, mark))


def _hermes(functions: Functions, is_single: bool, mark: Mark) -> Iterator[str]:
    yield f"answer: {_repeated('call', is_single)}"
    yield f'call: {mark("<tool_call>")} "\\n" body "\\n" {mark("</tool_call>")}'
    yield f"body: {_any_call(functions, 'arguments')}"


def _llama3_json(functions: Functions, is_single: bool, mark: Mark) -> Iterator[str]:
    yield f"answer: {_repeated('call', is_single, between='; ')}"
    yield f"call: {_any_call(functions, 'parameters')}"


def _mistral(functions: Functions, is_single: bool, mark: Mark) -> Iterator[str]:
    """``[TOOL_CALLS]f[ARGS]{...}`` where the vocabulary has both marks, else a list of objects."""
    tag, args = mark("[TOOL_CALLS]"), mark("[ARGS]")
    if not args.startswith("<"):
        calls = _repeated("call", is_single, between=", ")
        yield f'answer: {tag} "[" {calls} "]"'
        yield f"call: {_any_call(functions, 'arguments')}"
        return
    yield f"answer: {_repeated('call', is_single, between='')}"
    yield f"call: {tag} ({_choice(functions)})"
    for index, function in enumerate(functions):
        yield f"call_{index}: {_text(function['name'])} {args} {_json(_schema(function))}"


def _qwen_xml(functions: Functions, is_single: bool, mark: Mark) -> Iterator[str]:
    yield f"answer: {_repeated('call', is_single)}"
    yield f'call: {mark("<tool_call>")} "\\n" ({_choice(functions)}) "\\n" {mark("</tool_call>")}'
    yield "text[lazy]: /(?s:.*)\\n<\\/parameter>/"
    for index, function in enumerate(functions):
        members = []
        for number, (name, value, is_optional) in enumerate(_members(function)):
            rule = f"value_{index}_{number}"
            ended = f'{value} "\\n</parameter>"' if value else "text"
            opened = _text(f"<parameter={name}>\n")
            yield f'{rule}: {opened} {ended} "\\n"'
            members.append(f"{rule}?" if is_optional else rule)
        if _is_open(function):
            yield f'any_{index}: "<parameter=" /[^>\\n]+/ ">\\n" text "\\n"'
            members.append(f"any_{index}*")
        head = _text(f"<function={function['name']}>\n")
        yield f'call_{index}: {" ".join([head, *members])} "</function>"'


def _glm(functions: Functions, is_single: bool, mark: Mark) -> Iterator[str]:
    tags = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
    opens_key, closes_key, opens_value, closes_value = map(mark, tags)
    is_token = closes_value.startswith("<")
    yield f"answer: {_repeated('call', is_single)}"
    yield f"call: {mark('<tool_call>')} ({_choice(functions)}) {mark('</tool_call>')}"
    yield f"text: /(?s:.*)/ {closes_value}" if is_token else "text[lazy]: /(?s:.*)<\\/arg_value>/"
    for index, function in enumerate(functions):
        members = []
        for number, (name, value, is_optional) in enumerate(_members(function)):
            rule = f"value_{index}_{number}"
            ended = f"{value} {closes_value}" if value else "text"
            key = f'{opens_key} {_text(name)} {closes_key} "\\n" {opens_value}'
            yield f'{rule}: {key} {ended} "\\n"'
            members.append(f"{rule}?" if is_optional else rule)
        if _is_open(function):
            key = f'{opens_key} /[^<\\n]+/ {closes_key} "\\n" {opens_value}'
            yield f'any_{index}: {key} text "\\n"'
            members.append(f"any_{index}*")
        head = _text(f"{function['name']}\n")
        yield f"call_{index}: {' '.join([head, *members])}"


_FORMS: dict[str, Callable[[Functions, bool, Mark], Iterator[str]]] = {
    "hermes": _hermes,
    "llama3_json": _llama3_json,
    "mistral": _mistral,
    "qwen3_coder": _qwen_xml,
    "glm": _glm,
}


def _repeated(rule: str, is_single: bool, *, between: str = "\n") -> str:
    if is_single:
        return rule
    return f"{rule} ({_text(between)} {rule})*" if between else f"{rule}+"


def _choice(functions: Functions) -> str:
    return " | ".join(f"call_{index}" for index in range(len(functions)))


def _any_call(functions: Functions, arguments: str) -> str:
    """``{"name": "f", "arguments": {...}}`` for one of the functions."""
    calls = []
    for index, function in enumerate(functions):
        schema = _moved(_schema(function), f"/anyOf/{index}/properties/{arguments}")
        call = {
            "type": "object",
            "properties": {"name": {"const": function["name"]}, arguments: schema},
            "required": ["name", arguments],
            "additionalProperties": False,
        }
        calls.append(call)
    return _json({"anyOf": calls})


def _moved(schema: Any, place: str) -> Any:
    """A schema that now stands at ``place`` of another: "#/$defs/N" -> "#/anyOf/0/.../$defs/N"."""
    if isinstance(schema, list):
        return [_moved(item, place) for item in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {key: _moved(value, place) for key, value in schema.items()}
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = f"#{place}{reference[1:]}"
    return moved


def _members(function: JsonObject) -> Iterator[tuple[str, str, bool]]:
    """(name, grammar of the value, whether it may be left out) of the declared parameters.

    The grammar is empty for a string of any text.
    """
    parameters = _schema(function)
    shared = {key: parameters[key] for key in ("$defs", "definitions") if key in parameters}
    for name, schema in (parameters.get("properties") or {}).items():
        is_optional = name not in (parameters.get("required") or ())
        if not isinstance(schema, dict) or schema.get("type") not in ("string", ["string"]):
            value = _json({**shared, **schema} if isinstance(schema, dict) else schema)
        else:
            texts = [schema["const"]] if "const" in schema else schema.get("enum") or []
            value = f"({' | '.join(map(_text, texts))})" if texts else ""
        yield name, value, is_optional


def _is_open(function: JsonObject) -> bool:
    """No parameters are declared, and so any may come."""
    parameters = _schema(function)
    return not parameters.get("properties") and parameters.get("additionalProperties") is not False


def _schema(function: JsonObject) -> JsonObject:
    parameters: JsonObject = function.get("parameters") or {"type": "object"}
    return parameters


def _text(text: Any) -> str:
    return json.dumps(str(text))


def _json(schema: Any) -> str:
    return f"%json {json.dumps(schema)}"
