"""OpenAI messages and tools in one normal form, as chat templates expect them.

The caller's objects are never changed: what differs is copied, message by message. Content becomes
text (None and a missing key are ""), tools get their ``{"type": "function", "function": {...}}``
envelope with keys in one order; tool arguments stay the caller's text until a template is known to
want a mapping. Knows nothing of templates or ids.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from agent_rl.errors import TokenError
from agent_rl.types import JsonObject

logger = logging.getLogger(__name__)

TEXT_PARTS: Mapping[str, str] = {
    **dict.fromkeys(("text", "input_text", "output_text"), "text"),
    "refusal": "refusal",
}
"""Types of content parts that are text, and the key that has it."""
_TOOL_KEYS = ("name", "description", "parameters")
_SCHEMA_KEYS = ("type", "description", "enum", "properties", "required")


def normal_messages(
    messages: Iterable[Any], *, takes_images: bool = False, at: int = 0
) -> list[JsonObject]:
    """Messages with text content, complete tool calls and plain Python values.

    ``at`` is the index of the first one, for errors.

    Raises:
        TokenError: a content part that is neither text nor, with ``takes_images``, an image.
    """
    return [
        _normal_message(message, f"messages[{index}]", takes_images)
        for index, message in enumerate(messages, start=at)
    ]


def normal_tools(tools: Iterable[Any] | None) -> list[JsonObject]:
    """Tools in their envelope; keys in one order, so that equal tools give equal prompts.

    A tool without a name cannot be called: it is left out with a warning and harms no other one.
    """
    normal = []
    for index, tool in enumerate([] if tools is None else tools):
        tool = plain(tool)
        spec = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if not isinstance(spec, Mapping) or not isinstance(spec.get("name"), str):
            _warn_once(f"tools[{index}] has no function name and is left out: {tool!r}")
            continue
        # strict=False and null fields are the defaults some clients write out and others do not.
        function = {
            key: value
            for key, value in spec.items()
            if key != "type" and value is not None and (key, value) != ("strict", False)
        }
        if isinstance(function.get("parameters"), Mapping):
            function["parameters"] = _ordered_schema(function["parameters"])
        normal.append({"type": "function", "function": _ordered(function, _TOOL_KEYS)})
    return normal


@lru_cache(maxsize=64)
def _warn_once(message: str) -> None:
    logger.warning(message)


def plain(value: Any) -> Any:
    """numpy arrays and scalars as Python lists and numbers; everything else as it is.

    Rows of a Parquet file bring them; a template cannot test or print them.
    """
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if type(value).__module__ == "numpy":
        return plain(value.tolist())
    return value


def arguments_text(arguments: Any) -> str:
    """Tool arguments as JSON text: the caller's own text, or the dump of a mapping."""
    if arguments is None or arguments == "":
        return "{}"
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def arguments_value(arguments: Any) -> Any:
    """``'{"x": 1}'`` -> mapping, ``''`` -> ``{}``; what is not a JSON object stays as it is."""
    if not isinstance(arguments, str):
        return {} if arguments is None else arguments
    try:
        parsed = json.loads(arguments) if arguments else {}
    except (ValueError, RecursionError):
        return arguments
    return parsed if isinstance(parsed, dict) else arguments


def _normal_message(message: Any, place: str, takes_images: bool) -> JsonObject:
    if not isinstance(message, Mapping):
        raise TypeError(f"{place} is a {type(message).__name__}; a message is a dict with a role")
    normal = {key: value for key, value in plain(dict(message)).items() if value is not None}
    if not isinstance(normal.get("role"), str):
        raise TokenError(f"{place} has no role")
    normal["content"] = _normal_content(normal.get("content"), f"{place}.content", takes_images)
    reasoning = normal.pop("reasoning", None)
    if isinstance(reasoning, str):
        normal.setdefault("reasoning_content", reasoning)
    calls = normal.pop("tool_calls", None)
    if calls and not isinstance(calls, list):
        raise TokenError(f"{place}.tool_calls is a {type(calls).__name__}; it must be a list")
    if calls:
        normal["tool_calls"] = [_normal_call(call, place) for call in calls]
    return normal


def _normal_content(content: Any, place: str, takes_images: bool) -> str | list[JsonObject]:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise TokenError(
            f"{place} is a {type(content).__name__}; it must be text or a list of parts"
        )
    parts = [_normal_part(part, f"{place}[{i}]", takes_images) for i, part in enumerate(content)]
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return parts


def _normal_part(part: Any, place: str, takes_images: bool) -> JsonObject:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind = str(part.get("type", "text")) if isinstance(part, Mapping) else type(part).__name__
    if kind in TEXT_PARTS:
        return {"type": "text", "text": str(part.get(TEXT_PARTS[kind]) or "")}
    if takes_images and kind in ("image", "image_url", "input_image"):
        return {**part, "type": "image"}
    raise TokenError(
        f"{place} has type {kind!r}, which this chat template cannot take; send text parts only"
    )


def _normal_call(call: Any, place: str) -> JsonObject:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise TokenError(f"{place}.tool_calls has a call without function.name: {call!r}")
    return {
        "id": str(call.get("id") or ""),
        "type": "function",
        "function": {"name": function["name"], "arguments": function.get("arguments")},
    }


def _ordered(mapping: Mapping[str, Any], first: Sequence[str]) -> JsonObject:
    return {key: mapping[key] for key in (*first, *mapping) if key in mapping}


def _ordered_schema(schema: Any) -> Any:
    """Keywords of a JSON schema in one order; the order of the properties stays the caller's."""
    if isinstance(schema, list):
        return [_ordered_schema(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    ordered = {key: _ordered_schema(value) for key, value in schema.items() if key != "properties"}
    properties = schema.get("properties")
    if isinstance(properties, Mapping):
        ordered["properties"] = {key: _ordered_schema(value) for key, value in properties.items()}
    elif properties is not None:
        ordered["properties"] = properties
    return _ordered(ordered, _SCHEMA_KEYS)
