"""GatewayApp: the ASGI application. It sends a request to its part and words what is refused."""

from __future__ import annotations

import asyncio
import logging
import time

from agent_rl.api.body import parse_body
from agent_rl.api.routes import Reply, error_reply, has_endpoint
from agent_rl.config import GatewayConfig
from agent_rl.engine.base import InferenceEngine
from agent_rl.errors import AgentRLError, RefusedError
from agent_rl.gateway.counters import Counters
from agent_rl.gateway.lifecycle import Lifecycle
from agent_rl.gateway.serving import CallServer
from agent_rl.gateway.sessions import Sessions
from agent_rl.gateway.wire import Channel, ClientGoneError, Head, Receive, Scope, Send, read_head

logger = logging.getLogger(__name__)

_HEALTH_TIMEOUT_S = 5.0
_ENDING = RefusedError(503, "the server ends; try again", code="shutting_down", retry_after_s=1)
_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class GatewayApp:
    def __init__(
        self,
        config: GatewayConfig,
        engine: InferenceEngine,
        calls: CallServer,
        lifecycle: Lifecycle,
        sessions: Sessions,
        counters: Counters,
    ) -> None:
        self._config = config
        self._engine = engine
        self._calls = calls
        self._lifecycle = lifecycle
        self._sessions = sessions
        self._counters = counters
        self._running: set[asyncio.Task[None] | None] = set()
        self._is_ending = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        start = time.perf_counter()
        channel = Channel(receive, send, self._config)
        path, endpoint = "", "other"
        self._counters.num_running += 1
        task: asyncio.Task[None] | None = asyncio.current_task()
        self._running.add(task)
        try:
            head = read_head(scope, self._config.url_prefix)
            path, endpoint = head.path, _endpoint(head)
            status = await self._serve(head, channel)
        except AgentRLError as error:
            status = await self._refuse(error, path, channel)
        except ClientGoneError:
            self._counters.num_hung_up += 1
            return
        except asyncio.CancelledError:
            if not self._is_ending:
                raise
            status = await self._refuse(_ENDING, path, channel)
        except Exception:  # the process edge: a fault of ours costs this one call
            logger.exception("a request to %s failed", endpoint)
            status = await self._refuse(AgentRLError("internal error; see the log"), path, channel)
        finally:
            self._counters.num_running -= 1
            self._running.discard(task)
        self._counters.served(endpoint, status, time.perf_counter() - start)

    def end_calls(self) -> None:
        """Cut what still runs: what has not begun to answer is refused, streams end."""
        self._is_ending = True
        if self._running:
            logger.warning("%d calls are cut: the gateway closes", len(self._running))
        for task in self._running:
            if task is not None:
                task.cancel()

    async def _serve(self, head: Head, channel: Channel) -> int:
        if head.path == "healthz":
            is_well = await self._is_well()
            status = 200 if is_well else 503
            await channel.write_whole(Reply(status=status, body={"ok": is_well}))
            return status
        if head.path == "metrics":
            text = self._counters.text(self._sessions, self._engine.get_version())
            await channel.write_text(text, _METRICS_TYPE)
            return 200
        if head.path.startswith("rl/"):
            self._lifecycle.authorize(head)
            return await self._lifecycle.serve(head, parse_body(await channel.body(head)), channel)
        return await self._calls.serve(head, channel)

    async def _is_well(self) -> bool:
        try:
            async with asyncio.timeout(_HEALTH_TIMEOUT_S):
                return await self._engine.health()
        except TimeoutError:
            return False

    async def _refuse(self, error: AgentRLError, path: str, channel: Channel) -> int:
        """A refusal in the middle of an answer can only cut it: the status has left."""
        reply = error_reply(error, path)
        if not channel.has_started:
            try:
                await channel.write_whole(reply)
            except ClientGoneError:
                self._counters.num_hung_up += 1
        return reply.status


def _endpoint(head: Head) -> str:
    """A label of the metrics: one of a few words, whatever the client sent."""
    first = head.path.partition("/")[0]
    if first in ("models", "responses", "healthz", "metrics"):
        return first
    if head.path in Lifecycle.ROUTES or has_endpoint(head.method, head.path):
        return head.path
    return "other"
