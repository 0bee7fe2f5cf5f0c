"""Wire formats of tool calls between tags: sampled text -> names and exact argument texts.

A format looks at growing text (``Detokenizer``) from a place on and says in a ``Scan`` how far the
text is plain content, which complete calls follow, and where to go on. Text that never becomes a
valid call is content. Nothing sampled is ever evaluated. Knows nothing of reasoning or streaming.
Formats without tags around each call are in ``bare_formats``, their names in ``tool_parsers``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

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


@dataclass(frozen=True, slots=True, kw_only=True)
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


def content(end: int) -> Scan:
    """Plain content up to ``end``, and go on there."""
    return Scan(content_end=end, resume=end)


def call_of(members: Mapping[str, str]) -> ParsedToolCall | None:
    """``{"name": ..., "arguments": {...}}``; arguments missing, null or "" are ``{}``."""
    name = json_text.as_text(members.get("name", "null"))
    arguments = members.get("arguments", members.get("parameters", "null"))
    if arguments == "null":
        arguments = "{}"
    inner = json_text.as_text(arguments)
    if inner is not None:  # some models write the arguments as a JSON string of JSON
        arguments = inner or "{}"
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
            return content(reading.until_maybe(self.open))
        body = opened + len(self.open)
        closed = reading.find(self.close, body)
        if closed < 0 and not reading.is_final:
            return content(opened)
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
            return content(opened)
        return content(closed + len(self.close) if closed >= 0 else reading.end)

    def call_at(self, reading: Reading, start: int) -> tuple[ParsedToolCall, int] | None:
        """A complete call at ``start`` and where it ends."""
        raise NotImplementedError


class Hermes(Tagged):
    """One JSON object in each block. A closing tag inside a JSON string is part of the string."""

    name = "hermes"

    def call_at(self, reading: Reading, start: int) -> tuple[ParsedToolCall, int] | None:
        found = json_text.object_members(reading.text, start, reading.end)
        call = call_of(found[0]) if found else None
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
