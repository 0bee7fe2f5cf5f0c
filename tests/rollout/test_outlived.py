"""What an agent leaves behind gets no answers when its episode is over."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from agent_rl import RolloutEngine, ScriptedEngine
from agent_rl.client.areal_openai import ArealOpenAI

ASK: Any = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


async def test_a_session_that_has_ended(tokenizer: Any) -> None:
    engine = ScriptedEngine(["four"], tokenizer=tokenizer)
    client = ArealOpenAI(engine, tokenizer)
    completion = await client.chat.completions.create(**ASK)
    client.http_client.session.end()
    with pytest.raises(openai.APIStatusError, match="has ended") as caught:
        await client.chat.completions.create(**ASK)
    assert (caught.value.status_code, caught.value.code) == (410, "session_ended")
    assert len(engine.requests) == 1, "neither answered nor tried again"
    client.set_reward(completion.id, 1.0)
    assert list(client.export_interactions("individual")) == [completion.id]


@pytest.mark.parametrize("is_failure", [False, True])
def test_a_thread_of_an_agent(tokenizer: Any, is_failure: bool) -> None:
    left_behind: list[asyncio.Task[Any]] = []

    class Leaver:
        async def run(self, data: dict[str, Any], client: ArealOpenAI) -> float:
            await client.chat.completions.create(**ASK)
            is_over = asyncio.Event()

            def ask_later() -> None:
                while True:
                    client.sync.chat.completions.create(**ASK)

            async def later() -> None:
                await is_over.wait()
                await asyncio.to_thread(ask_later)

            left_behind.append(asyncio.create_task(later()))
            asyncio.get_running_loop().call_soon(is_over.set)
            if is_failure:
                raise KeyError("gold")
            return 1.0

    engine = ScriptedEngine(["four"], tokenizer=tokenizer, repeat=True)
    with RolloutEngine(engine, tokenizer=tokenizer) as rollout:
        (group,) = rollout.rollout_batch([{}], Leaver)
        assert (group is None) is is_failure

        class Waiter:
            async def run(self, data: dict[str, Any], client: ArealOpenAI) -> float:
                with pytest.raises(openai.APIStatusError, match="has ended"):
                    await left_behind[0]
                await client.chat.completions.create(**ASK)
                return 1.0

        assert rollout.rollout_batch([{}], Waiter) != [None]
