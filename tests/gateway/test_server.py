"""The gateway over a real socket: sessions that are attached, and where it may listen."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

from agent_rl import ArealOpenAI, ScriptedEngine
from agent_rl.config import GatewayConfig
from agent_rl.errors import ConfigError
from agent_rl.gateway.server import Gateway

ASK = [{"role": "user", "content": "2+2?"}]


async def test_an_attached_session_records_what_its_door_serves(start: Any, tokenizer: Any) -> None:
    gateway = await start(["unused"])
    own = ScriptedEngine(["four", "five"], tokenizer=tokenizer)
    client = ArealOpenAI(own, tokenizer)
    door = gateway.attach(client._session)
    async with openai.AsyncOpenAI(base_url=door.base_url, api_key=door.api_key) as remote:
        completion = await remote.chat.completions.create(model="any", messages=ASK)
        stream = await remote.chat.completions.create(model="any", messages=ASK, stream=True)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    assert completion.choices[0].message.content == "four" and text == "five"
    assert completion.id in client.interactions and len(client.interactions) == 2
    gateway.detach(door.session_id)
    async with httpx.AsyncClient() as plain:
        reply = await plain.get(
            f"{door.base_url}/models", headers={"authorization": f"Bearer {door.api_key}"}
        )
    assert reply.status_code == 410


async def test_a_door_opens_only_its_own_session(start: Any, tokenizer: Any) -> None:
    gateway = await start(["unused"])
    clients = [ArealOpenAI(ScriptedEngine(["x"], tokenizer=tokenizer), tokenizer) for _ in "ab"]
    first, second = [gateway.attach(client._session) for client in clients]
    async with httpx.AsyncClient() as plain:
        reply = await plain.post(
            f"{second.base_url}/chat/completions",
            headers={"authorization": f"Bearer {first.api_key}"},
            json={"messages": ASK},
        )
    assert reply.status_code == 403
    assert not clients[0].interactions and not clients[1].interactions


def test_a_gateway_runs_in_a_thread(tokenizer: Any) -> None:
    gateway = Gateway(ScriptedEngine(["four"], tokenizer=tokenizer), tokenizer)
    with gateway.run_in_thread():
        assert httpx.get(gateway.base_url.removesuffix("/v1") + "/healthz").json() == {"ok": True}


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "gateway.example.org", "192.0.2.1"])
def test_other_addresses_than_loopback_need_a_key(tokenizer: Any, host: str) -> None:
    """Case B173."""
    engine = ScriptedEngine([], tokenizer=tokenizer)
    with pytest.raises(ConfigError, match=r"set gateway\.admin_key or"):
        Gateway(engine, tokenizer, GatewayConfig(host=host))
    Gateway(engine, tokenizer, GatewayConfig(host=host, admin_key="chosen"))
