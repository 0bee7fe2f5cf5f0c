"""Redaction: what looks like personal data or a secret becomes a word for it, before it is stored.

    "mail ann@x.org, card 4111 1111 1111 1111"  ->  "mail [email], card [card]"

Card numbers count only with a valid check digit, phone numbers only in forms that other numbers
rarely have. Other forms of the same signs (full width, no-break spaces and hyphens, signs without
width) hide nothing. All patterns are bounded, so a hostile text costs linear time. A rule of the
user's own is any function from text to text.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Callable
from typing import Any, TypeAlias

Redactor: TypeAlias = Callable[[str], str]

_EMAIL = re.compile(r"(?<![\w.%+-])[\w.%+-]{1,64}@[\w-]{1,63}(?:\.[\w-]{1,63}){1,8}(?![\w-])")
_CARD = re.compile(r"(?<![\w.-])\d(?:[ -]?\d){12,18}(?![\w-])")
_PHONES = (
    # +49 (0)30 123-45 67
    re.compile(r"(?<![\w+])\+\d{1,3}(?:[ .()/-]{0,3}\d{1,5}){2,7}(?!\w)"),
    # (555) 123-4567, 555.123.4567
    re.compile(r"(?<![\w.(-])(?:\(\d{3}\) ?|\d{3}[ .-])\d{3}[ .-]\d{4}(?![\w-])"),
    # 030/123456, 06 12 34 56 78
    re.compile(r"(?<![\w.,:/-])0\d{1,4}(?:[ /-]\d{2,8}){1,5}(?![\w:/-])"),
)
_SECRETS = (
    re.compile(
        r"-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----"
        r"(?:(?!-----)[\s\S]){0,20000}(?:-----END[^\n]{0,60})?"
    ),
    re.compile(r"\beyJ[\w-]{8,2000}\.[\w-]{8,4000}\.[\w-]{0,2000}"),
    re.compile(r"\b(?:sk|pk|rk|ghp|gho|ghs|glpat|hf|xox[abprs]|github_pat|npm)[-_][\w-]{16,400}"),
    re.compile(r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b|\bAIza[\w-]{30,60}"),
    re.compile(r"(?i)\bbearer +[\w.~+/=-]{12,4000}"),
    re.compile(r"(?i)\bauthorization[\"']? ?[:=] ?[\"']?basic +[\w+/=-]{4,4000}"),
    # postgres://user:password@host
    re.compile(r"(?<=://)[^\s/:@]{0,64}:[^\s/@]{1,200}(?=@)"),
)
_ASSIGNED = re.compile(
    r"(?i)\b((?:api|access|secret|private|auth)[-_ ]?(?:key|token)"
    r"|password|passwd|passphrase|secret)"
    r"(\"?'? ?(?:=|:| is ) ?[\"']?)([^\s\"',;]{6,400})"
)
_LONG = re.compile(r"(?<![\w/+.-])[\w-]{32,400}(?![\w/+-])")


def _folds() -> dict[int, str]:
    """Every sign that looks like another: its plain form, or nothing where it has no width."""
    folds = {code: chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)}  # full width
    for code in (*range(0x80, 0x3100), *range(0xFE00, 0xFF00), *range(0xE0000, 0xE0080)):
        kind = unicodedata.category(chr(code))
        if kind in ("Cf", "Zs", "Pd"):
            folds[code] = {"Cf": "", "Zs": " ", "Pd": "-"}[kind]
    return folds


_FOLDED = _folds()


def redact(text: str) -> str:
    """All built-in patterns. Signs are folded only where that shows something to redact."""
    redacted = _redacted(text)
    folded = text.translate(_FOLDED)
    if folded == text:
        return redacted
    found = _redacted(folded)
    return redacted if redacted.translate(_FOLDED) == found else found


def _redacted(text: str) -> str:
    """The patterns that are surest first."""
    for pattern in _SECRETS:
        text = pattern.sub("[secret]", text)
    text = _ASSIGNED.sub(r"\1\2[secret]", text)
    text = _LONG.sub(_random_looking, text)
    text = _EMAIL.sub("[email]", text)
    text = _CARD.sub(_card, text)
    for pattern in _PHONES:
        text = pattern.sub(_phone, text)
    return text


def redact_object(value: Any, redactor: Redactor) -> Any:
    """A copy of a JSON value with every string in it redacted; keys stay as they are."""
    if isinstance(value, str):
        return redactor(value)
    if isinstance(value, dict):
        return {key: redact_object(item, redactor) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [redact_object(item, redactor) for item in value]
    return value


def stored_id(value: str, redactor: Redactor) -> str:
    """By which an id is found again: ``s1`` as it is, ``ann@x.org`` as ``[email]:5f3c...``."""
    if (redacted := redactor(value)) == value:
        return value
    return f"{redacted}:{hashlib.sha256(value.encode('utf-8', 'replace')).hexdigest()[:16]}"


def passes_luhn(digits: str) -> bool:
    """The check digit of card numbers: 4111111111111111 passes, 4111111111111112 does not."""
    total = 0
    for place, digit in enumerate(reversed(digits)):
        value = int(digit) * (1 + place % 2)
        total += value - 9 if value > 9 else value
    return total % 10 == 0


def _card(match: re.Match[str]) -> str:
    digits = re.sub(r"\D", "", match[0])
    return "[card]" if passes_luhn(digits) and len(set(digits)) > 1 else match[0]


def _phone(match: re.Match[str]) -> str:
    return "[phone]" if 8 <= sum(map(str.isdigit, match[0])) <= 15 else match[0]


def _random_looking(match: re.Match[str]) -> str:
    """Lower case, upper case and digits mixed over so many characters: a key, hardly a word."""
    word = match[0]
    kinds = (any(map(str.islower, word)), any(map(str.isupper, word)), any(map(str.isdigit, word)))
    return "[secret]" if all(kinds) else word
