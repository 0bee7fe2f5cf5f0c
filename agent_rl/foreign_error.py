"""What is said of an exception that came out of foreign code: an agent, a judge, a filter.

Its name, its message, and the line of the user's own code in which it happened, which is neither
ours, nor that of an installed package, nor Python's:

    KeyError: 'question' at my_agents.py:12 in run: datum["question"]

It knows no boundaries and raises nothing, whatever the exception's own class does.
"""

from __future__ import annotations

import inspect
import os
import sysconfig
import traceback
from collections.abc import Iterable

_NOT_THE_USERS = tuple(
    os.path.join(os.path.normpath(folder), "")
    for folder in (
        os.path.dirname(__file__),
        os.path.join(os.path.dirname(__file__), os.pardir, "integrations"),  # in a checkout
        *(sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib")),
    )
)
_MAX_LINE = 100
_COROUTINE = ("'coroutine' object", "object coroutine can't")
FORGOTTEN = "forgot `await`?"


def described(error: BaseException) -> str:
    """A group of one exception is that exception."""
    where = place_of(error)
    return f"{named(error)} at {where}" if where else named(error)


def named(error: BaseException) -> str:
    """Without the place, which is nobody's business where the text leaves this machine."""
    error = _single(error)
    name = type(error).__name__
    try:
        text = str(error)
    except Exception:  # the edge of foreign code: what the class itself does there
        return f"{name}, whose message cannot be read"
    is_forgotten = isinstance(error, AttributeError | TypeError) and text.startswith(_COROUTINE)
    return f"{name}: {text}; {FORGOTTEN}" if is_forgotten else f"{name}: {text}"


def place_of(error: BaseException) -> str:
    """``my_agents.py:12 in run: datum["question"]``; without the user's code, the last line.

    The user's line may be in the cause only: a StopIteration leaves ``run`` as a RuntimeError that
    was raised from it.
    """
    error = _single(error)
    frames = traceback.extract_tb(error.__traceback__)
    frame = users_frame(frames)
    if frame is None and error.__cause__ is not None:
        frame = users_frame(traceback.extract_tb(error.__cause__.__traceback__))
    frame = frame or (frames[-1] if frames else None)
    return "" if frame is None else as_place(frame)


def users_frame(frames: Iterable[traceback.FrameSummary]) -> traceback.FrameSummary | None:
    """The innermost of the user's own code; ``frames`` has the innermost last."""
    return next((frame for frame in reversed(list(frames)) if _is_the_users(frame)), None)


def as_place(frame: traceback.FrameSummary) -> str:
    line = frame.line or ""
    text = f": {line[:_MAX_LINE]}" if line else ""
    return f"{_short(frame.filename)}:{frame.lineno} in {frame.name}{text}"


def close_forgotten(error: BaseException) -> None:
    """Close the coroutine that was used in place of its result: Python needs not warn of it too."""
    if not named(error).endswith(FORGOTTEN):
        return
    error = _single(error)
    used = [error.obj] if isinstance(error, AttributeError) else []
    for frame, _ in traceback.walk_tb(error.__traceback__):
        used.extend(frame.f_locals.values())
    for value in used:
        if inspect.iscoroutine(value) and inspect.getcoroutinestate(value) == inspect.CORO_CREATED:
            value.close()


def _short(filename: str) -> str:
    """Below the working directory, from there on."""
    try:
        return filename.removeprefix(os.path.join(os.getcwd(), ""))
    except OSError:  # the directory was removed
        return filename


def _single(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


def _is_the_users(frame: traceback.FrameSummary) -> bool:
    return not frame.filename.startswith(("<frozen", *_NOT_THE_USERS))
