"""JSON inside sampled text: exact texts of values, and what UTF-8 cannot write."""

from __future__ import annotations

import json

import pytest

from agent_rl.tokens.json_text import as_text, dump, is_deep, object_members


def test_members_keep_their_text() -> None:
    text = 'x {"name": "f", "arguments": {"x": 1.0, "y": "\\u00e9"}} y'
    members = {"name": '"f"', "arguments": '{"x": 1.0, "y": "\\u00e9"}'}
    assert object_members(text, 2, len(text)) == (members, len(text) - 2)


@pytest.mark.parametrize(
    ("text", "value"), [('"a"', "a"), ('"\\ud83d\\ude42"', "🙂"), ("1", None), ('"\\ud83d"', None)]
)
def test_text_of_a_json_string(text: str, value: str | None) -> None:
    """Half of a surrogate pair is JSON, but no answer could carry it."""
    assert as_text(text) == value


def test_dump_escapes_only_what_utf8_cannot_write() -> None:
    assert dump({"x": "é 🙂"}) == '{"x": "é 🙂"}'
    assert dump({"x": "\ud83d"}) == '{"x": "\\ud83d"}'
    assert json.loads(dump({"x": "\ud83d"})) == {"x": "\ud83d"}


def test_arguments_that_could_not_be_read_again_are_none() -> None:
    """100 levels, the object itself among them, are taken; brackets inside strings are none."""
    for depth, is_taken in [(99, True), (100, False), (100_000, False)]:
        text = '{"x": ' + "[" * depth + "]" * depth + "}"
        assert (object_members('{"arguments": ' + text + "}", 0, len(text) + 15) is not None) is (
            is_taken
        )
    assert object_members('{"x": "' + "[" * 500 + '"}', 0, 600) is not None
    assert not is_deep("[" * 500)
