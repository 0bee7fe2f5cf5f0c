"""Agents of tasks that need no framework: one question, or a text environment that is stepped.

Each function makes an agent class for ``PPOTrainer.train`` or ``RolloutEngine``. What an
environment does may block: it runs in a worker thread.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol, TypeAlias

from openai import AsyncOpenAI

from agent_rl import ArealOpenAI

Datum: TypeAlias = dict[str, Any]
Step: TypeAlias = tuple[Any, float, bool, bool, Mapping[str, Any]]


def one_turn(
    reward: Callable[[Datum, str], float | Awaitable[float]],
    *,
    question: str = "question",
    system: str | None = None,
) -> type:
    """Asks ``data[question]`` once; ``reward(data, answer)`` scores the text, in a thread."""

    class OneTurn:
        async def run(self, data: Datum, client: AsyncOpenAI) -> float:
            messages = _opening(system, str(data[question]))
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
    """

    class Player:
        async def run(self, data: Datum, client: ArealOpenAI) -> None:
            env = await _called(make, data)
            try:
                seen, _ = await _called(env.reset, seed=data.get("seed"))
                messages = _opening(system, observe(seen))
                for _ in range(max_turns):
                    completion = await client.chat.completions.create(
                        model="local", messages=messages
                    )
                    answer = completion.choices[0].message
                    action = act(answer.content or "")
                    seen, earned, is_terminated, is_truncated, _ = await _called(env.step, action)
                    client.set_reward(completion.id, earned)
                    if is_terminated or is_truncated:
                        break
                    messages += [answer, {"role": "user", "content": observe(seen)}]
            finally:
                if hasattr(env, "close"):
                    await _called(env.close)

    return Player


def _opening(system: str | None, text: str) -> list[Any]:
    first = [] if system is None else [{"role": "system", "content": system}]
    return [*first, {"role": "user", "content": text}]


async def _called(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if inspect.iscoroutinefunction(function):
        return await function(*args, **kwargs)
    return await asyncio.to_thread(function, *args, **kwargs)
