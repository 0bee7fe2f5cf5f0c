"""Anthropic blocks and chat messages, by hand."""

from __future__ import annotations

from typing import Any

import pytest

from agent_rl.api.blocks import content_blocks, messages_of, system_message, tools_of
from agent_rl.errors import RequestError

CALL = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": "ä"}'}}


def test_the_blocks_of_an_assistant_turn_are_one_message() -> None:
    blocks = [
        {"type": "thinking", "thinking": "add", "signature": "s"},
        {"type": "text", "text": "ok", "cache_control": {"type": "ephemeral"}},
        {"type": "tool_use", "id": "call_1", "name": "add", "input": {"a": "ä"}},
    ]
    (message,) = messages_of([{"role": "assistant", "content": blocks}])
    assert message == {
        "role": "assistant",
        "content": "ok",
        "reasoning_content": "add",
        "tool_calls": [CALL],
    }
    back = content_blocks(message, signature="s", shows_thinking=True)
    assert back == [{k: v for k, v in block.items() if k != "cache_control"} for block in blocks]


def test_tool_results_come_before_what_the_user_adds() -> None:
    """Two results and a text in one turn: three messages, in their order."""
    content = [
        {"type": "tool_result", "tool_use_id": "c1", "content": "2"},
        {
            "type": "tool_result",
            "tool_use_id": "c2",
            "content": [{"type": "text", "text": "no file"}],
            "is_error": True,
        },
        {"type": "text", "text": "go on"},
    ]
    assert messages_of([{"role": "user", "content": content}]) == [
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
        {"role": "tool", "tool_call_id": "c2", "content": "no file", "is_error": True},
        {"role": "user", "content": "go on"},
    ]


def test_images_and_plain_documents_become_parts() -> None:
    image = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
    document = {"type": "text", "media_type": "text/plain", "data": "page"}
    content = [{"type": "image", "source": image}, {"type": "document", "source": document}]
    assert messages_of([{"role": "user", "content": content}]) == [
        {
            "role": "user",
            "content": [
                {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
                {"type": "text", "text": "page"},
            ],
        }
    ]


def test_system_blocks_are_paragraphs() -> None:
    blocks = [{"type": "text", "text": "header"}, {"type": "text", "text": "be kind"}]
    assert system_message(blocks) == [{"role": "system", "content": "header\n\nbe kind"}]
    assert system_message("be kind") == [{"role": "system", "content": "be kind"}]
    assert system_message(None) == []


def test_tools_keep_their_schema() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    tool = {"name": "add", "description": "adds", "input_schema": schema, "strict": True}
    assert tools_of([tool]) == [
        {
            "type": "function",
            "function": {
                "name": "add",
                "parameters": schema,
                "description": "adds",
                "strict": True,
            },
        }
    ]
    assert tools_of([]) is None


@pytest.mark.parametrize(
    ("message", "complaint"),
    [
        ({"role": "tool", "content": "x"}, r"messages\[0\].role is 'tool'"),
        ({"role": "user", "content": 3}, r"messages\[0\].content must be a string or a list"),
        ({"role": "user", "content": []}, r"messages\[0\].content has no blocks"),
        ({"role": "user", "content": ["x"]}, r"content\[0\] is a block of type 'str'"),
        (
            {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]},
            r"content\[0\] is a block of type 'redacted_thinking'",
        ),
        (
            {"role": "user", "content": [{"type": "tool_result", "content": "x"}]},
            "tool_use_id must be a string",
        ),
    ],
)
def test_what_cannot_be_read_is_named(message: dict[str, Any], complaint: str) -> None:
    with pytest.raises(RequestError, match=complaint):
        messages_of([message])


def test_tools_of_a_server_are_refused_by_name() -> None:
    with pytest.raises(RequestError, match=r"tools\[0\] is the built-in tool 'bash_20250124'"):
        tools_of([{"type": "bash_20250124", "name": "bash"}])


def test_an_input_that_python_could_not_write_again() -> None:
    """Valid JSON of a model: a number beyond floats, half of a surrogate pair, an emoji."""
    text = '{"x": 1e999, "y": [-1.5, "\\ud83d!", "\\ud83d\\ude42"]}'
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": text}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    (block,) = content_blocks(message, signature="s", shows_thinking=True)
    assert block["input"] == {"x": "1e999", "y": [-1.5, "\ufffd!", "\U0001f642"]}


@pytest.mark.parametrize(
    ("system", "param"),
    [
        ([{"type": "text", "text": "a"}, {"type": "image", "source": {}}], "system[1]"),
        (
            [{"type": "image", "source": {"type": "url", "url": "http://x"}}],
            "system[0]",
        ),
    ],
)
def test_a_system_prompt_loses_no_block(system: list[Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        system_message(system)
    assert caught.value.param == param


@pytest.mark.parametrize("thinking", [None, 5, {}])
def test_thinking_is_text(thinking: Any) -> None:
    blocks = [{"type": "thinking", "thinking": thinking}]
    with pytest.raises(RequestError, match="thinking must be a string"):
        messages_of([{"role": "assistant", "content": blocks}])
