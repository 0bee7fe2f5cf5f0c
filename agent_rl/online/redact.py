"""Redaction: what looks like personal data or a secret becomes a word for it, before it is stored.

    "mail ann@x.org, card 4111 1111 1111 1111"  ->  "mail [email], card [card]"

Card numbers count only with a valid check digit, phone numbers only in forms that other numbers
rarely have. Other forms of the same signs (full width, no-break spaces and hyphens, signs without
width) hide nothing; what is encoded, or cut by signs that are seen, is not found. All patterns are
bounded, so a hostile text costs linear time. A rule of the user's own is any function from text to
text.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple, TypeAlias

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
_SUREST = ("secret", "email", "card", "phone")


SEAM = "\u2063"
"""Without width, between the parts of a message: two parts are also read as one text."""


class _Find(NamedTuple):
    """``text[start:end]`` is to become ``[word]``; of finds that overlap the surest gives it."""

    start: int
    end: int
    word: str


def redact(text: str) -> str:
    """All built-in patterns, in the text as it is, as it looks, and over each of its seams."""
    finds = list(_finds(text))
    if not text.isascii():
        for start, end in _windows(text):
            finds += _finds_as_it_looks(text, start, end)
    return _masked(text, finds)


def _windows(text: str) -> Iterator[tuple[int, int]]:
    """The whole text, and each two parts that follow one another."""
    yield 0, len(text)
    seams = [-1, *(match.start() for match in re.finditer(SEAM, text)), len(text)]
    for before, behind in zip(seams, seams[2:], strict=False):
        yield before + 1, behind


def _finds_as_it_looks(text: str, start: int, end: int) -> Iterator[_Find]:
    signs = range(start, end)
    places = [i for i in signs if _FOLDED.get(ord(text[i]), text[i])]
    for find in _finds(text[start:end].translate(_FOLDED)):
        yield find._replace(start=places[find.start], end=places[find.end - 1] + 1)


def _finds(text: str) -> Iterator[_Find]:
    """The patterns that are surest first; where one was found is a boundary for the next."""
    for pattern, group, word, is_meant in _RULES:
        finds = [
            _Find(*match.span(group), word)
            for match in pattern.finditer(text)
            if is_meant(match[group])
        ]
        yield from finds
        text = _replaced(text, finds)


def _replaced(text: str, finds: Sequence[_Find]) -> str:
    """As long as before, with signs that are part of nothing."""
    ends = [0, *(find.end for find in finds)]
    starts = [*(find.start for find in finds), len(text)]
    kept = [text[end:start] for end, start in zip(ends, starts, strict=True)]
    found = [_FOUND * (find.end - find.start) for find in finds]
    return "".join(a + b for a, b in zip_longest(kept, found, fillvalue=""))


def _masked(text: str, finds: Sequence[_Find]) -> str:
    """Finds that overlap are one."""
    parts, end, word = [], 0, ""
    for find in sorted(finds, key=lambda find: (find.start, -find.end)):
        if word and find.start < end:
            word = min(word, find.word, key=_SUREST.index)
            end = max(end, find.end)
        else:
            parts += [f"[{word}]" if word else "", text[end : find.start]]
            end, word = find.end, find.word
    return "".join([*parts, f"[{word}]" if word else "", text[end:]])


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


def _is_card(text: str) -> bool:
    digits = re.sub(r"\D", "", text)
    return passes_luhn(digits) and len(set(digits)) > 1


def _looks_random(word: str) -> bool:
    """Lower case, upper case and digits mixed over so many characters: a key, hardly a word."""
    return all(any(map(kind, word)) for kind in (str.islower, str.isupper, str.isdigit))


def _is_phone(text: str) -> bool:
    return 8 <= sum(map(str.isdigit, text)) <= 15


def _always(text: str) -> bool:
    return True


_FOUND = "\0"
_RULES: tuple[tuple[re.Pattern[str], int, str, Callable[[str], bool]], ...] = (
    *((pattern, 0, "secret", _always) for pattern in _SECRETS),
    (_ASSIGNED, 3, "secret", _always),
    (_LONG, 0, "secret", _looks_random),
    (_EMAIL, 0, "email", _always),
    (_CARD, 0, "card", _is_card),
    *((pattern, 0, "phone", _is_phone) for pattern in _PHONES),
)
