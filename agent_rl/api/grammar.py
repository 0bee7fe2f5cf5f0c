"""What a request demands of the form of its answer, as a grammar for guided decoding.

The grammar is a text in llguidance's Lark dialect (``%json`` embeds a JSON schema), so that one
string on GenerationConfig says all: a JSON object, a schema, or "call this tool".
https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md

    {"type": "json_object"}      ->  start: answer
                                     answer: %json {"type": "object"}
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

from agent_rl.api.call_grammar import call_rules
from agent_rl.errors import RequestError
from agent_rl.tokens.format import ChatFormat
from agent_rl.types import JsonObject

ToolUse: TypeAlias = Literal["none", "auto", "required"]

_TAGGED = ("hermes", "qwen3_coder", "glm")  # forms whose calls end with this tag
_CLOSE = "</tool_call>"
_START = "start: answer\n"


def answer_grammar(response_format: JsonObject | None, *, where: str) -> str | None:
    """``where``: ``response_format`` of chat, ``text.format`` of responses."""
    if response_format is None:
        return None
    kind = response_format.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return _json_grammar({"type": "object"})
    if kind == "json_schema":
        holder = response_format.get("json_schema", response_format)
        schema = holder.get("schema") if isinstance(holder, dict) else None
        if not isinstance(schema, dict):
            raise RequestError(f"{where} has no schema", param=where)
        return _json_grammar(schema)
    raise RequestError(
        f"{where}.type is {kind!r}; it must be text, json_object or json_schema",
        param=f"{where}.type",
    )


def tool_grammar(
    choice: Any, tools: Sequence[JsonObject] | None, *, is_parallel: bool, fmt: ChatFormat
) -> tuple[ToolUse, str | None]:
    """What ``tool_choice`` means: may, must or must not the model call, and by which grammar."""
    if choice is None:
        return ("auto" if tools else "none"), None
    name = _named(choice)
    if choice in ("none", "auto"):
        return ("none" if not tools else choice), None
    if choice != "required" and name is None:
        raise RequestError(
            f"tool_choice is {choice!r}; it must be none, auto, required or a function's name",
            param="tool_choice",
        )
    functions = [tool.get("function", tool) for tool in tools or ()]
    allowed = [f for f in functions if "name" in f and name in (None, f["name"])]
    if not allowed:
        what = "needs tools" if name is None else f"names {name!r}, which is not in tools"
        raise RequestError(f"tool_choice {what}", param="tool_choice")
    is_single = name is not None or not is_parallel
    form = fmt.tool_format_name
    rules = call_rules(form, allowed, is_single=is_single, mark=lambda text: _mark(text, fmt))
    if rules is None:
        raise RequestError(
            f"tool_choice cannot demand a call from this model: for the form in which it writes "
            f"its calls ({fmt.tool_form}) there is no grammar; send tool_choice='auto'",
            param="tool_choice",
            code="unsupported_parameter",
        )
    return "required", _START + rules


def after_reasoning(grammar: str, fmt: ChatFormat, prompt_ids: Sequence[int]) -> str:
    """``grammar``, one of ours, behind reasoning, whose text is free.

    An answer must reason first where the prompt has opened the reasoning, and may where the model
    has tags for it.
    """
    tags = fmt.reasoning
    if tags is None or not grammar.startswith(_START):
        return grammar
    rules = grammar.removeprefix(_START)
    start = "thought" if fmt.opens_reasoning(prompt_ids) else f"({_mark(tags.open, fmt)} thought)?"
    close = _mark(tags.close, fmt)
    text = "/(?s:.*)/ " + close
    if not close.startswith("<"):  # the tag is text: the first one ends the reasoning
        rules += f"thought_text[lazy]: /(?s:.*){_regex(tags.close)}/\n"
        text = "thought_text"
    return f"start: {start} answer\nthought: {text} (/\\n{{1,2}}/)?\n{rules}"


def stop_after_one_call(tool_form: str, supported: frozenset[str]) -> str:
    """The stop string that honours ``parallel_tool_calls=false``: the end of the first call."""
    if "stop" in supported and tool_form.startswith(_TAGGED):
        return _CLOSE
    raise RequestError(
        f"parallel_tool_calls=false cannot be honoured: calls in the form {tool_form!r} do not end "
        "with a tag, or the engine knows no stop strings; leave it out",
        param="parallel_tool_calls",
        code="unsupported_parameter",
    )


def _json_grammar(schema: JsonObject) -> str:
    return f"{_START}answer: %json {json.dumps(schema)}\n"


def _named(choice: Any) -> str | None:
    """Chat nests the name, ``responses`` does not."""
    if not isinstance(choice, dict) or choice.get("type") != "function":
        return None
    holder = choice.get("function", choice)
    name = holder.get("name") if isinstance(holder, dict) else None
    return name if isinstance(name, str) else None


def _mark(text: str, fmt: ChatFormat) -> str:
    token_id = fmt.vocabulary.id_of(text)
    return json.dumps(text) if token_id is None else f"<[{token_id}]>"


def _regex(text: str) -> str:
    return re.escape(text).replace("/", r"\/")
