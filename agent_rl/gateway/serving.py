"""One call of a model endpoint: session, body, ``api.routes.answer``, listener, bytes out.

Invariant: the listener hears of an answer before its last bytes leave, and exactly once for each
accepted call, whether it was answered, failed or its client hung up.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass

from agent_rl.api.routes import Reply, answer
from agent_rl.config import GatewayConfig
from agent_rl.errors import RefusedError
from agent_rl.gateway.listener import ServedCall, TurnListener
from agent_rl.gateway.sessions import LiveSession, Sessions
from agent_rl.gateway.wire import Channel, Head
from agent_rl.types import JsonObject


@dataclass(slots=True, kw_only=True)
class _Answering:
    """The listener's view of one call."""

    live: LiveSession
    listener: TurnListener | None
    arrived_at: float
    call: ServedCall | None = None
    is_settled: bool = False

    def accept(self, messages: Sequence[JsonObject]) -> None:
        self.call = ServedCall(
            session_id=self.live.session_id,
            user_id=self.live.user_id,
            turn_type="main",
            session_done=False,
            messages=messages,
            session=self.live.session,
            arrived_at=self.arrived_at,
        )
        if self.listener is not None:
            self.listener.on_request(self.call)

    def settle_if_recorded(self, interaction_id: str | None) -> None:
        if not self.is_settled and interaction_id in self.live.session.cache:
            self.settle(interaction_id)

    def settle(self, interaction_id: str | None) -> None:
        if self.call is None or self.is_settled:
            return
        self.is_settled = True
        if self.listener is not None:
            self.listener.on_answer(self.call, interaction_id)


class CallServer:
    def __init__(
        self, config: GatewayConfig, sessions: Sessions, listener: TurnListener | None
    ) -> None:
        self._config = config
        self._sessions = sessions
        self._listener = listener

    async def serve(self, head: Head, channel: Channel) -> None:
        arrived_at = time.time()
        live = self._session_of(head)
        body = await channel.body(
            head,
            max_bytes=self._config.max_body_bytes,
            timeout_s=self._config.read_timeout_s,
        )
        answering = _Answering(live=live, listener=self._listener, arrived_at=arrived_at)
        is_retry = head.headers.get(b"x-stainless-retry-count", b"0") != b"0"
        try:
            async with channel.until_gone():
                reply = await answer(
                    live.session,
                    head.method,
                    head.path,
                    body,
                    is_retry=is_retry,
                    on_accept=answering.accept,
                )
                await self._send(reply, answering, channel)
        finally:
            answering.settle(None)

    async def _send(self, reply: Reply, answering: _Answering, channel: Channel) -> None:
        if reply.events is None:
            answering.settle_if_recorded(reply.request_id)
            await channel.write_whole(reply)
            return
        async with aclosing(reply.events) as events:
            await channel.start(reply)
            async for event in events:
                answering.settle_if_recorded(reply.request_id)
                await channel.write(event)
        await channel.write(b"", is_last=True)

    def _session_of(self, head: Head) -> LiveSession:
        key = head.key
        if key is None:
            raise RefusedError(401, "no key: send Authorization: Bearer KEY, or x-api-key")
        live = self._sessions.of_key(key)
        if head.session_id not in (None, live.session_id):
            raise RefusedError(403, "this key belongs to another session")
        return live
