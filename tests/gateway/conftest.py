"""Gateways on free ports, and plain HTTP clients of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx
import pytest

from agent_rl import ScriptedEngine
from agent_rl.config import GatewayConfig
from agent_rl.gateway.listener import TurnListener
from agent_rl.gateway.server import Gateway

StartGateway = Callable[..., Awaitable[Gateway]]


@pytest.fixture
async def start(tokenizer: Any) -> AsyncIterator[StartGateway]:
    """``await start(replies)`` serves a scripted engine; ``start(engine, ...)`` another one."""
    gateways: list[Gateway] = []

    async def start_one(
        replies: Any, *, listener: TurnListener | None = None, **config: Any
    ) -> Gateway:
        is_script = isinstance(replies, list)
        engine = ScriptedEngine(replies, tokenizer=tokenizer) if is_script else replies
        gateway = Gateway(engine, tokenizer, GatewayConfig(**config), listener=listener)
        await gateway.start()
        gateways.append(gateway)
        return gateway

    yield start_one
    for gateway in gateways:
        await gateway.close()


class Plain:
    """httpx with a key, on a gateway's root."""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway
        root = gateway.base_url.removesuffix("/v1")
        self.http = httpx.AsyncClient(base_url=root, timeout=20.0)

    async def post(self, path: str, body: Any, key: str | None = None, **headers: str) -> Any:
        return await self.http.post(path, json=body, headers=_headers(key, headers))

    async def get(self, path: str, key: str | None = None, **headers: str) -> Any:
        return await self.http.get(path, headers=_headers(key, headers))

    async def admin(self, route: str, **body: Any) -> Any:
        return await self.post(f"/rl/{route}", body, self.gateway.admin_key)

    async def chat(self, key: str, text: str = "2+2?", **headers: str) -> Any:
        body = {"messages": [{"role": "user", "content": text}]}
        return await self.post("/v1/chat/completions", body, key, **headers)


def _headers(key: str | None, others: dict[str, str]) -> dict[str, str]:
    """``x_session_id="a"`` is the header X-Session-Id."""
    named = {name.replace("_", "-"): value for name, value in others.items()}
    return named if key is None else {"authorization": f"Bearer {key}", **named}


@pytest.fixture
async def plain() -> AsyncIterator[Callable[[Gateway], Plain]]:
    clients: list[Plain] = []

    def make(gateway: Gateway) -> Plain:
        clients.append(Plain(gateway))
        return clients[-1]

    yield make
    for client in clients:
        await client.http.aclose()


@pytest.fixture
def until() -> Callable[[Callable[[], object]], Awaitable[None]]:
    """``await until(condition)``: goes on as soon as it is true."""

    async def wait(condition: Callable[[], object]) -> None:
        while not condition():  # noqa: ASYNC110 - the condition is the server's, not an event
            await asyncio.sleep(0.005)

    return wait
