"""LiveServer: an ASGI app on a port of its own, on the test's event loop, that can be killed.

``serve_process`` runs one as a program, with those arguments of a real server that a test needs.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import uvicorn
import yaml
from served_model import ServedModel
from starlette.applications import Starlette


class LiveServer:
    def __init__(self, app: Starlette, *, port: int = 0, keep_alive_s: int = 5) -> None:
        self.app = app
        app.state.drop = self._drop
        config = uvicorn.Config(
            app, port=port, log_level="warning", timeout_keep_alive=keep_alive_s, lifespan="off"
        )
        self._server = uvicorn.Server(config)
        self._serving: asyncio.Task[None] | None = None
        self.address = ""

    @property
    def model(self) -> ServedModel:
        return self.app.state.model

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    async def start(self) -> Self:
        self._serving = asyncio.create_task(self._server._serve())
        while not self._server.started:  # noqa: ASYNC110 - uvicorn has no event for it
            await asyncio.sleep(0.001)
        host, port = self._server.servers[0].sockets[0].getsockname()
        self.address = f"http://{host}:{port}"
        return self

    async def kill(self) -> None:
        """As a process that dies: connections break, nothing more is answered."""
        self._server.should_exit = self._server.force_exit = True
        for listener in self._server.servers:
            listener.close()
        for connection in list(self._server.server_state.connections):
            connection.transport.abort()
        if self._serving is not None:
            await asyncio.wait({self._serving})
        for connection in list(self._server.server_state.connections):  # taken at the last moment
            connection.transport.abort()

    async def close(self) -> None:
        await self.kill()
        await self.model.close()

    def _drop(self, client: Any) -> None:
        for connection in list(self._server.server_state.connections):
            if connection.client == tuple(client):
                connection.transport.abort()


def serve_process(app_of: Callable[[ServedModel, str | None], Starlette]) -> None:
    """With the key of vLLM's variable, or of SGLang's file of options."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model-path", "--model", required=True)
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--max-running-requests", type=int, default=16)
    parser.add_argument("--context-length", type=int, default=512)
    parser.add_argument("--config", type=Path)
    options, _ = parser.parse_known_args()
    api_key = os.environ.get("VLLM_API_KEY")
    if options.config is not None:
        api_key = yaml.safe_load(options.config.read_text())["api-key"]

    async def serve() -> None:
        model = ServedModel(
            options.model_path,
            max_batch_size=options.max_running_requests,
            max_seq_len=options.context_length,
        )
        config = uvicorn.Config(
            app_of(model, api_key), host=options.host, port=options.port, log_level="warning"
        )
        await uvicorn.Server(config).serve()

    asyncio.run(serve())
