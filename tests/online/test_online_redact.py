"""What is masked before it is stored, and what is left alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent_rl.config import PrivacyConfig
from agent_rl.online.redact import SEAM, passes_luhn, redact, redact_object
from agent_rl.online.transcript import message_text
from agent_rl.online.turn_store import TurnStore
from agent_rl.record.jsonl import read_lines

RANDOM = "aB3dE5fG7hJ9kL1mN3pQ5rS7tU9vW1xY3z"


@pytest.mark.parametrize(
    ("text", "redacted"),
    [
        ("mail ann.b+c@mail.example.org!", "mail [email]!"),
        ("<ann@x.org>, bob@y.co.uk.", "<[email]>, [email]."),
        ("card 4111 1111 1111 1111 ok", "card [card] ok"),
        ("card 4111-1111-1111-1111", "card [card]"),
        ("5500005555555559", "[card]"),
        ("call +49 (0)30 123-45 67 now", "call [phone] now"),
        ("call +14155550123", "call [phone]"),
        ("(555) 123-4567 or 555-123-4567", "[phone] or [phone]"),
        ("Tel. 030/1234567", "Tel. [phone]"),
        ("06 12 34 56 78", "[phone]"),
        ("key sk-abcDEF1234567890abcd", "key [secret]"),
        ("AKIAIOSFODNN7EXAMPLE", "[secret]"),
        ("ghp_0123456789abcdefghijABCDEFGHIJ012345", "[secret]"),
        ("Authorization: Bearer abcdef123456789", "Authorization: [secret]"),
        ('{"api_key": "abcdef123"}', '{"api_key": "[secret]"}'),
        ("password=hunter22", "password=[secret]"),
        ("my password is hunter22", "my password is [secret]"),
        (f"token {RANDOM}", "token [secret]"),
        ("eyJhbGciOiJI.eyJzdWIiOiIx.SflKxwRJSMeKKF2QT4", "[secret]"),
        ("-----BEGIN RSA PRIVATE KEY-----\nMIIE\n-----END RSA PRIVATE KEY-----\nx", "[secret]\nx"),
        ("Authorization: Basic dXNlcjpwYXNz", "[secret]"),
        ("postgres://ann:hunter22@db:5432/x", "postgres://[secret]@db:5432/x"),
        ("ann@b\u00fccher.example", "[email]"),
        ("4111\u00a01111\u00a01111\u00a01111", "[card]"),
        ("4111\u20111111\u20111111\u20111111", "[card]"),
        ("\uff14\uff11\uff11\uff11 1111 1111 1111", "[card]"),
        ("41\u200b11111111111111", "[card]"),
        ("+49\u202f30\u2011123\u201145\u201167", "[phone]"),
        ("ann\uff20x\uff0eorg", "[email]"),
        ("sk-abc\u200bdefghijklmnop1234", "[secret]"),
    ],
)
def test_masked(text: str, redacted: str) -> None:
    assert redact(text) == redacted


@pytest.mark.parametrize(
    "text",
    [
        "on 2026-11-30 at 10:15:00",
        "order 12345678, 3 items, 1,234,567.89 in all",
        "pi is 3.14159265358979323846",
        "192.168.100.200:8080",
        "card 4111 1111 1111 1112 fails the check digit",
        "0000 0000 0000 0000",
        "commit 76e28ba7c0ffee76e28ba7c0ffee76e28ba7c0ff",
        "chatcmpl_long_words_in_snake_case_are_no_secrets",
        "a@b",
        "the secret of success: work",
        "max_tokens=100000000",
        "http://localhost:8000/users/@ann, time 10:15",
        "\u201cno\u2011break\u00a0space\u201d \u2014 and \U0001f468\u200d\U0001f469 stay",
    ],
)
def test_left_alone(text: str) -> None:
    assert redact(text) == text


def test_every_string_of_an_object() -> None:
    row = {
        "user": "ann@x.org",
        "turn": 3,
        "votes": [1, None],
        "calls": [{"arguments": '{"to": "bob@y.org"}'}],
    }
    assert redact_object(row, redact) == {
        "user": "[email]",
        "turn": 3,
        "votes": [1, None],
        "calls": [{"arguments": '{"to": "[email]"}'}],
    }


def test_luhn() -> None:
    assert passes_luhn("4111111111111111")
    assert not passes_luhn("4111111111111112")


@pytest.mark.parametrize(
    "text",
    [
        "a" * 200_000,
        "a@" * 100_000,
        "1 " * 100_000,
        "1\u00a0" * 100_000,
        "://a:" * 40_000,
        "+1 " * 70_000,
        "0-" * 100_000,
        "eyJ" * 60_000,
        "-----BEGIN PRIVATE KEY-----" * 7_000,
        "sk-" * 60_000,
        "password" * 25_000,
        "a.b" * 60_000,
    ],
)
def test_hostile_text_costs_linear_time(text: str) -> None:
    """No pattern backtracks without bound: a quadratic one would take minutes here."""
    assert len(redact(text)) > 0


@pytest.mark.parametrize(
    ("text", "redacted"),
    [
        ("card 4111 1111 1111 1111\u200b12 euros", "card [card]\u200b12 euros"),
        ("\u200b4111 1111 1111 1111 and ann\uff20x.org", "\u200b[card] and [email]"),
        ("sk-abcdefghijklmnop\u200b1234 rest", "[secret] rest"),
        (
            "\u201chi\u201d sk-abc\u200bdefghijklmnop1234 \u201cbye\u201d",
            "\u201chi\u201d [secret] \u201cbye\u201d",
        ),
    ],
)
def test_one_form_does_not_hide_another(text: str, redacted: str) -> None:
    """Read without the sign that has no width, the first is a number that fails the check."""
    assert redact(text) == redacted


def test_finds_that_overlap_are_one_of_the_surest_kind() -> None:
    assert redact(f"{RANDOM}@x.org 1") == "[secret]@x.org 1"
    assert redact("password=ann@x.org;") == "password=[secret];"
    assert redact("ann@x.org,bob@y.org") == "[email],[email]"


def test_what_is_cut_over_the_parts_of_a_message_is_found(tmp_path: Path) -> None:
    """Neither half looks like anything; where nothing is found a seam is a space."""
    parts = ["my key is sk-abcdef", "ghijklmnop1234 and", "4111 1111 11", "11 1111. Thanks"]
    message = {"content": [{"type": "text", "text": text} for text in parts]}
    store = TurnStore(tmp_path / "turns.jsonl", PrivacyConfig())
    text = message_text(message, between=SEAM)
    store.append({"session_id": "s", "user_ids": [f"u{SEAM}1"], "prompt": text})
    store.close()
    ((_, row),) = read_lines(tmp_path / "turns.jsonl")
    assert row["prompt"] == "my key is [secret] and [card]. Thanks"
    assert row["user_ids"] == [f"u{SEAM}1"]


def test_arguments_are_read_as_they_are_meant() -> None:
    def text(arguments: object) -> str:
        return message_text({"tool_calls": [{"function": {"name": "f", "arguments": arguments}}]})

    assert text('{"to": "ann\\u0040x.org"}') == '[calls f {"to": "ann@x.org"}]'
    assert text({"to": "ann\uff20x.org"}) == '[calls f {"to": "ann\uff20x.org"}]'
    for broken in ('{"to": "\\u0040', '{"half": "\\ud83d"}'):
        assert text(broken) == f"[calls f {broken}]"
