"""Which messages count as the same after a framework has stored and replayed them."""

from __future__ import annotations

from typing import Any

import pytest
from fix_format import assistant, call, user
from pydantic import BaseModel

from agent_rl.record.identity import START, Chain, answer_keys, as_messages


def replays(answer: dict[str, Any], replay: dict[str, Any], issued: set[str] | None = None) -> bool:
    return Chain(issued or set()).add(replay) in answer_keys(START, [answer])


NOISE = {"refusal": None, "audio": None, "annotations": [], "function_call": None, "parsed": None}


@pytest.mark.parametrize(
    "replay",
    [
        assistant("", tool_calls=[call("c1")]),
        {"role": "assistant", "tool_calls": [call("c1")]},
        assistant(None, tool_calls=[call("c1")], **NOISE),
        assistant([], tool_calls=[call("c1")], name="agent"),
    ],
)
def test_no_content_is_one_thing(replay: dict[str, Any]) -> None:
    """case B11: null, "", absent, and extra keys that say nothing."""
    answer = assistant(None, tool_calls=[call("c1")])
    assert replays(answer, replay)
    assert replays(answer, replay, {"c1"})


def test_text_parts_are_the_joined_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b", "cache_control": {}}]
    assert replays(assistant("ab"), assistant(parts))
    assert not replays(assistant("ab"), assistant("a b"))
    assert replays(assistant("no"), assistant([{"type": "refusal", "refusal": "no"}]))


def test_parts_that_are_no_text_are_compared_as_values() -> None:
    def image(url: str) -> dict[str, Any]:
        return user([{"type": "image_url", "image_url": {"url": url}}])  # type: ignore[arg-type]

    assert Chain().add(image("a")) == Chain().add(image("a"))
    assert Chain().add(image("a")) != Chain().add(image("b"))


def test_reasoning_may_be_dropped() -> None:
    """case B14: frameworks lose reasoning_content on the round trip."""
    assert replays(assistant("b", reasoning_content="a"), assistant("b"))


@pytest.mark.parametrize("arguments", ['{"x":1,"y":"é"}', '{"y": "\\u00e9", "x": 1.0}'])
def test_arguments_are_compared_as_json_values(arguments: str) -> None:
    """case B27: re-dumped arguments; here the framework also lost our ids."""
    answer = assistant(None, tool_calls=[call("c1", arguments='{"x": 1, "y": "é"}')])
    assert replays(answer, assistant(None, tool_calls=[call("other", arguments=arguments)]))


def test_arguments_that_differ() -> None:
    answer = assistant(None, tool_calls=[call("c1", arguments='{"n": 12345678901234567890}')])
    other = call("", arguments='{"n": 12345678901234567891}')
    assert not replays(answer, assistant(None, tool_calls=[other]))
    truth = assistant(None, tool_calls=[call("c1", arguments='{"x": true}')])
    assert not replays(truth, assistant(None, tool_calls=[call("", arguments='{"x": 1}')]))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ('{"x": -1}', '{"x": -2}'),
        ('{"x": 0}', f'{{"x": {2**61 - 1}}}'),
        ('{"index": 1}', '{"index": 2}'),
        ('{"annotations": "a"}', '{"annotations": "b"}'),
        ('{"x": "1"}', '{"x": 1}'),
        ("[]", "{}"),
    ],
)
def test_arguments_with_equal_hashes_or_names_of_noise_differ(one: str, other: str) -> None:
    """hash(-1) == hash(-2) in Python; "index" is noise in a message, not in arguments."""
    answer = assistant(None, tool_calls=[call("c1", arguments=one)])
    assert not replays(answer, assistant(None, tool_calls=[call("", arguments=other)]))


@pytest.mark.parametrize("depth", [100, 400, 900, 100_000])
def test_deeply_nested_arguments_do_not_raise(depth: int) -> None:
    """JSON that a parser takes may still be too deep for Python code that walks over it."""
    arguments = '{"x":' + "[" * depth + "]" * depth + "}"
    answer = assistant(None, tool_calls=[call("c1", arguments=arguments)])
    assert replays(answer, answer)
    assert replays(answer, assistant(None, tool_calls=[call("", arguments=arguments)]))


@pytest.mark.parametrize("calls", [5, "x", {"a": 1}, [None], [{"id": "a", "function": "f"}]])
def test_calls_that_are_none_do_not_raise(calls: Any) -> None:
    """The renderer refuses them by name; the look-up comes first."""
    assert Chain().add(assistant("a", tool_calls=calls)) == Chain().add(
        assistant("a", tool_calls=calls)
    )


@pytest.mark.parametrize("replay", ["a b", " a b\n", [{"type": "text", "text": "a b "}]])
def test_space_around_an_answer_may_be_lost(replay: Any) -> None:
    """Some frameworks strip the text of an answer before they store it."""
    assert replays(assistant("a b \n"), assistant(replay))
    calls = [call("c1")]
    assert replays(assistant("a b \n", tool_calls=calls), assistant(replay, tool_calls=calls))


@pytest.mark.parametrize("arguments", ["", "{}", None, {}])
def test_no_arguments_are_the_empty_object(arguments: Any) -> None:
    """case B25: a tool without parameters."""
    answer = assistant(None, tool_calls=[call("c1", arguments="{}")])
    assert replays(answer, assistant(None, tool_calls=[call("", arguments=arguments)]))


def test_ids_that_we_gave_are_enough() -> None:
    """case B23: malformed arguments come back repaired, text beside the calls is lost."""
    answer = assistant("I look", tool_calls=[call("c1", arguments='{"a": 2,  "b":')])
    replay = assistant(None, tool_calls=[call("c1", arguments='{"a": 2}')])
    assert replays(answer, replay, issued={"c1"})
    assert not replays(answer, replay, issued=set())


def test_very_deep_arguments_do_not_raise() -> None:
    answer = assistant(None, tool_calls=[call("c1", arguments="[" * 100_000)])
    assert replays(answer, answer)


def test_tool_results_answer_a_position() -> None:
    """Ids that a framework makes anew for each request do not matter; swapped results do."""

    def keys(first: str, second: str, results: tuple[str, str]) -> int:
        chain = Chain()
        chain.add(assistant(None, tool_calls=[call(first, "f"), call(second, "g")]))
        chain.add({"role": "tool", "tool_call_id": results[0], "content": "r1"})
        return chain.add({"role": "tool", "tool_call_id": results[1], "content": "r2"})

    assert keys("c1", "c2", ("c1", "c2")) == keys("d1", "d2", ("d1", "d2"))
    assert keys("c1", "c2", ("c1", "c2")) != keys("c1", "c2", ("c2", "c1"))


def test_as_messages_takes_models_and_tuples() -> None:
    """case B12: dicts, message objects and a tuple of them; a bare string is named."""

    class Message(BaseModel):
        role: str
        content: str | None = None
        refusal: str | None = None

    messages = as_messages((Message(role="user", content="hi"), assistant("a")))
    assert messages == [{"role": "user", "content": "hi"}, assistant("a")]
    with pytest.raises(TypeError, match=r"messages\[1\] is a str"):
        as_messages([user("hi"), "yo"])
    with pytest.raises(TypeError, match="list of objects, not str"):
        as_messages("hi")
    with pytest.raises(ValueError, match="empty"):
        as_messages([])
