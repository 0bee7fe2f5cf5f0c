"""Anthropic content blocks <-> chat messages. One turn of the assistant is several blocks.

thinking "add", text "ok", tool_use f   <->  {"role": "assistant", "content": "ok",
                                              "reasoning_content": "add", "tool_calls": [f]}
user: tool_result, text "go on"          ->  {"role": "tool", ...}, {"role": "user", ...}
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from agent_rl.api.fields import Fields
from agent_rl.errors import RequestError
from agent_rl.types import JsonObject

_ROLES = ("user", "assistant", "system")


def system_message(system: str | Sequence[Any] | None) -> list[JsonObject]:
    """The system prompt as a message, if there is one. Its blocks are paragraphs."""
    if not system:
        return []
    if isinstance(system, str):
        return [{"role": "system", "content": system}]
    texts = [_text(block, f"system[{index}]") for index, block in enumerate(system)]
    return [{"role": "system", "content": "\n\n".join(texts)}]


def messages_of(messages: Sequence[Any] | None) -> list[JsonObject]:
    """Raises RequestError naming the message or block that a model of text cannot read."""
    if not messages:
        raise RequestError("messages must be a non-empty list", param="messages")
    found: list[JsonObject] = []
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        role = message.get("role") if isinstance(message, dict) else None
        if role not in _ROLES:
            raise RequestError(
                f"{where}.role is {role!r}; it must be one of {', '.join(_ROLES)}",
                param=f"{where}.role",
            )
        content = message.get("content")
        if isinstance(content, str):
            found.append({"role": role, "content": content})
        elif not isinstance(content, list):
            raise RequestError(
                f"{where}.content must be a string or a list of blocks", param=f"{where}.content"
            )
        elif role == "assistant":
            found.append(_assistant_message(content, f"{where}.content"))
        else:
            found += _input_messages(role, content, f"{where}.content")
    return found


def tools_of(tools: Sequence[Any] | None) -> list[JsonObject] | None:
    """Tools of the client in chat's envelope. Tools that run on a server are refused by name."""
    wrapped = []
    for index, tool in enumerate(tools or ()):
        where = f"tools[{index}]"
        if not isinstance(tool, dict) or tool.get("type") not in (None, "custom"):
            kind = tool.get("type") if isinstance(tool, dict) else type(tool).__name__
            raise RequestError(
                f"{where} is the built-in tool {kind!r}; only tools of the client are supported",
                param=where,
                code="unsupported_tool",
            )
        wrapped.append({"type": "function", "function": _function(Fields(tool, where=where))})
    return wrapped or None


def content_blocks(
    message: JsonObject, *, signature: str, shows_thinking: bool
) -> list[JsonObject]:
    """The blocks of a finished answer, in the order in which a stream sends them."""
    blocks: list[JsonObject] = []
    if message.get("reasoning_content"):
        thinking = message["reasoning_content"] if shows_thinking else ""
        blocks.append({"type": "thinking", "thinking": thinking, "signature": signature})
    if message["content"]:
        blocks.append({"type": "text", "text": message["content"]})
    for call in message.get("tool_calls", ()):
        blocks.append(tool_use_block(call) | {"input": _input(call["function"]["arguments"])})
    return blocks


def _input(arguments: str) -> JsonObject:
    """What a model wrote as JSON and Python cannot write again stays as text: 1e999 -> "1e999".

    Half of a surrogate pair becomes U+FFFD. The record keeps the arguments as they are.
    """
    given: JsonObject = json.loads(arguments, parse_float=_float_or_text)
    if "\\u" in arguments:
        text = json.dumps(given, ensure_ascii=False).encode("utf-16", "surrogatepass")
        given = json.loads(text.decode("utf-16", "replace"))
    return given


def _float_or_text(number: str) -> float | str:
    value = float(number)
    return value if math.isfinite(value) else number


def tool_use_block(call: JsonObject) -> JsonObject:
    """A call whose input is still to come."""
    return {"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": {}}


def _function(fields: Fields) -> JsonObject:
    name, schema = fields.string("name"), fields.mapping("input_schema")
    if name is None or schema is None:
        raise fields.refusal("name" if name is None else "input_schema", "is missing")
    description, is_strict = fields.string("description"), fields.boolean("strict")
    for hint in ("type", "cache_control", "eager_input_streaming"):
        fields.raw(hint)
    fields.only("allowed_callers", [], ["direct"])
    fields.only("defer_loading", False)
    fields.only("input_examples", [])
    fields.finish()
    function: JsonObject = {"name": name, "parameters": schema}
    if description is not None:
        function["description"] = description
    return function | ({"strict": True} if is_strict else {})


def _assistant_message(content: Sequence[Any], where: str) -> JsonObject:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[JsonObject] = []
    for index, block in enumerate(content):
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "thinking":
            thoughts.append(_thought(block, f"{where}[{index}]"))
        elif kind == "tool_use":
            calls.append(_call(block, f"{where}[{index}]"))
        else:
            texts.append(_text(block, f"{where}[{index}]"))
    message: JsonObject = {"role": "assistant", "content": "".join(texts)}
    if any(thoughts):
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _thought(block: JsonObject, where: str) -> str:
    thought = block.get("thinking")
    if not isinstance(thought, str):
        raise RequestError(f"{where}.thinking must be a string", param=f"{where}.thinking")
    return thought


def _call(block: JsonObject, where: str) -> JsonObject:
    name, given = block.get("name"), block.get("input")
    if not isinstance(name, str) or not isinstance(given, dict):
        raise RequestError(f"{where} needs a name and an input object", param=where)
    arguments = json.dumps(given, ensure_ascii=False)
    function = {"name": name, "arguments": arguments}
    return {"id": block.get("id"), "type": "function", "function": function}


def _input_messages(role: str, content: Sequence[Any], where: str) -> list[JsonObject]:
    """Tool results are messages of their own; what stands between them stays together."""
    found: list[JsonObject] = []
    parts: list[JsonObject] = []
    for index, block in enumerate(content):
        if isinstance(block, dict) and block.get("type") == "tool_result":
            found += _message(role, parts)
            found.append(_tool_message(block, f"{where}[{index}]"))
            parts = []
        else:
            parts.append(_part(block, f"{where}[{index}]"))
    found += _message(role, parts)
    if not found:
        raise RequestError(f"{where} has no blocks", param=where)
    return found


def _message(role: str, parts: list[JsonObject]) -> list[JsonObject]:
    return [{"role": role, "content": _joined(parts)}] if parts else []


def _tool_message(block: JsonObject, where: str) -> JsonObject:
    """``is_error`` stays on the record; what the model reads is the content."""
    call_id, content = block.get("tool_use_id"), block.get("content")
    if not isinstance(call_id, str):
        raise RequestError(f"{where}.tool_use_id must be a string", param=f"{where}.tool_use_id")
    if isinstance(content, list):
        content = _joined([_part(part, f"{where}.content[{i}]") for i, part in enumerate(content)])
    elif content is not None and not isinstance(content, str):
        raise RequestError(
            f"{where}.content must be a string or a list of blocks", param=f"{where}.content"
        )
    message: JsonObject = {"role": "tool", "tool_call_id": call_id, "content": content or ""}
    return message | ({"is_error": True} if block.get("is_error") else {})


def _joined(parts: list[JsonObject]) -> str | list[JsonObject]:
    """A single text as a string, as most clients write it."""
    is_text = len(parts) == 1 and parts[0]["type"] == "text"
    return parts[0]["text"] if is_text else parts


def _text(block: Any, where: str) -> str:
    part = _part(block, where)
    if part["type"] != "text":
        raise _unsupported(block, where)
    return str(part["text"])


def _part(block: Any, where: str) -> JsonObject:
    """A chat part. Documents are read where they are plain text."""
    kind = block.get("type") if isinstance(block, dict) else None
    if kind == "text" and isinstance(block.get("text"), str):
        return {"type": "text", "text": block["text"]}
    source = block.get("source") if kind in ("image", "document") else None
    source = source if isinstance(source, dict) else {}
    form, data = source.get("type"), source.get("data")
    if kind == "document" and form == "text" and isinstance(data, str):
        return {"type": "text", "text": data}
    if kind == "image" and form == "base64" and isinstance(data, str):
        return _image(f"data:{source.get('media_type')};base64,{data}")
    if kind == "image" and form == "url" and isinstance(source.get("url"), str):
        return _image(source["url"])
    raise _unsupported(block, where)


def _image(url: str) -> JsonObject:
    return {"type": "image_url", "image_url": {"url": url}}


def _unsupported(block: Any, where: str) -> RequestError:
    kind = block.get("type") if isinstance(block, dict) else type(block).__name__
    return RequestError(
        f"{where} is a block of type {kind!r} that cannot be read here; text, images, tool_use, "
        "tool_result, thinking and documents of plain text are supported",
        param=where,
        code="unsupported_content",
    )
