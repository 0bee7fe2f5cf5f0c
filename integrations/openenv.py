"""OpenEnv: environments behind a server, played by an agent whose answers are their actions.

agent = openenv_agent("http://localhost:8000", act=lambda text: {"message": text})
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from openenv.core.generic_client import GenericEnvClient

from agent_rl import ArealOpenAI


def openenv_agent(
    base_url: str,
    *,
    act: Callable[[str], dict[str, Any]],
    observe: Callable[[dict[str, Any]], str] = json.dumps,
    system: str | None = None,
    max_turns: int = 16,
) -> type:
    """Each episode is a session of its own at the server, reset with the ``reset`` of its datum.

    ``act`` makes an action of an answer, ``observe`` text of an observation. Each step's reward is
    that of the answer that caused it.
    """

    class Player:
        async def run(self, data: dict[str, Any], client: ArealOpenAI) -> None:
            messages: list[Any] = [] if system is None else [{"role": "system", "content": system}]
            async with GenericEnvClient(base_url=base_url) as env:
                result = await env.reset(**data.get("reset", {}))
                for _ in range(max_turns):
                    messages.append({"role": "user", "content": observe(result.observation)})
                    completion = await client.chat.completions.create(
                        model="local", messages=messages
                    )
                    answer = completion.choices[0].message
                    messages.append(answer)
                    result = await env.step(act(answer.content or ""))
                    client.set_reward(completion.id, result.reward or 0.0)
                    if result.done:
                        break

    return Player
