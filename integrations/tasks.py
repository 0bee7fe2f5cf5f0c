"""Agents of tasks that need no framework: one question, or a text environment that is stepped.

Each function makes an agent class for ``PPOTrainer.train`` or ``RolloutEngine``. What an
environment does may block: it runs in a worker thread.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

from openai import AsyncOpenAI

from agent_rl import ArealOpenAI

Datum: TypeAlias = dict[str, Any]
Step: TypeAlias = tuple[Any, float, bool, bool, Mapping[str, Any]]

_RESET = ("observation", "info")
_STEP = ("observation", "reward", "terminated", "truncated", "info")


def one_turn(
    reward: Callable[[Datum, str], float | Awaitable[float]],
    *,
    question: str = "question",
    system: str | None = None,
) -> type:
    """Asks ``data[question]`` once; ``reward(data, answer)`` scores the text, in a thread.

    The question is a text, or a list of messages. Of several rewards ``reward`` returns the
    (weighted) sum.

    Raises:
        TypeError: ``reward`` cannot be called like that.
    """
    _check_call("reward", reward, "data", "answer")

    class OneTurn:
        async def run(self, data: Datum, client: AsyncOpenAI) -> float:
            messages = _opening(system, _column(data, question))
            completion = await client.chat.completions.create(model="local", messages=messages)
            answer = completion.choices[0].message.content or ""
            score: float = await _called(reward, data, answer)
            return score

    return OneTurn


class TextEnv(Protocol):
    """Gymnasium's interface, with text (or anything that ``observe`` makes text of) to see."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, Any]: ...

    def step(self, action: Any) -> Step: ...


def text_env(
    make: Callable[[Datum], TextEnv],
    *,
    system: str | None = None,
    max_turns: int = 16,
    observe: Callable[[Any], str] = str,
    act: Callable[[str], Any] = str.strip,
) -> type:
    """Plays an environment: it is the user, each answer is an action and earns its reward.

    ``make(data)`` makes a new environment for each episode, which is reset with ``data["seed"]`` if
    there is one. ``act`` reads the action out of an answer. After ``max_turns`` actions the episode
    ends as it stands. The environment is closed if it can be.

    Raises:
        TypeError: ``make`` cannot be called like that.
    """
    _check_call("make", make, "data")

    class Player:
        async def run(self, data: Datum, client: ArealOpenAI) -> None:
            env = await _called(make, data)
            try:
                seed = {"seed": data["seed"]} if "seed" in data else {}
                seen, _ = _fields(_RESET, await _called(env.reset, **seed))
                messages = _opening(system, observe(seen))
                for _ in range(max_turns):
                    completion = await client.chat.completions.create(
                        model="local", messages=messages
                    )
                    answer = completion.choices[0].message
                    action = act(answer.content or "")
                    step = await _called(env.step, action)
                    seen, earned, is_terminated, is_truncated, _ = _fields(_STEP, step)
                    client.set_reward(completion.id, earned)
                    if is_terminated or is_truncated:
                        break
                    messages += [answer, {"role": "user", "content": observe(seen)}]
            finally:
                if hasattr(env, "close"):
                    await _called(env.close)

    return Player


def _opening(system: str | None, shown: str | list[Any]) -> list[Any]:
    first = [] if system is None else [{"role": "system", "content": system}]
    return [*first, *(shown if isinstance(shown, list) else [{"role": "user", "content": shown}])]


def _column(data: Datum, name: str) -> str | list[Any]:
    if name not in data:
        columns = ", ".join(map(repr, data))
        raise LookupError(
            f"the datum has no {name!r}, but {columns}: one_turn(reward, question=...)"
        )
    value: str | list[Any] = data[name]
    if not isinstance(value, str | list):
        kind = type(value).__name__
        raise TypeError(f"{name!r} must be a text or a list of messages, not of type {kind}")
    return value


def _check_call(name: str, function: object, *arguments: str) -> None:
    expected = f"{name}({', '.join(arguments)})"
    if not callable(function):
        raise TypeError(f"{expected} must be a function, not {type(function).__name__}")
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError as error:
        raise TypeError(f"{name} is called as {expected}, but {error}") from None
    except ValueError:
        return  # some builtins have no signature


def _fields(names: Sequence[str], returned: object) -> Sequence[Any]:
    """What Gymnasium's interface returns, and older ones do not."""
    if isinstance(returned, tuple) and len(returned) == len(names):
        return returned
    found = f"{len(returned)} values" if isinstance(returned, tuple) else type(returned).__name__
    raise TypeError(
        f"the environment must return ({', '.join(names)}), as Gymnasium's; got {found}"
    )


async def _called(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if inspect.iscoroutinefunction(function):
        return await function(*args, **kwargs)
    returned = await asyncio.to_thread(function, *args, **kwargs)
    return await returned if inspect.isawaitable(returned) else returned
