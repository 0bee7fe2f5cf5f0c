"""Fields: each read checks, finish refuses what nobody read."""

from __future__ import annotations

from typing import Any

import pytest

from agent_rl.api.fields import Fields
from agent_rl.errors import RequestError


def test_null_and_absent_are_the_same() -> None:
    fields = Fields({"a": None})
    assert fields.number("a") is None and fields.number("b") is None
    assert fields.boolean("a") is False
    fields.finish()


def test_unread_key_is_refused_by_name() -> None:
    fields = Fields({"n": 2, "colour": 1})
    assert fields.integer("n", low=1) == 2
    with pytest.raises(RequestError, match="colour is not a parameter") as caught:
        fields.finish()
    assert caught.value.param == "colour"


@pytest.mark.parametrize(
    ("read", "value", "message"),
    [
        ("number", "1", "must be a number"),
        ("number", True, "must be a number"),
        ("number", float("nan"), "is nan"),
        ("number", 10**400, "is too large"),
        ("integer", 1.5, "must be an integer"),
        ("integer", True, "must be an integer"),
        ("boolean", 1, "must be true or false"),
        ("string", 1, "must be a string"),
        ("mapping", [], "must be an object"),
        ("array", {}, "must be a list"),
    ],
)
def test_wrong_types(read: str, value: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        getattr(Fields({"x": value}, where="outer"), read)("x")
    assert caught.value.param == "outer.x"


def test_ranges_are_inclusive() -> None:
    fields = Fields({"x": 2})
    assert fields.number("x", low=0, high=2) == 2.0
    with pytest.raises(RequestError, match=r"x is 2.0; it must be in \[0, 1\]"):
        fields.number("x", low=0, high=1)
    with pytest.raises(RequestError, match="must be at least 3"):
        fields.integer("x", low=3)


def test_only_takes_harmless_values() -> None:
    Fields({"x": "off"}).only("x", "off")
    Fields({}).only("x")
    with pytest.raises(RequestError, match="x is not supported here"):
        Fields({"x": "on"}).only("x", "off")


def test_choice() -> None:
    assert Fields({"x": "a"}).choice("x", ("a", "b")) == "a"
    with pytest.raises(RequestError, match="x is 'c'; it must be one of a, b"):
        Fields({"x": "c"}).choice("x", ("a", "b"))


def test_what_was_sent_is_not_sent_back_whole() -> None:
    fields = Fields({"style": "x" * 1000, "y" * 1000: 1})
    with pytest.raises(RequestError) as caught:
        fields.choice("style", ("a", "b"))
    assert len(str(caught.value)) == 400
    fields.raw("style")
    with pytest.raises(RequestError) as caught:
        fields.finish()
    assert (len(str(caught.value)), len(caught.value.param)) == (400, 400)
