"""The `hermes` form of tools for templates that know none (SmolLM2).

Tool schemas go into the system message, calls into the assistant's text, results into a user turn:

    system     ... <tools>{"type": "function", ...}</tools> ...
    assistant  <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>
    user       <result>1</result>

Consecutive tool results share one user turn. Without tools in the request results keep their own
role. Input and output are normal messages; arguments are written exactly as the caller sent them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from agent_rl.tokens.messages import arguments_text
from agent_rl.types import JsonObject

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
        content = f"{messages[0]['content']}\n\n{tools_text(tools)}".lstrip("\n")
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
            turns[-1]["content"] += "\n" + _response(message)
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
    texts = [message["content"]] if message["content"] else []
    for call in message["tool_calls"]:
        function = call["function"]
        name = json.dumps(function["name"], ensure_ascii=False)
        arguments = arguments_text(function["arguments"])
        texts.append(f'<tool_call>\n{{"name": {name}, "arguments": {arguments}}}\n</tool_call>')
    plain = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**plain, "content": "\n".join(texts)}


def _response(message: JsonObject) -> str:
    # Not <tool_response>: models that were never shown tools then begin their own turn with that
    # tag. SmolLM2, two worked examples: 1 group in 12 with any reward variance, against 11 in 12.
    return f"<result>\n{message['content']}\n</result>"
