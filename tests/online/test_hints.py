"""Hints: which votes are accepted, which hint wins, and where it goes in the teacher's prompt."""

from __future__ import annotations

import pytest

from agent_rl.online.hints import longest_hint, parse_hint, teacher_messages

LONG = "[HINT_START]Give the date, not the day.[HINT_END]"


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        (rf"{LONG} \boxed{{1}}", "Give the date, not the day."),
        (rf"[HINT_START]old[HINT_END] {LONG} \boxed{{1}}", "Give the date, not the day."),
        ("[HINT_START]\n two\nlines \n[HINT_END]\\boxed{1}", "two\nlines"),
        (rf"{LONG} \boxed{{-1}}", None),
        (rf"{LONG} \boxed{{0}}", None),
        (rf"\boxed{{1}} {LONG} \boxed{{-1}}", None),
        (LONG, None),
        (r"\boxed{1}", None),
        (r"[HINT_START]never closed \boxed{1}", None),
    ],
)
def test_a_vote_is_a_box_of_one_and_the_last_block(text: str, hint: str | None) -> None:
    assert parse_hint(text) == hint


def test_the_longest_accepted_hint_wins() -> None:
    votes = [
        r"[HINT_START]0123456789[HINT_END] \boxed{1}",  # 10 characters: too short
        r"[HINT_START]0123456789a[HINT_END] \boxed{1}",
        rf"{LONG} \boxed{{1}}",
        r"[HINT_START]the longest of all, but not accepted by its vote[HINT_END] \boxed{-1}",
    ]
    assert longest_hint(votes) == "Give the date, not the day."
    assert longest_hint(votes[:2]) == "0123456789a"
    assert longest_hint(votes[:1]) is None
    assert longest_hint([]) is None


def test_the_hint_goes_behind_the_last_user_message() -> None:
    messages = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "hi"},
        {"role": "user", "content": "when?"},
        {"role": "assistant", "content": None, "tool_calls": []},
        {"role": "tool", "content": "monday"},
    ]
    taught = teacher_messages(messages, "Dates only.")
    assert taught[2]["content"] == "when?\n\n[user's hint / instruction]\nDates only."
    assert [m for i, m in enumerate(taught) if i != 2] == [
        m for i, m in enumerate(messages) if i != 2
    ]
    assert messages[2]["content"] == "when?"


def test_without_a_user_it_goes_behind_the_last_message() -> None:
    messages = [{"role": "system", "content": "be brief"}, {"role": "tool", "content": None}]
    taught = teacher_messages(messages, "Dates only.")
    assert taught[0] is messages[0]
    assert taught[1]["content"] == "\n\n[user's hint / instruction]\nDates only."
    assert teacher_messages([], "Dates only.") == [
        {"role": "user", "content": "[user's hint / instruction]\nDates only."}
    ]


def test_content_of_parts_gets_one_more_part() -> None:
    parts = [{"type": "text", "text": "when?"}]
    (taught,) = teacher_messages([{"role": "user", "content": parts}], "Dates only.")
    assert taught["content"][0] == parts[0]
    assert taught["content"][1]["text"].endswith("Dates only.")
    assert len(parts) == 1
