"""Request bodies: bytes -> a JSON object that every later step can read, write and encode.

Python takes more than JSON has: NaN, half of a surrogate pair, nesting until its stack is full. A
body with one of these is refused, and the place is named. ``fault_in`` walks over a body, so it is
asked only where something is wrong.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from agent_rl.errors import RequestError
from agent_rl.tokens.json_text import MAX_DEPTH, is_deep
from agent_rl.types import JsonObject

_MAYBE_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]")


def parse_body(content: bytes) -> JsonObject:
    """Raises RequestError for anything but a JSON object. No body is an empty one."""
    try:
        body = _STRICT.decode((content or b"{}").decode("utf-8", "surrogatepass"))
    except _NotFiniteError:
        fault = fault_in(json.loads(content))
        assert fault is not None, "the number that was refused is in the body"
        raise fault from None
    except RecursionError as error:
        raise too_deep() from error
    except ValueError as error:
        raise RequestError(f"the request body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise RequestError("the request body must be a JSON object")
    # Counting is cheap, and a walk only takes the lists and objects of a long conversation.
    if content.count(b"{") + content.count(b"[") > MAX_DEPTH and is_deep(body):
        raise too_deep()
    if _may_have_half_a_pair(content):
        fault = fault_in(body)
        if fault is not None:
            raise fault
    return body


def _may_have_half_a_pair(content: bytes) -> bool:
    """Only a hit, which is rare, costs a walk. Substrings are found faster than patterns."""
    may = b"\\u" in content or b"\xed" in content
    return may and _MAYBE_SURROGATE.search(content) is not None


class _NotFiniteError(Exception):
    """A number that JSON cannot write."""


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise _NotFiniteError
    return number


_STRICT = json.JSONDecoder(parse_float=_finite, parse_constant=_finite)


def too_deep() -> RequestError:
    return RequestError(f"the request is nested too deeply; {MAX_DEPTH} levels are enough")


def fault_in(body: object) -> RequestError | None:
    """What JSON or UTF-8 cannot write, or Python cannot walk over; None where all is well."""
    waiting: list[tuple[str, Any, int]] = [("", body, 0)]
    while waiting:
        where, value, depth = waiting.pop()
        why = _fault_of(value, depth)
        if why is not None:
            return RequestError(f"{where or 'the body'} {why}", param=where or None)
        waiting += [(place, item, depth + 1) for place, item in _inside(value, where)]
    return None


def _fault_of(value: object, depth: int) -> str | None:
    if depth > MAX_DEPTH:
        return f"is nested more than {MAX_DEPTH} levels deep"
    if isinstance(value, str) and not _is_unicode(value):
        return "holds half of a surrogate pair, which UTF-8 cannot write"
    if isinstance(value, dict) and not all(_is_unicode(key) for key in value):
        return "has a key with half of a surrogate pair, which UTF-8 cannot write"
    if isinstance(value, float) and not math.isfinite(value):
        return f"is {value}, which JSON cannot write"
    return None


def _inside(value: object, where: str) -> Iterator[tuple[str, object]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield f"{where}.{key}" if where else str(key), item
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield f"{where}[{index}]", item


def _is_unicode(text: object) -> bool:
    try:
        str(text).encode()
    except UnicodeEncodeError:
        return False
    return True
