"""Messages as plain text, for judges to read: everything the model wrote, nothing hidden.

{"role": "assistant", "content": "done", "tool_calls": [get_price(item=pen)]}
->  done
    [calls get_price {"item": "pen"}]
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from agent_rl.types import JsonObject


def message_text(message: Mapping[str, Any], *, between: str = " ") -> str:
    """Reasoning, content and tool calls, in this order; the parts of the content with ``between``
    between them."""
    parts = []
    reasoning = message.get("reasoning_content")
    if reasoning:
        parts.append(f"[thinks] {reasoning}")
    content = content_text(message.get("content"), between=between)
    if content:
        parts.append(content)
    for call in message.get("tool_calls") or ():
        function = call.get("function") or {}
        arguments = function.get("arguments")
        text = arguments if isinstance(arguments, str) else json.dumps(arguments)
        parts.append(f"[calls {function.get('name')} {_unescaped(text)}]")
    return "\n".join(parts)


def content_text(content: object, *, between: str = " ") -> str:
    """The text of a message's content; of a list of parts those that have text."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        texts = [part.get("text") for part in content if isinstance(part, dict)]
        return between.join(text for text in texts if isinstance(text, str))
    return ""


def _unescaped(text: str) -> str:
    r"""``{"to": "ann\u0040x.org"}`` with the signs that are meant; what is no JSON as it is."""
    if "\\u" not in text:
        return text
    try:
        plain = json.dumps(json.loads(text), ensure_ascii=False)
        plain.encode()
    except (ValueError, RecursionError):  # half of a surrogate pair is no text either
        return text
    return plain


def transcript(messages: Sequence[JsonObject]) -> str:
    """One paragraph for each message, headed by its role."""
    return "\n\n".join(f"{message.get('role')}: {message_text(message)}" for message in messages)
