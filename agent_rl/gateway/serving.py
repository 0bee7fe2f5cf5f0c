"""CallServer: from the request of a model call to ``api.routes.answer`` and its bytes.

Nothing is buffered: an event leaves when the engine has made it, and a client that hangs up ends
its generation. What a call means to the session and the listener is ``Call``'s.
"""

from __future__ import annotations

import secrets
import time
from contextlib import aclosing
from urllib.parse import parse_qsl

from agent_rl.api.body import parse_body
from agent_rl.api.routes import answer, endpoints, has_endpoint
from agent_rl.config import GatewayConfig
from agent_rl.errors import RefusedError
from agent_rl.gateway.access import Access, Caller
from agent_rl.gateway.call import Call
from agent_rl.gateway.limits import Limits
from agent_rl.gateway.listener import TurnListener, TurnType
from agent_rl.gateway.marks import Marks, take_marks
from agent_rl.gateway.session_log import SessionLog
from agent_rl.gateway.sessions import LiveSession, Sessions, Usage
from agent_rl.gateway.wire import Channel, Head
from agent_rl.types import JsonObject


class CallServer:
    def __init__(
        self,
        config: GatewayConfig,
        access: Access,
        sessions: Sessions,
        log: SessionLog,
        listener: TurnListener | None,
    ) -> None:
        self._unmarked = config.unmarked_turns
        self._access = access
        self._sessions = sessions
        self._log = log
        self._listener = listener
        self._limits = Limits(
            max_concurrent=config.max_concurrent_requests,
            max_per_minute=config.max_requests_per_minute,
            clock=sessions.clock,
        )
        self._usage_aside: dict[str | None, Usage] = {}

    async def serve(self, head: Head, channel: Channel) -> int:
        """Returns the status.

        Raises:
            RefusedError: what ``Access``, ``Limits`` and ``Channel.body`` refuse.
            ClientGoneError: the client hung up; the generation was ended.
        """
        arrived_at = time.time()
        caller = self._access.identify(head)
        is_post = head.method == "POST"
        if not has_endpoint(head.method, head.path):
            raise RefusedError(
                404,
                f"{head.method} /{head.path} is not served here; below /v1 there are "
                f"{', '.join(endpoints())}",
                code="unknown_endpoint",
            )
        body = parse_body(await channel.body(head)) if is_post else {}
        marks = take_marks(head, body)
        live = self._access.enter(caller, marks.session_name, may_open=is_post)
        with self._limits.running(self._usage(live, caller)):
            call = self._call(live, caller, marks, arrived_at)
            try:
                async with channel.until_gone():
                    return await self._answer(call, head, body, channel)
            finally:
                call.close()

    async def _answer(self, call: Call, head: Head, body: JsonObject, channel: Channel) -> int:
        reply = await answer(
            call.live.session,
            head.method,
            head.path,
            body,
            query=dict(parse_qsl(head.query.decode("latin-1"))) if head.query else None,
            is_retry=head.headers.get(b"x-stainless-retry-count", b"0") != b"0",
            on_accept=call.accept,
        )
        if reply.events is None:
            await call.before_bytes(reply.request_id)
            if reply.status < 400:
                call.answered()
            await channel.write_whole(reply)
            return reply.status
        async with aclosing(reply.events) as events:
            await channel.start(reply)
            async for event in events:
                await call.before_bytes(reply.request_id)
                await channel.write(event)
        call.answered()
        await channel.write(b"", is_last=True)
        return reply.status

    def _call(
        self, live: LiveSession | None, caller: Caller, marks: Marks, arrived_at: float
    ) -> Call:
        """Without a session the call gets one that ends with it and that nobody can name."""
        turn_type: TurnType = "side" if live is None else marks.turn_type or self._default
        once = live or LiveSession(
            session_id=f"once-{secrets.token_urlsafe(12)}",
            session=self._sessions.new_session(),
            origin="passive",
            user_id=caller.user_id,
        )
        user_id = once.user_id or marks.user_id
        if user_id is not None:
            once.named_users.add(user_id)
        return Call(
            live=once,
            turn_type=turn_type,
            session_done=live is None or marks.session_done,
            user_id=user_id,
            arrived_at=arrived_at,
            sessions=None if live is None else self._sessions,
            log=self._log,
            listener=self._listener,
        )

    @property
    def _default(self) -> TurnType:
        return "side" if self._unmarked == "side" else "main"

    def _usage(self, live: LiveSession | None, caller: Caller) -> Usage:
        """A user's calls without a session count together."""
        if live is not None:
            return live.usage
        return self._usage_aside.setdefault(caller.user_id, Usage())
