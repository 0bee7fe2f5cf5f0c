"""The ASGI application: which part of the gateway takes a request, and how a refusal looks."""

from __future__ import annotations

from agent_rl.api.routes import Reply, error_reply
from agent_rl.errors import AgentRLError
from agent_rl.gateway.serving import CallServer
from agent_rl.gateway.wire import Channel, ClientGoneError, Head, Receive, Scope, Send, read_head


class GatewayApp:
    def __init__(self, calls: CallServer, *, write_timeout_s: float) -> None:
        self._calls = calls
        self._write_timeout_s = write_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        channel = Channel(receive, send, write_timeout_s=self._write_timeout_s)
        path = ""
        try:
            try:
                head = read_head(scope)
                path = head.path
                await self._dispatch(head, channel)
            except AgentRLError as error:
                await channel.write_whole(error_reply(error, path))
        except ClientGoneError:
            pass

    async def _dispatch(self, head: Head, channel: Channel) -> None:
        if head.path == "healthz":
            await channel.write_whole(Reply(body={"ok": True}))
            return
        await self._calls.serve(head, channel)
