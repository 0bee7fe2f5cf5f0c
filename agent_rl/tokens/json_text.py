"""JSON objects inside sampled text, with the exact text of their values.

``{"name": "f", "arguments": {"x": 1.0}}`` -> ``{"name": '"f"', "arguments": '{"x": 1.0}'}``: the
values are checked to be JSON and never written anew, so spacing, escapes, digits and key order are
what the model sampled.
"""

from __future__ import annotations

import json
from json.decoder import JSONDecoder
from typing import Any


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


_DECODER = JSONDecoder(parse_constant=_refuse_constant)
# Python reads about 950 levels, and fewer where more calls are on its stack: what was read once
# could not be read again, from a journal for one.
MAX_DEPTH = 100


def object_members(text: str, start: int, end: int) -> tuple[dict[str, str], int] | None:
    """Members of the JSON object at ``start`` with their texts, and where the object ends.

    None where there is no complete object before ``end``. The last of equal keys wins.
    """
    text = text[:end]
    members: dict[str, str] = {}
    place = skip_space(text, start)
    if not text.startswith("{", place):
        return None
    place = skip_space(text, place + 1)
    if text.startswith("}", place):
        return members, place + 1
    while True:
        key = value_at(text, place)
        if key is None or not isinstance(key[0], str):
            return None
        place = skip_space(text, key[1])
        if not text.startswith(":", place):
            return None
        place = skip_space(text, place + 1)
        value = value_at(text, place)
        if value is None:
            return None
        members[key[0]] = text[place : value[1]]
        place = skip_space(text, value[1])
        if text.startswith("}", place):
            return members, place + 1
        if not text.startswith(",", place):
            return None
        place = skip_space(text, place + 1)


def value_at(text: str, start: int) -> tuple[Any, int] | None:
    """The JSON value at ``start`` and where it ends; None where it is too deep too."""
    try:
        value, end = _DECODER.raw_decode(text, start)
    except (ValueError, RecursionError):
        return None
    num_opened = text.count("[", start, end) + text.count("{", start, end)
    return None if num_opened > MAX_DEPTH and is_deep(value) else (value, end)


def is_deep(value: object) -> bool:
    """Whether more than MAX_DEPTH lists and objects stand in one another. It walks over them."""
    level: list[Any] = [[value]]
    for _ in range(MAX_DEPTH + 1):
        level = [
            item
            for each in level
            for item in (each.values() if isinstance(each, dict) else each)
            if isinstance(item, dict | list)
        ]
        if not level:
            return False
    return True


def is_object(text: str) -> bool:
    members = object_members(text, 0, len(text))
    return members is not None and not text[members[1] :].strip()


def as_text(text: str) -> str | None:
    """The value of a JSON string, None for any other JSON text.

    None too for half of a surrogate pair, "\\ud83d": a model can write it, UTF-8 cannot.
    """
    value = value_at(text, 0)
    if value is None or not isinstance(value[0], str) or not is_unicode(value[0]):
        return None
    return value[0]


def dump(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if is_unicode(text) else json.dumps(value)


def is_unicode(text: str) -> bool:
    """Whether UTF-8 can write it: no half of a surrogate pair."""
    return not any("\ud800" <= char <= "\udfff" for char in text)


def skip_space(text: str, start: int) -> int:
    while start < len(text) and text[start] in " \t\r\n":
        start += 1
    return start
