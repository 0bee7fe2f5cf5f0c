"""Reads a request body field by field, so that no field can be ignored by accident.

Every read marks the key as known; ``finish`` refuses whatever was not read. JSON null means the
same as an absent key, as in the OpenAI API. Every refusal is a RequestError that names the field.

    fields = Fields({"n": 2, "colour": 1})
    fields.integer("n", low=1)      # 2
    fields.finish()                 # RequestError: colour is not a parameter that ...
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from agent_rl.errors import RequestError
from agent_rl.types import JsonObject

T = TypeVar("T")

_MAX_ECHO = 400  # characters of a refusal: what was sent is named, not sent back whole


class Fields:
    def __init__(self, body: Mapping[str, Any], *, where: str = "") -> None:
        self._body = body
        self._where = where
        self._known: set[str] = set()

    def path(self, name: str) -> str:
        """The name of the field as the caller knows it: ``stream_options.include_usage``."""
        return f"{self._where}.{name}" if self._where else name

    def raw(self, name: str) -> Any:
        """The value as sent, None when absent."""
        self._known.add(name)
        return self._body.get(name)

    def number(self, name: str, *, low: float = -math.inf, high: float = math.inf) -> float | None:
        value = self._typed(name, float, "a number")
        if value is not None and not (math.isfinite(value) and low <= value <= high):
            raise self.refusal(name, f"is {value}; it must be {_range(low, high)}")
        return value

    def integer(self, name: str, *, low: float = -math.inf, high: float = math.inf) -> int | None:
        value = self._typed(name, int, "an integer")
        if value is not None and not low <= value <= high:
            raise self.refusal(name, f"is {value}; it must be {_range(low, high)}")
        return value

    def boolean(self, name: str, *, default: bool = False) -> bool:
        value = self.raw(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.refusal(name, f"must be true or false, not {value!r}")
        return value

    def string(self, name: str) -> str | None:
        return self._typed(name, str, "a string")

    def mapping(self, name: str) -> JsonObject | None:
        return self._typed(name, dict, "an object")

    def array(self, name: str) -> list[Any] | None:
        return self._typed(name, list, "a list")

    def choice(self, name: str, allowed: Sequence[str]) -> str | None:
        value = self.string(name)
        if value is not None and value not in allowed:
            raise self.refusal(name, f"is {value!r}; it must be one of {', '.join(allowed)}")
        return value

    def only(self, name: str, *harmless: object) -> None:
        """Accept a parameter that has no meaning here where its value asks for nothing."""
        value = self.raw(name)
        if value is not None and value not in harmless:
            raise self.refusal(name, "is not supported here; leave it out")

    def finish(self) -> None:
        for name in self._body:
            if name not in self._known:
                raise self.refusal(name, "is not a parameter that this endpoint knows")

    def refusal(self, name: str, why: str) -> RequestError:
        path = self.path(name)[:_MAX_ECHO]
        return RequestError(f"{path} {why}"[:_MAX_ECHO], param=path)

    def _typed(self, name: str, kind: type[T], word: str) -> T | None:
        value = self.raw(name)
        if kind is float and type(value) is int:
            value = self._as_float(name, value)
        # True is an int in Python, but not in JSON.
        if value is None or (isinstance(value, kind) and not isinstance(value, bool)):
            return value
        raise self.refusal(name, f"must be {word}, not {value!r}")

    def _as_float(self, name: str, value: int) -> float:
        """JSON has integers of any size, floats end at 1.8e308."""
        try:
            return float(value)
        except OverflowError:
            raise self.refusal(name, "is too large for a number") from None


def _range(low: float, high: float) -> str:
    if high == math.inf:
        return "finite" if low == -math.inf else f"at least {low:g}"
    return f"in [{low:g}, {high:g}]"
