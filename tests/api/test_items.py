"""Responses items to chat messages and back."""

from __future__ import annotations

from typing import Any

import pytest

from agent_rl.api.items import messages_of, tools_of
from agent_rl.errors import RequestError

CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
F1 = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def test_string_is_a_user_message() -> None:
    assert messages_of("hi") == [{"role": "user", "content": "hi"}]


def test_items_of_one_turn_are_one_message() -> None:
    items: list[Any] = [
        {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "so"}]},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "ok"}],
        },
        CALL,
        {**CALL, "call_id": "c2"},
        {"type": "function_call_output", "call_id": "c1", "output": "1"},
        {
            "type": "function_call_output",
            "call_id": "c2",
            "output": [{"type": "input_text", "text": "2"}],
        },
        {"role": "assistant", "content": "done"},
    ]
    assert messages_of(items) == [
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": "ok",
            "reasoning_content": "so",
            "tool_calls": [F1, {**F1, "id": "c2"}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "1"},
        {"role": "tool", "tool_call_id": "c2", "content": "2"},
        {"role": "assistant", "content": "done"},
    ]


def test_call_alone_has_no_content() -> None:
    assert messages_of([CALL]) == [{"role": "assistant", "content": None, "tool_calls": [F1]}]


def test_image_keeps_its_part() -> None:
    parts = [
        {"type": "input_text", "text": "what?"},
        {"type": "input_image", "image_url": "data:x", "detail": "auto"},
    ]
    assert messages_of([{"role": "user", "content": parts}]) == [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "what?"},
                {"type": "image_url", "image_url": {"url": "data:x"}},
            ],
        }
    ]


@pytest.mark.parametrize(
    ("items", "param"),
    [
        (["hi"], "input[0]"),
        ([{"type": "computer_call"}], "input[0]"),
        ([{"role": "user", "content": [{"type": "input_file"}]}], "input[0].content[0]"),
        ([{**CALL, "name": None}], "input[0].name"),
    ],
)
def test_refused_items(items: list[Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        messages_of(items)
    assert caught.value.param == param


def test_tools_get_their_envelope() -> None:
    flat = {"type": "function", "name": "f", "parameters": {}, "description": None}
    wrapped = {"type": "function", "function": {"name": "f", "parameters": {}}}
    assert tools_of([flat, wrapped]) == [wrapped, wrapped]
    with pytest.raises(RequestError, match="built-in tool 'web_search'"):
        tools_of([{"type": "web_search"}])
