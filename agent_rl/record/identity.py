"""Canonical message identity, and the hash chain that finds a parent in one pass.

Two messages are the same when an agent framework may have turned one into the other by storing and
replaying it: content null, "" and absent; text parts and their joined text; an answer without the
space around it; tool calls with the same ids, or else with arguments that are equal JSON values.
Keys that no template renders (name, refusal, annotations, ...) and null values say nothing.

Keys are 64-bit hashes seeded per process; they find candidates, tokens confirm them.
"""

from __future__ import annotations

import json
from collections.abc import Container, Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from agent_rl.tokens.messages import TEXT_PARTS
from agent_rl.types import JsonObject

Key: TypeAlias = int
START: Key = 0

_IGNORED = frozenset({"cache_control", "index", "annotations", "provider_specific_fields"})


class Chain:
    """Keys of growing prefixes of one message list.

    ``issued`` holds the tool-call ids of recorded answers. An assistant message that carries only
    such ids is identified by them alone, because frameworks rewrite the text and the arguments
    beside them. A tool result is identified by *which* call of the assistant message it answers,
    so that rewritten ids do not matter.
    """

    __slots__ = ("_calls", "_issued", "key")

    def __init__(self, issued: Container[str] = ()) -> None:
        self.key = START
        self._issued = issued
        self._calls: dict[str, int] = {}

    def add(self, message: Mapping[str, Any]) -> Key:
        """The key of the prefix that ends with ``message``. The hot path: 400 times a request."""
        role = message.get("role")
        content = message.get("content")
        if content.__class__ is not str:
            content = _content(content)
        if role == "assistant":
            said = content.strip() if content.__class__ is str else content
            calls = message.get("tool_calls")
            self.key = hash((self.key, said, ())) if not calls else self._add_calls(message)
        elif role == "tool":
            call_id = message.get("tool_call_id")
            answers = self._calls.get(call_id, call_id) if isinstance(call_id, str) else None
            self.key = hash((self.key, role, content, answers))
        else:
            self.key = hash((self.key, role, content))
        return self.key

    def _add_calls(self, message: Mapping[str, Any]) -> Key:
        ids = tool_call_ids(message)
        self._calls = {call_id: index for index, call_id in enumerate(ids)}
        if ids and all(call_id in self._issued for call_id in ids):
            return hash((self.key, ids))
        return hash((self.key, *_value(message)))


def answer_keys(key: Key, answers: Sequence[Mapping[str, Any]]) -> tuple[Key, ...]:
    """Keys under which a replay of the recorded answer can arrive: by value and, if any, by ids."""
    by_value = by_ids = key
    for message in answers:
        ids = tool_call_ids(message)
        by_value = hash((by_value, *_value(message)))
        by_ids = hash((by_ids, ids)) if ids else hash((by_ids, *_value(message)))
    return (by_value,) if by_ids == by_value else (by_value, by_ids)


def tool_call_ids(message: Mapping[str, Any]) -> tuple[str, ...]:
    """Ids of the message's tool calls; empty when there are none or one has no id."""
    calls = _calls(message)
    ids = [call.get("id") for call in calls if isinstance(call, Mapping)]
    known = tuple(call_id for call_id in ids if isinstance(call_id, str) and call_id)
    return known if len(known) == len(calls) else ()


def text_of(message: Mapping[str, Any]) -> str:
    """The message's text, parts joined; other parts left out."""
    content = _content(message.get("content"))
    if isinstance(content, tuple):
        return "".join(part for part in content if isinstance(part, str))
    return str(content)


def as_messages(messages: Iterable[Any]) -> list[JsonObject]:
    """Chat messages as JSON objects; SDK message objects are dumped.

    Raises:
        ValueError: there is no message.
        TypeError: an element is neither an object nor a model; the text names its index.
    """
    if isinstance(messages, str | bytes | Mapping):
        raise TypeError(f"messages must be a list of objects, not {type(messages).__name__}")
    found = list(messages)
    if not found:
        raise ValueError("messages is empty; a request needs at least one message")
    if set(map(type, found)) == {dict}:
        return found
    return [_as_json(message, index) for index, message in enumerate(found)]


def _as_json(message: Any, index: int) -> JsonObject:
    if isinstance(message, dict):
        return message
    if isinstance(message, Mapping):
        return dict(message)
    if hasattr(message, "model_dump"):
        dumped: JsonObject = message.model_dump(exclude_none=True)
        return dumped
    raise TypeError(
        f"messages[{index}] is a {type(message).__name__}; a message must be an object with a role"
    )


def _value(message: Mapping[str, Any]) -> tuple[Hashable, ...]:
    """An assistant message by what it says; ``Chain.add`` has the case without calls inline."""
    content = _content(message.get("content"))
    said = content.strip() if isinstance(content, str) else content
    return (said, tuple(_call_value(call) for call in _calls(message)))


def _calls(message: Mapping[str, Any]) -> Sequence[Any]:
    calls = message.get("tool_calls")
    return calls if isinstance(calls, list | tuple) else ()


def _call_value(call: Any) -> Hashable:
    function = call.get("function") or call if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return repr(call)
    return (str(function.get("name")), _arguments(function.get("arguments")))


def _arguments(arguments: Any) -> str:
    """One text for equal JSON values: '{"y":null,"x":1.0}' and {"x": 1} are both '{"x": 1}'.

    Not a hash of the value: -1 and -2 have the same hash.
    """
    if not arguments:
        return "{}"
    try:
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, default=repr)
        value = json.loads(
            text, object_hook=_without_nulls, parse_float=_number, parse_constant=str
        )
        return json.dumps(value, sort_keys=True)
    except (TypeError, ValueError, RecursionError):
        return arguments if isinstance(arguments, str) else repr(arguments)


def _without_nulls(value: JsonObject) -> JsonObject:
    return {key: item for key, item in value.items() if item is not None}


def _number(text: str) -> float | int:
    number = float(text)
    return int(number) if number.is_integer() else number


def _content(content: Any) -> Hashable:
    """ "a" == [{"type": "text", "text": "a"}]; None == "" == []."""
    if isinstance(content, str):
        return content
    if not content:
        return ""
    if not isinstance(content, list | tuple):
        return _frozen(content)
    parts = tuple(_part(part) for part in content)
    return "".join(parts) if all(isinstance(part, str) for part in parts) else parts  # type: ignore[arg-type]


def _part(part: Any) -> Hashable:
    if isinstance(part, Mapping) and (key := TEXT_PARTS.get(str(part.get("type")))):
        return str(part.get(key) or "")
    return _frozen(part)


def _frozen(value: Any) -> Hashable:
    """A hashable form of a content part: {"a": 1, "b": null} == {"a": 1.0}, but true is not 1."""
    if isinstance(value, Mapping):
        items = ((key, item) for key, item in value.items() if key not in _IGNORED)
        return frozenset((key, _frozen(item)) for key, item in items if item is not None)
    if isinstance(value, list | tuple):
        return tuple(_frozen(item) for item in value)
    if isinstance(value, bool):
        return ("bool", value)
    return value if isinstance(value, Hashable) else repr(value)
