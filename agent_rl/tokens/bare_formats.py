"""Wire formats of tool calls that take the whole answer, or all of it behind one mark.

Llama's JSON, Mistral's list and Python calls. They are decided when the answer is complete: until
then what may be a call is held back. See ``tool_formats`` for what a format is.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from typing import Any

from agent_rl.tokens import json_text
from agent_rl.tokens.json_text import skip_space
from agent_rl.tokens.tool_formats import ParsedToolCall, Reading, Scan, call_of, content


class Llama3Json:
    """The whole answer is ``{"name": ..., "parameters": {...}}``, several with ``;`` between.

    Without ``<|python_tag|>`` an answer in JSON may be meant as an answer: then only names of
    given tools are calls.
    """

    name = "llama3_json"
    tag = "<|python_tag|>"
    markers: tuple[str, ...] = (tag,)

    def scan(self, reading: Reading, start: int) -> Scan:
        return _scan_whole(reading, start, self.tag, "{", self._calls, trusts_tag=True)

    def _calls(self, text: str) -> list[ParsedToolCall]:
        calls, place = [], 0
        while True:
            found = json_text.object_members(text, place, len(text))
            call = call_of(found[0]) if found else None
            if found is None or call is None:
                return []
            calls.append(call)
            place = skip_space(text, found[1])
            if place == len(text):
                return calls
            if text[place] != ";":
                return []
            place = skip_space(text, place + 1)


class Mistral:
    """``[TOOL_CALLS][{"name": ..., "arguments": {...}}]`` or ``[TOOL_CALLS]name[ARGS]{...}``."""

    name = "mistral"
    tag, args, call_id = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
    markers: tuple[str, ...] = (tag, args, call_id)

    def scan(self, reading: Reading, start: int) -> Scan:
        opened = reading.find(self.tag, start)
        if opened < 0:
            return content(reading.until_maybe(self.tag))
        if not reading.is_final:
            return content(opened)
        text = reading.text[: reading.end]
        calls = self._array(text, opened) or self._named(text, opened)
        if not calls:
            return content(reading.end)
        return Scan(content_end=opened, resume=reading.end, calls=tuple(calls))

    def _array(self, text: str, opened: int) -> list[ParsedToolCall]:
        place = skip_space(text, opened + len(self.tag))
        calls: list[ParsedToolCall] = []
        while place < len(text) and text[place] == ("," if calls else "["):
            found = json_text.object_members(text, place + 1, len(text))
            call = call_of(found[0]) if found else None
            if found is None or call is None:
                return []
            calls.append(call)
            place = skip_space(text, found[1])
        is_closed = text.startswith("]", place) and not text[place + 1 :].strip()
        return calls if is_closed else []

    def _named(self, text: str, opened: int) -> list[ParsedToolCall]:
        calls = []
        place = opened
        while text.startswith(self.tag, place):
            brace = text.find("{", place)
            head = text[place + len(self.tag) : max(brace, 0)]
            name = head.split(self.call_id)[0].removesuffix(self.args).strip()
            found = json_text.object_members(text, brace, len(text)) if brace >= 0 else None
            if found is None or not name or any(char.isspace() for char in name):
                return []
            calls.append(ParsedToolCall(name, text[brace : found[1]]))
            place = skip_space(text, found[1])
        return calls if place == len(text) else []


class Pythonic:
    """The whole answer is ``[f(x=1), g(y="a")]``: literals only, read from the syntax tree."""

    name = "pythonic"
    tag = "<|python_tag|>"
    markers: tuple[str, ...] = (tag,)

    def scan(self, reading: Reading, start: int) -> Scan:
        return _scan_whole(reading, start, self.tag, "[", _python_calls, trusts_tag=False)


def _scan_whole(
    reading: Reading,
    start: int,
    tag: str,
    opening: str,
    read: Callable[[str], list[ParsedToolCall]],
    *,
    trusts_tag: bool,
) -> Scan:
    """The whole answer, behind an optional tag, is calls or it is content.

    Only names of given tools are calls, except behind the tag where that says enough.
    """
    text = reading.text[: reading.end]
    place = skip_space(text, start)
    has_tag = reading.source.is_at(tag, place)
    if reading.has_content or not (has_tag or _may_begin(text, place, (opening, tag))):
        return content(reading.end)
    if not reading.is_final:
        return content(start)
    calls = read(text[place + len(tag) * has_tag :])
    is_known = (has_tag and trusts_tag) or all(call.name in reading.tools for call in calls)
    if calls and is_known:
        return Scan(content_end=start, resume=reading.end, calls=tuple(calls))
    return content(reading.end)


def _may_begin(text: str, place: int, heads: Sequence[str]) -> bool:
    """Whether what stands at ``place`` is, or may still become, one of the heads."""
    rest = text[place:]
    return any(rest.startswith(head) or head.startswith(rest) for head in heads)


def _python_calls(source: str) -> list[ParsedToolCall]:
    try:
        body = ast.parse(source.strip()).body
        if len(body) != 1 or not isinstance(body[0], ast.Expr):
            return []
        tree = body[0].value
        nodes = tree.elts if isinstance(tree, ast.List) else []
        return [_python_call(node) for node in nodes]
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return []  # TypeError: a key that is a list; MemoryError: Python's parser, too deep


def _python_call(node: ast.expr) -> ParsedToolCall:
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("not a call with keywords")
    arguments = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise ValueError("** is not a literal")
        arguments[keyword.arg] = _literal(keyword.value)
    text = json_text.dump(arguments)
    if not json_text.is_object(text):
        raise ValueError("too deep, or a number that JSON does not have")
    return ParsedToolCall(ast.unparse(node.func), text)


_NAMES = {"true": True, "false": False, "null": None}


def _literal(node: ast.expr | None) -> Any:
    match node:
        case ast.Constant(value=str() | bool() | int() | float() | None as value):
            return value
        case ast.Name(id=name) if name in _NAMES:
            return _NAMES[name]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_literal(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            pairs = zip(keys, values, strict=True)
            return {_literal(key): _literal(value) for key, value in pairs}
    raise ValueError("not a literal")
