"""Many sessions at once over TCP while the weights change: nothing fails, nothing leaks."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import httpx
import pytest

from agent_rl import ModelRequest, ScriptedEngine, WeightUpdate

_NAME = re.compile(r"session (\d+) turn (\d+)")


def echo(tokenizer: Any) -> Any:
    """Answers with the session and turn that the last message of the prompt names."""

    async def reply(req: ModelRequest) -> str:
        asked = _NAME.findall(tokenizer.decode(req.input_ids))
        await asyncio.sleep(0)
        return f"answer to session {asked[-1][0]} turn {asked[-1][1]}"

    return reply


async def _talk(client: httpx.AsyncClient, url: str, key: str, session: int, turns: int) -> None:
    """A whole conversation, every third turn streamed; each answer must be this session's."""
    messages: list[dict[str, str]] = []
    for turn in range(turns):
        messages.append({"role": "user", "content": f"session {session} turn {turn}"})
        body = {"messages": messages, "stream": turn % 3 == 2}
        reply = await client.post(
            f"{url}/chat/completions",
            json=body,
            headers={"x-api-key": key, "x-session-id": f"s{session}"},
        )
        assert reply.status_code == 200, reply.text
        content = _streamed(reply.text) if body["stream"] else reply.json()["choices"][0]["message"]
        assert content["content"] == f"answer to session {session} turn {turn}"
        messages.append({"role": "assistant", "content": content["content"]})


def _streamed(text: str) -> dict[str, str]:
    lines = [line[6:] for line in text.splitlines() if line.startswith("data: {")]
    deltas = [json.loads(line)["choices"][0]["delta"] for line in lines]
    return {"content": "".join(delta.get("content") or "" for delta in deltas)}


async def _update(engine: ScriptedEngine, version: int) -> None:
    await engine.pause()
    await engine.update_weights(WeightUpdate(version=version))
    await engine.resume()


async def _load(
    start: Any, tokenizer: Any, until: Any, *, sessions: int, turns: int, updates: int
) -> None:
    engine = ScriptedEngine([echo(tokenizer)], tokenizer=tokenizer, repeat=True)
    gateway = await start(engine, chat_template_type="concat", max_sessions=sessions)
    limits = httpx.Limits(max_connections=sessions)
    async with (
        httpx.AsyncClient(timeout=120.0, limits=limits) as client,
        asyncio.TaskGroup() as group,
    ):
        for number in range(sessions):
            group.create_task(_talk(client, gateway.base_url, gateway.api_key, number, turns))
        for version in range(1, updates + 1):  # spread over the calls
            calls = version * sessions * turns // (updates + 1)
            await until(lambda calls=calls: len(engine.requests) >= calls)
            await _update(engine, version)
    assert engine.get_version() == updates and len(engine.requests) == sessions * turns
    held = {live.session_id: live.session.cache for live in gateway._sessions}
    assert sorted(held) == sorted(f"s{number}" for number in range(sessions))
    for name, cache in held.items():
        assert len(cache) == turns
        texts = [message["content"] for one in cache.values() for message in one.messages]
        assert {_NAME.search(text).group(1) for text in texts} == {name[1:]}  # type: ignore[union-attr]
        versions = [one.model_response.output_versions for one in cache.values()]
        assert all(len(set(of_turn)) == 1 for of_turn in versions)
        assert sorted(v[0] for v in versions) == [v[0] for v in versions]


async def test_many_sessions_while_the_weights_change(
    start: Any, tokenizer: Any, until: Any
) -> None:
    """Case B134."""
    await _load(start, tokenizer, until, sessions=8, turns=4, updates=3)


@pytest.mark.slow
async def test_200_sessions_of_20_turns_and_10_updates(
    start: Any, tokenizer: Any, until: Any
) -> None:
    """Case B134: no failed request, no leak between sessions."""
    await _load(start, tokenizer, until, sessions=200, turns=20, updates=10)
