"""Responses items <-> chat messages. One assistant turn is several items and one message.

reasoning "add", message "ok", function_call f   <->   {"role": "assistant", "content": "ok",
                                                        "reasoning_content": "add",
                                                        "tool_calls": [f]}
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from agent_rl.api.call import new_id
from agent_rl.api.generate import Choice
from agent_rl.errors import RequestError
from agent_rl.types import JsonObject

_ROLES = ("user", "assistant", "system", "developer")
_TEXT_PARTS = ("input_text", "output_text", "text")


def messages_of(items: str | Sequence[Any]) -> list[JsonObject]:
    """Chat messages of ``input``. Consecutive items of the assistant become one message.

    Raises:
        RequestError: an item is not one that a model of text can read; it is named.
    """
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    messages: list[JsonObject] = []
    for index, item in enumerate(items):
        where = f"input[{index}]"
        if not isinstance(item, dict):
            raise RequestError(f"{where} must be an object", param=where)
        kind = item.get("type") or "message"
        read = _READERS.get(kind) if isinstance(kind, str) else None
        if read is None:
            raise RequestError(
                f"{where} is an item of type {kind!r}, which is not supported", param=where
            )
        read(messages, item, where)
    return messages


def tools_of(tools: Sequence[Any]) -> list[JsonObject]:
    """Flat function tools in chat's envelope. Built-in tools are refused by name."""
    wrapped = []
    for index, tool in enumerate(tools):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if kind != "function":
            raise RequestError(
                f"tools[{index}] is the built-in tool {kind!r}; only function tools are supported",
                param=f"tools[{index}]",
                code="unsupported_tool",
            )
        function = {k: v for k, v in tool.items() if k != "type" and v is not None}
        wrapped.append({"type": "function", "function": tool.get("function") or function})
    return wrapped


def output_items(choice: Choice, *, logprobs: list[JsonObject]) -> list[JsonObject]:
    """The items of a finished answer, in the order in which a stream announces them."""
    status = "incomplete" if choice.finish_reason == "length" else "completed"
    message = choice.message
    items: list[JsonObject] = []
    if message.get("reasoning_content"):
        items.append(reasoning_item(message["reasoning_content"], "completed"))
    if message["content"] or not message.get("tool_calls"):
        part = text_part(message["content"] or "", logprobs)
        items.append(message_item([part], status))
    for call in message.get("tool_calls", ()):
        items.append(call_item(call, "completed"))
    return items


def reasoning_item(text: str | None, status: str) -> JsonObject:
    content = [] if text is None else [{"type": "reasoning_text", "text": text}]
    return {
        "id": new_id("rs_"),
        "type": "reasoning",
        "summary": [],
        "content": content,
        "encrypted_content": None,
        "status": status,
    }


def message_item(content: list[JsonObject], status: str) -> JsonObject:
    return {
        "id": new_id("msg_"),
        "type": "message",
        "role": "assistant",
        "status": status,
        "content": content,
    }


def text_part(text: str, logprobs: list[JsonObject]) -> JsonObject:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def call_item(call: JsonObject, status: str) -> JsonObject:
    return {
        "id": new_id("fc_"),
        "type": "function_call",
        "call_id": call["id"],
        "name": call["function"]["name"],
        "arguments": call["function"]["arguments"],
        "status": status,
    }


def _read_message(messages: list[JsonObject], item: JsonObject, where: str) -> None:
    role = item.get("role")
    if role not in _ROLES:
        raise RequestError(
            f"{where}.role is {role!r}; it must be one of {', '.join(_ROLES)}",
            param=f"{where}.role",
        )
    parts = _content(item, "content", where)
    if role == "assistant":
        turn = _assistant_turn(messages)
        turn["content"] = (turn.get("content") or "") + _joined(parts)
    else:
        messages.append({"role": role, "content": parts})


def _read_reasoning(messages: list[JsonObject], item: JsonObject, where: str) -> None:
    name = "content" if item.get("content") else "summary"
    parts = item.get(name) or []
    if not isinstance(parts, list) or not all(map(_has_text, parts)):
        raise RequestError(
            f"{where}.{name} must be a list of parts with a text", param=f"{where}.{name}"
        )
    text = "".join(part["text"] for part in parts)
    if text:
        _assistant_turn(messages)["reasoning_content"] = text


def _read_call(messages: list[JsonObject], item: JsonObject, where: str) -> None:
    function = {name: _string(item, name, where) for name in ("name", "arguments")}
    call = {"id": _string(item, "call_id", where), "type": "function", "function": function}
    _assistant_turn(messages).setdefault("tool_calls", []).append(call)


def _read_output(messages: list[JsonObject], item: JsonObject, where: str) -> None:
    content = _content(item, "output", where)
    call_id = _string(item, "call_id", where)
    messages.append({"role": "tool", "tool_call_id": call_id, "content": content})


_READERS: dict[str, Callable[[list[JsonObject], JsonObject, str], None]] = {
    "message": _read_message,
    "reasoning": _read_reasoning,
    "function_call": _read_call,
    "function_call_output": _read_output,
}


def _assistant_turn(messages: list[JsonObject]) -> JsonObject:
    """The assistant message that is being put together, a new one after any other message."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": None})
    return messages[-1]


def _string(item: JsonObject, name: str, where: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise RequestError(f"{where}.{name} must be a string", param=f"{where}.{name}")
    return value


def _has_text(part: Any) -> bool:
    return isinstance(part, dict) and isinstance(part.get("text"), str)


def _content(item: JsonObject, name: str, where: str) -> str | list[JsonObject] | None:
    """Text, or parts, or nothing."""
    content = item.get(name)
    if isinstance(content, list):
        return _parts(content, f"{where}.{name}")
    if content is not None and not isinstance(content, str):
        raise RequestError(
            f"{where}.{name} must be a string or a list of parts", param=f"{where}.{name}"
        )
    return content


def _parts(parts: Sequence[Any], where: str) -> str | list[JsonObject]:
    """One string for text alone; chat parts where there are images."""
    chat = [_part(part, f"{where}[{index}]") for index, part in enumerate(parts)]
    if all(part["type"] == "text" for part in chat):
        return "".join(part["text"] for part in chat)
    return chat


def _part(part: Any, where: str) -> JsonObject:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in _TEXT_PARTS and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    if kind == "refusal":
        return {"type": "text", "text": part.get("refusal") or ""}
    if kind == "input_image" and isinstance(part.get("image_url"), str):
        return {"type": "image_url", "image_url": {"url": part["image_url"]}}
    raise RequestError(
        f"{where} is a part of type {kind!r}; text and images by URL are supported",
        param=where,
        code="unsupported_content",
    )


def _joined(content: str | list[JsonObject] | None) -> str:
    if isinstance(content, list):
        return "".join(part.get("text", "") for part in content)
    return content or ""
