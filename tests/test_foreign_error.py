"""What is said of an exception that is not ours: its message and the user's own line."""

from __future__ import annotations

import asyncio
import json
import traceback
import warnings
from pathlib import Path
from typing import Any

import pytest

from agent_rl.errors import EpisodeError, boundary
from agent_rl.foreign_error import close_forgotten, described, named, place_of, users_frame


def line_of(text: str) -> int:
    """The first line of this file that holds the text."""
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    return next(number for number, line in enumerate(lines, 1) if text in line)


def answer(datum: dict[str, str]) -> str:
    return datum["question"]


def raised(call: Any) -> BaseException:
    try:
        call()
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


def test_the_message_has_file_line_function_and_source() -> None:
    with pytest.raises(EpisodeError) as caught, boundary("agent"):
        answer({})
    line = line_of('return datum["question"]')
    place = f"{place_of(caught.value.__cause__)}"
    assert place.endswith(f'test_foreign_error.py:{line} in answer: return datum["question"]')
    assert str(caught.value) == f"agent raised KeyError: 'question' at {place}"
    assert caught.value.place == place


def test_the_users_line_and_not_the_one_of_a_library() -> None:
    error = raised(lambda: json.loads("no json"))
    assert "test_foreign_error.py" in place_of(error) and "in <lambda>" in place_of(error)


def test_the_users_line_and_not_the_one_of_an_integration() -> None:
    from agent_rl.integrations.tasks import one_turn

    error = raised(lambda: one_turn(lambda data, answer: 1.0)().run({}, None).send(None))
    assert "in <lambda>: error = raised(lambda: one_turn" in place_of(error)


def test_the_users_line_may_be_in_the_cause_only() -> None:
    async def first(items: list[int]) -> int:
        return next(iter(items))  # the empty one

    error = raised(lambda: first([]).send(None))
    assert isinstance(error, RuntimeError)
    error.__traceback__ = None  # what is left where only library code is between
    line = line_of("# the empty one")
    assert f":{line} in first: return next(iter(items))" in place_of(error)


def test_the_path_is_short_below_the_working_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parent)
    assert place_of(raised(lambda: answer({}))).startswith("test_foreign_error.py:")


def test_the_working_directory_may_be_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tmp_path.rmdir()
    assert place_of(raised(lambda: answer({}))).startswith(f"{__file__}:")


def test_without_code_of_the_user_it_is_the_last_line() -> None:
    error = raised(lambda: json.loads("no json"))
    inside = error.with_traceback(error.__traceback__.tb_next.tb_next)  # type: ignore[union-attr]
    assert users_frame(traceback.extract_tb(inside.__traceback__)) is None
    assert "json/decoder.py" in place_of(inside) or "json/__init__.py" in place_of(inside)
    assert place_of(KeyError("never raised")) == ""


def test_a_group_of_one_is_that_one() -> None:
    async def run() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(asyncio.to_thread(answer, {}))

    said = described(raised(lambda: asyncio.run(run())))
    assert said.startswith("KeyError: 'question' at ") and " in answer: " in said


def test_an_engines_error_tells_no_line_of_a_file() -> None:
    """It is answered to whoever asked."""
    with pytest.raises(EpisodeError) as caught, boundary("engine"):
        answer({})
    assert str(caught.value) == "engine raised KeyError: 'question'"


async def reply() -> str:
    return "four"


@pytest.mark.parametrize(
    "use",
    [
        lambda coroutine: coroutine.choices,
        lambda coroutine: coroutine["choices"],
        lambda coroutine: list(coroutine),
    ],
)
def test_a_forgotten_await_is_named_and_python_does_not_warn(use: Any) -> None:
    def agent() -> None:
        completion = reply()
        use(completion)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        error = raised(agent)
        assert named(error).endswith("; forgot `await`?")
        close_forgotten(error)


def test_a_message_that_cannot_be_read() -> None:
    class MuteError(Exception):
        def __str__(self) -> str:
            raise RuntimeError("there is no text")

    assert named(MuteError()) == "MuteError, whose message cannot be read"
