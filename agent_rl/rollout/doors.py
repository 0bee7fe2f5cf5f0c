"""Doors: an address of its own for each episode whose agent needs one.

A gateway is started by the first of them, on the episodes' own event loop: on the loopback address,
unless agents run on other machines. Agents that take ``client`` or ``http_client`` never need it.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from agent_rl import workflow_context
from agent_rl.api.session import Session
from agent_rl.config import GatewayConfig
from agent_rl.tokens.vocabulary import require_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from agent_rl.engine.base import InferenceEngine, StreamItem
    from agent_rl.gateway.server import Gateway
    from agent_rl.gateway.sessions import Door
    from agent_rl.types import ModelRequest, ModelResponse


class EpisodeEngine:
    """The engine for requests that come from a task of the gateway: they sample with the episode's
    own randomness, as if its agent had asked here."""

    def __init__(self, engine: InferenceEngine, context: workflow_context.WorkflowContext) -> None:
        self._engine = engine
        self._context = context

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        workflow_context.set(self._context)
        return await self._engine.agenerate(req)

    def astream(self, req: ModelRequest) -> AsyncIterator[StreamItem]:
        workflow_context.set(self._context)
        return self._engine.astream(req)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


class Doors:
    def __init__(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        if tokenizer is not None:
            require_tokenizer(tokenizer)
        self._tokenizer = tokenizer
        self._starting = asyncio.Lock()
        self._gateway: Gateway | None = None

    @asynccontextmanager
    async def open(self, session: Session, host: str = "127.0.0.1") -> AsyncIterator[Door]:
        """Serve the session until the block ends; its key is worth nothing afterwards.

        ``host``, of the first call, is where the gateway listens.
        """
        gateway = await self._started(session, host)
        engine = EpisodeEngine(session.engine, workflow_context.get())
        door = gateway.attach(replace(session, engine=cast("InferenceEngine", engine)))
        try:
            yield door
        finally:
            gateway.detach(door.session_id)

    async def close(self) -> None:
        if self._gateway is not None:
            await self._gateway.close()
            self._gateway = None

    async def _started(self, session: Session, host: str) -> Gateway:
        async with self._starting:
            if self._gateway is None:
                from agent_rl.gateway.server import Gateway  # a web server few runs need

                assert self._tokenizer is not None, "agents are refused without a tokenizer"
                keys = {name: secrets.token_urlsafe(32) for name in ("admin_key", "api_key")}
                config = GatewayConfig(host=host, **keys)
                gateway = Gateway(session.engine, self._tokenizer, config)
                await gateway.start()
                self._gateway = gateway
            return self._gateway
