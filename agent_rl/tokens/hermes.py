"""The `hermes` form of tools for templates that know none (SmolLM2).

Tool schemas go into the system message, calls into the assistant's text, results into a user turn:

    system     ... <tools>{"type": "function", ...}</tools> ...
    assistant  <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>
    user       <result>1</result>

Consecutive tool results share one user turn. Without tools in the request results keep their own
role. Input and output are normal messages; arguments are written exactly as the caller sent them,
and images stay parts.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TypeAlias

from agent_rl.tokens.messages import arguments_text
from agent_rl.types import JsonObject

Content: TypeAlias = str | list[JsonObject]

_HEAD = (
    "You can call functions to help with the task. Their signatures are JSON between <tools> and "
    "</tools>:\n<tools>\n"
)
_TAIL = (
    "\n</tools>\n\nTo call a function, answer with one JSON object between <tool_call> and "
    "</tool_call> for each call:\n<tool_call>\n"
    '{"name": "function name", "arguments": {"argument name": "value"}}\n</tool_call>'
)


def without_tools(messages: Sequence[JsonObject], tools: Sequence[JsonObject]) -> list[JsonObject]:
    """The same conversation for a template that knows only roles and text."""
    plain = [_without_calls(message) for message in messages]
    return _with_schemas(_with_responses(plain), tools) if tools else plain


def _with_schemas(messages: list[JsonObject], tools: Sequence[JsonObject]) -> list[JsonObject]:
    if messages and messages[0]["role"] == "system":
        content = _joined(messages[0]["content"], "\n\n", tools_text(tools))
        return [{**messages[0], "content": content}, *messages[1:]]
    return [{"role": "system", "content": tools_text(tools)}, *messages]


def _with_responses(messages: Sequence[JsonObject]) -> list[JsonObject]:
    """Tool results as user turns, consecutive ones in one turn."""
    turns: list[JsonObject] = []
    is_after_result = False
    for message in messages:
        is_result = message["role"] == "tool"
        if not is_result:
            turns.append(message)
        elif is_after_result:
            turns[-1]["content"] = _joined(turns[-1]["content"], "\n", _response(message))
        else:
            turns.append({"role": "user", "content": _response(message)})
        is_after_result = is_result
    return turns


def tools_text(tools: Sequence[JsonObject]) -> str:
    schemas = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    return _HEAD + schemas + _TAIL


def _without_calls(message: JsonObject) -> JsonObject:
    if "tool_calls" not in message:
        return message
    content: Content = message["content"]
    for call in message["tool_calls"]:
        function = call["function"]
        name = json.dumps(function["name"], ensure_ascii=False)
        arguments = arguments_text(function["arguments"])
        text = f'<tool_call>\n{{"name": {name}, "arguments": {arguments}}}\n</tool_call>'
        content = _joined(content, "\n", text)
    plain = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**plain, "content": content}


def _response(message: JsonObject) -> Content:
    # Not <tool_response>: models that were never shown tools then begin their own turn with that
    # tag. SmolLM2, two worked examples: 1 group in 12 with any reward variance, against 11 in 12.
    content = message["content"]
    if isinstance(content, str):
        return f"<result>\n{content}\n</result>"
    return [_text_part("<result>\n"), *content, _text_part("\n</result>")]


def _joined(before: Content, space: str, after: Content) -> Content:
    """One content of two; text where neither has other parts, no space where there is no first."""
    if not before:
        return after
    if isinstance(before, str) and isinstance(after, str):
        return before + space + after
    return [*_parts(before), _text_part(space), *_parts(after)]


def _parts(content: Content) -> list[JsonObject]:
    return [_text_part(content)] if isinstance(content, str) else content


def _text_part(text: str) -> JsonObject:
    return {"type": "text", "text": text}
