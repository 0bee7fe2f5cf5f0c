"""LiveServer: an ASGI app on a port of its own, on the test's event loop, that can be killed."""

from __future__ import annotations

import asyncio
from typing import Any, Self

import uvicorn
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

    async def close(self) -> None:
        await self.kill()
        await self.model.close()

    def _drop(self, client: Any) -> None:
        for connection in list(self._server.server_state.connections):
            if connection.client == tuple(client):
                connection.transport.abort()
