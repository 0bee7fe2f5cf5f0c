"""A tokenizer for the folder, and gateways on free ports."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from transformers import AutoTokenizer

from agent_rl import ScriptedEngine, small_model
from agent_rl.config import GatewayConfig
from agent_rl.gateway.listener import TurnListener
from agent_rl.gateway.server import Gateway

StartGateway = Callable[..., Awaitable[Gateway]]


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(small_model())


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
