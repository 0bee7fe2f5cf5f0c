"""Wire formats of tool calls: sampled text -> names and exact argument texts.

A format looks at growing text (``Detokenizer``) from a place on and says in a ``Scan`` how far the
text is plain content, which complete calls follow, and where to go on. Text that never becomes a
valid call is content. Nothing sampled is ever evaluated. Knows nothing of reasoning or streaming.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from agent_rl.errors import ConfigError
from agent_rl.tokens import json_text
from agent_rl.tokens.decode import Detokenizer
from agent_rl.tokens.json_text import skip_space
from agent_rl.types import JsonObject


class ParsedToolCall(NamedTuple):
    """A call as sampled; ``arguments`` is JSON text of an object."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Scan:
    """``text[start:content_end]`` is content, ``calls`` follow, go on at ``resume``."""

    content_end: int
    resume: int
    calls: tuple[ParsedToolCall, ...] = ()


@dataclass(slots=True, kw_only=True)
class Reading:
    """What a format may look at: the text so far and what is known of the turn."""

    source: Detokenizer
    end: int
    is_final: bool
    is_cut: bool
    has_content: bool
    tools: Mapping[str, JsonObject] = field(default_factory=dict)

    @property
    def text(self) -> str:
        return self.source.text

    def find(self, marker: str, start: int) -> int:
        return self.source.find(marker, start, self.end)

    def until_maybe(self, marker: str) -> int:
        """How far the text can be shown although a marker may have begun at its end."""
        return self.end if self.is_final else self.end - self.source.num_held(marker, self.end)


class ToolFormat(Protocol):
    name: str
    markers: tuple[str, ...]

    def scan(self, reading: Reading, start: int) -> Scan: ...


def _content(end: int) -> Scan:
    return Scan(content_end=end, resume=end)


def _call_of(members: Mapping[str, str]) -> ParsedToolCall | None:
    """``{"name": ..., "arguments": {...}}``; arguments missing or null are ``{}``."""
    name = json_text.as_text(members.get("name", "null"))
    arguments = members.get("arguments", members.get("parameters", "null"))
    if arguments == "null":
        arguments = "{}"
    inner = json_text.as_text(arguments)
    if inner is not None:  # some models write the arguments as a JSON string of JSON
        arguments = inner
    if not name or not json_text.is_object(arguments):
        return None
    return ParsedToolCall(name, arguments)


class Tagged:
    """``<tool_call>`` body ``</tool_call>``, any number, with content around them."""

    open, close = "<tool_call>", "</tool_call>"
    markers: tuple[str, ...] = (open, close)
    name = "tagged"

    def scan(self, reading: Reading, start: int) -> Scan:
        opened = reading.find(self.open, start)
        if opened < 0:
            return _content(reading.until_maybe(self.open))
        body = opened + len(self.open)
        closed = reading.find(self.close, body)
        if closed < 0 and not reading.is_final:
            return _content(opened)
        parsed = self.call_at(reading, body)
        if parsed is not None:
            call, end = parsed
            after = skip_space(reading.text, end)
            if reading.source.is_at(self.close, after):
                resume = after + len(self.close)
                return Scan(content_end=opened, resume=resume, calls=(call,))
            if reading.is_final and not reading.is_cut and after >= reading.end:
                return Scan(content_end=opened, resume=reading.end, calls=(call,))
        if not reading.is_final:
            return _content(opened)
        return _content(closed + len(self.close) if closed >= 0 else reading.end)

    def call_at(self, reading: Reading, start: int) -> tuple[ParsedToolCall, int] | None:
        """A complete call at ``start`` and where it ends."""
        raise NotImplementedError


class Hermes(Tagged):
    """One JSON object in each block. A closing tag inside a JSON string is part of the string."""

    name = "hermes"

    def call_at(self, reading: Reading, start: int) -> tuple[ParsedToolCall, int] | None:
        found = json_text.object_members(reading.text, start, reading.end)
        call = _call_of(found[0]) if found else None
        return (call, found[1]) if found and call else None


_FUNCTION = re.compile(r"\s*<function=([^>\s]+)>\s*")
_PARAMETER = re.compile(
    r"<parameter=([^>\n]+)>(.*?)</parameter>\s*(?=<parameter=|</function>)", re.S
)


class QwenXml(Tagged):
    """``<function=f><parameter=x>1</parameter></function>`` in each block.

    Values are text: a parameter that the tool declares as a string keeps its text, any other one
    is used as JSON where it is JSON, and is a string where not.
    """

    name = "qwen3_coder"

    def call_at(self, reading: Reading, start: int) -> tuple[ParsedToolCall, int] | None:
        text = reading.text[: reading.end]
        head = _FUNCTION.match(text, start)
        if head is None:
            return None
        types = _declared_types(reading.tools.get(head[1], {}))
        place = head.end()
        members = []
        while parameter := _PARAMETER.match(text, place):
            key = parameter[1]
            value = _value_text(parameter[2], types.get(key))
            members.append(f"{json_text.dump(key)}: {value}")
            place = parameter.end()
        if not text.startswith("</function>", place):
            return None
        call = ParsedToolCall(head[1], "{" + ", ".join(members) + "}")
        return call, place + len("</function>")


def _declared_types(spec: Mapping[str, Any]) -> dict[str, Any]:
    properties = (spec.get("parameters") or {}).get("properties") or {}
    return {
        key: schema.get("type") for key, schema in properties.items() if isinstance(schema, Mapping)
    }


def _value_text(value: str, declared: Any) -> str:
    """The JSON text of one parameter; ``1.0`` and big integers keep their digits."""
    value = value.removeprefix("\n").removesuffix("\n")
    is_string = declared in ("string", ["string"])
    found = None if is_string else json_text.value_at(value, skip_space(value, 0))
    if found is not None and not value[found[1] :].strip():
        return value.strip()
    if declared == "boolean" and value.strip() in ("True", "False"):
        return value.strip().lower()
    return json_text.dump(value)


_GLM_PAIR = re.compile(
    r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>"
    r"(?=\s*(?:<arg_key>|</tool_call>))",
    re.S,
)


class Glm(Tagged):
    """``f<arg_key>x</arg_key><arg_value>1</arg_value>`` in each block; values as in ``QwenXml``."""

    name = "glm"

    def call_at(self, reading: Reading, start: int) -> tuple[ParsedToolCall, int] | None:
        text = reading.text[: reading.end]
        ends = [text.find(tag, start) for tag in ("<arg_key>", self.close)]
        name_end = min((end for end in ends if end >= 0), default=-1)
        name = text[start : max(name_end, start)].strip()
        if not name or "<" in name or any(char.isspace() for char in name):
            return None
        types = _declared_types(reading.tools.get(name, {}))
        place = name_end
        members = []
        while pair := _GLM_PAIR.match(text, place):
            key = pair[1].strip()
            members.append(f"{json_text.dump(key)}: {_value_text(pair[2], types.get(key))}")
            place = pair.end()
        return ParsedToolCall(name, "{" + ", ".join(members) + "}"), place


class Llama3Json:
    """The whole answer is ``{"name": ..., "parameters": {...}}``, several with ``;`` between.

    Without ``<|python_tag|>`` an answer in JSON may be meant as an answer: then only names of
    given tools are calls.
    """

    name = "llama3_json"
    tag = "<|python_tag|>"
    markers: tuple[str, ...] = (tag,)

    def scan(self, reading: Reading, start: int) -> Scan:
        text = reading.text[: reading.end]
        place = skip_space(text, start)
        has_tag = reading.source.is_at(self.tag, place)
        if reading.has_content or not (has_tag or _may_begin(text, place, ("{", self.tag))):
            return _content(reading.end)
        if not reading.is_final:
            return _content(start)
        calls = self._calls(text, place + len(self.tag) * has_tag)
        if calls and (has_tag or all(call.name in reading.tools for call in calls)):
            return Scan(content_end=start, resume=reading.end, calls=tuple(calls))
        return _content(reading.end)

    def _calls(self, text: str, place: int) -> list[ParsedToolCall]:
        calls = []
        while True:
            found = json_text.object_members(text, place, len(text))
            call = _call_of(found[0]) if found else None
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
            return _content(reading.until_maybe(self.tag))
        if not reading.is_final:
            return _content(opened)
        text = reading.text[: reading.end]
        calls = self._array(text, opened) or self._named(text, opened)
        if not calls:
            return _content(reading.end)
        return Scan(content_end=opened, resume=reading.end, calls=tuple(calls))

    def _array(self, text: str, opened: int) -> list[ParsedToolCall]:
        place = skip_space(text, opened + len(self.tag))
        calls: list[ParsedToolCall] = []
        while place < len(text) and text[place] == ("," if calls else "["):
            found = json_text.object_members(text, place + 1, len(text))
            call = _call_of(found[0]) if found else None
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
        text = reading.text[: reading.end]
        place = skip_space(text, start)
        has_tag = reading.source.is_at(self.tag, place)
        if reading.has_content or not (has_tag or _may_begin(text, place, ("[", self.tag))):
            return _content(reading.end)
        if not reading.is_final:
            return _content(start)
        calls = _python_calls(text[place + len(self.tag) * has_tag :])
        if calls and all(call.name in reading.tools for call in calls):
            return Scan(content_end=start, resume=reading.end, calls=tuple(calls))
        return _content(reading.end)


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
    except (SyntaxError, ValueError, RecursionError):
        return []


def _python_call(node: ast.expr) -> ParsedToolCall:
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("not a call with keywords")
    arguments = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise ValueError("** is not a literal")
        arguments[keyword.arg] = _literal(keyword.value)
    return ParsedToolCall(ast.unparse(node.func), json_text.dump(arguments))


_NAMES = {"true": True, "false": False, "null": None}


def _literal(node: ast.expr) -> Any:
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
            return {_literal(key): _literal(value) for key, value in pairs if key is not None}
    raise ValueError(f"{ast.dump(node)} is not a literal")


FORMATS: dict[str, ToolFormat] = {
    format.name: format
    for format in (Hermes(), QwenXml(), Glm(), Llama3Json(), Mistral(), Pythonic())
}
# Names that SGLang (`--tool-call-parser`) and vLLM use for the same wire formats.
ALIASES = {
    "qwen": "hermes",
    "qwen25": "hermes",
    "qwen3": "hermes",
    "qwen3_xml": "qwen3_coder",
    "glm45": "glm",
    "glm47": "glm",
    "llama3": "llama3_json",
    "llama4_json": "llama3_json",
    "llama4": "pythonic",
    "llama4_pythonic": "pythonic",
}


def tool_format(name: str) -> ToolFormat:
    """The format of that name or alias.

    Raises:
        ConfigError: an unknown name; the message lists the known ones.
    """
    found = FORMATS.get(ALIASES.get(name, name))
    if found is None:
        known = ", ".join(sorted([*FORMATS, *ALIASES]))
        raise ConfigError(f"tool_call_parser is {name!r}; it must be auto, none or one of: {known}")
    return found


# What a template's text has if it asks the model for a format; the first that is found counts.
_HINTS = (
    ("<function=", "qwen3_coder"),
    ("<arg_key>", "glm"),
    ("<minimax:tool_call>", "minimax-m2"),
    ("<|tool_calls_section_begin|>", "kimi-k2"),
    ("<\uff5ctool\u2581calls\u2581begin\uff5c>", "deepseek-v3"),
    ("<tool_call>", "hermes"),
    ("[TOOL_CALLS]", "mistral"),
    ("func_name1(", "pythonic"),
    ("<|python_tag|>", "llama3_json"),
    ('"parameters": ', "llama3_json"),
)


def detect(source: str, knows_tools: bool) -> str:
    """The format that a chat template's text asks the model for: ours, or that of a family."""
    if not knows_tools:
        return "hermes"
    return next((name for hint, name in _HINTS if hint in source), "hermes")
