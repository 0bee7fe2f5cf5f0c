"""The gateway over a real socket: sessions that are attached, and where it may listen."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import openai
import pytest
from starlette.applications import Starlette
from starlette.routing import Mount

from agent_rl import ArealOpenAI, ScriptedEngine
from agent_rl.config import GatewayConfig, PPOConfig
from agent_rl.errors import ConfigError
from agent_rl.gateway.server import Gateway, check_address
from agent_rl.serve import serve

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


@pytest.mark.parametrize("keeps_prefix", [False, True])
async def test_behind_a_proxy_with_a_prefix(start: Any, keeps_prefix: bool) -> None:
    """start_session told clients the address that only the proxy reaches."""
    public = "https://example.org/llm/"
    gateway = await start(["four"], public_url=public, admin_key="admin")
    assert gateway.base_url == "https://example.org/llm/v1"
    host, port = gateway._socket.getsockname()
    root = f"http://{host}:{port}" + ("/llm" if keeps_prefix else "")
    async with httpx.AsyncClient() as proxy:
        opened = await proxy.post(
            f"{root}/rl/start_session",
            json={"task_id": "t"},
            headers={"authorization": "Bearer admin"},
        )
        url = opened.json()["base_url"]
        assert url == "https://example.org/llm/s/t-1/v1"
        reply = await proxy.post(
            f"{url.replace('https://example.org/llm', root)}/chat/completions",
            json={"messages": ASK},
            headers={"authorization": f"Bearer {opened.json()['api_key']}"},
        )
    assert reply.json()["choices"][0]["message"]["content"] == "four"


async def test_mounted_in_another_application(tokenizer: Any) -> None:
    gateway = Gateway(ScriptedEngine(["four"], tokenizer=tokenizer), tokenizer)
    app = Starlette(routes=[Mount("/llm", gateway.app)])
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://x/llm") as plain:
        assert (await plain.get("/healthz")).json() == {"ok": True}
        headers = {"authorization": f"Bearer {gateway.api_key}"}
        reply = await plain.post("/v1/chat/completions", json={"messages": ASK}, headers=headers)
    assert reply.status_code == 200


@pytest.mark.parametrize(
    ("url", "complaint"),
    [
        ("example.org/llm", "must be like https"),
        ("https://example.org/v1", "without the /v1"),
        ("https://example.org/?a=b", "must be like https"),
    ],
)
def test_a_public_url_that_is_none(url: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        GatewayConfig(public_url=url)


async def test_a_packed_body_is_refused_by_name(start: Any) -> None:
    """It was called no JSON."""
    gateway = await start(["four"])
    headers = {"authorization": f"Bearer {gateway.api_key}", "content-encoding": "gzip"}
    async with httpx.AsyncClient() as plain:
        reply = await plain.post(
            f"{gateway.base_url}/chat/completions", content=b"\x1f\x8b", headers=headers
        )
    assert reply.status_code == 415
    assert "Content-Encoding: gzip" in reply.json()["error"]["message"]


def test_an_address_in_use_is_known_before_a_model_is_loaded(tokenizer: Any) -> None:
    with Gateway(ScriptedEngine([], tokenizer=tokenizer), tokenizer).run_in_thread() as gateway:
        config = GatewayConfig(port=gateway._socket.getsockname()[1])
        with pytest.raises(ConfigError, match=r"in use; choose another gateway\.port"):
            check_address(config)
        with pytest.raises(ConfigError, match=r"in use; choose another gateway\.port"):
            serve(PPOConfig(tokenizer_path="no model", gateway=config))
    check_address(config)


async def test_calls_that_outlast_the_end_are_cut_without_a_traceback(
    start: Any, tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """What has not begun to answer is refused in words; the log had 40 lines for each call."""
    engine = ScriptedEngine(["four"], tokenizer=tokenizer, latency_s=60.0)
    gateway = await start(engine, shutdown_timeout_s=0.01)
    async with httpx.AsyncClient() as plain:
        headers = {"authorization": f"Bearer {gateway.api_key}"}
        url = f"{gateway.base_url}/chat/completions"
        asking = asyncio.create_task(plain.post(url, json={"messages": ASK}, headers=headers))
        while not engine.requests:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        await gateway.close()
        reply = await asking
    assert (reply.status_code, reply.headers["retry-after"]) == (503, "1")
    assert reply.json()["error"]["code"] == "shutting_down"
    assert "1 calls are cut" in caplog.text and "Traceback" not in caplog.text
