"""``/rl/*``: how sessions start, end, get rewards and are exported.

    start_session        admin    {task_id, attempt?, api_key?, user_id?}
    end_session          session  {session_id?}
    set_reward           session  {interaction_id?, reward, session_id?}
    export_trajectories  admin    {session_id, style?, discount?, wait_s?}

An export waits for the session's end and then forgets the session. It is JSON: what it holds is
data on the other side too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import cast

from agent_rl.api.fields import Fields
from agent_rl.api.routes import Reply
from agent_rl.errors import ExportError, RefusedError, RequestError
from agent_rl.gateway.access import Access
from agent_rl.gateway.listener import TurnListener
from agent_rl.gateway.marks import session_name
from agent_rl.gateway.session_log import SessionLog
from agent_rl.gateway.sessions import LiveSession, Sessions
from agent_rl.gateway.wire import Channel, Head, check_id
from agent_rl.record.export import Rows, export_interactions
from agent_rl.record.interaction import InteractionWithTokenLogpReward
from agent_rl.types import ExportStyle, JsonObject

_MAX_TASK_ID = 180  # leaves room for the number behind it


class Lifecycle:
    """``url_of`` gives a session's base URL."""

    ROUTES = frozenset(
        f"rl/{name}"
        for name in ("start_session", "end_session", "set_reward", "export_trajectories")
    )

    def __init__(
        self,
        access: Access,
        sessions: Sessions,
        log: SessionLog,
        url_of: Callable[[LiveSession], str],
        listener: TurnListener | None,
    ) -> None:
        self._access = access
        self._sessions = sessions
        self._log = log
        self._url_of = url_of
        self._listener = listener
        self._routes: dict[str, Callable[[Head, Fields], Awaitable[JsonObject]]] = {
            "start_session": self._start,
            "end_session": self._end,
            "set_reward": self._set_reward,
        }

    def authorize(self, head: Head) -> None:
        """Before the body is read. Raises RefusedError: 401, 403, 404, 405 or 410."""
        if head.path not in self.ROUTES:
            raise RefusedError(
                404,
                f"/{head.path} is not served here; there are {', '.join(sorted(self.ROUTES))}",
                code="unknown_endpoint",
            )
        if head.path in ("rl/start_session", "rl/export_trajectories"):
            self._access.require_admin(head)
        else:
            self._access.identify(head)
        if head.method != "POST":
            raise RefusedError(405, f"/{head.path} takes POST, not {head.method}")

    async def serve(self, head: Head, body: JsonObject, channel: Channel) -> int:
        """Returns the status."""
        fields = Fields(body)
        route = self._routes.get(head.path.removeprefix("rl/"))
        if route is None:
            await self._export(fields, channel)
        else:
            await channel.write_whole(Reply(body=await route(head, fields)))
        return 200

    async def _start(self, head: Head, fields: Fields) -> JsonObject:
        task_id = fields.raw("task_id")
        task_id = check_id(str(task_id) if type(task_id) is int else task_id, "task_id")
        if len(task_id) > _MAX_TASK_ID:
            raise fields.refusal("task_id", f"is longer than {_MAX_TASK_ID} characters")
        attempt = fields.integer("attempt", low=0)
        key, user_id = fields.string("api_key"), fields.string("user_id")
        fields.finish()
        if key is not None:
            self._access.check_new(key)
        live, key = self._sessions.start(task_id, attempt, key, user_id)
        await self._log.on_disk()
        return {
            "session_id": live.session_id,
            "api_key": key,
            "base_url": self._url_of(live),
            "attempt": live.attempt,
        }

    async def _end(self, head: Head, fields: Fields) -> JsonObject:
        live = self._session(head, fields)
        fields.finish()
        self._sessions.end(live, "done")
        await self._log.on_disk()
        return {"session_id": live.session_id, "num_interactions": len(live.session.cache)}

    async def _set_reward(self, head: Head, fields: Fields) -> JsonObject:
        live = self._session(head, fields)
        name, reward = fields.string("interaction_id"), fields.raw("reward")
        fields.finish()
        cache = live.session.cache
        try:
            if name is None:
                name = cache.set_last_reward(reward)
            else:
                cache.set_reward(name, reward)
        except ValueError as error:
            raise fields.refusal("reward", f"is refused: {error}") from error
        except (KeyError, RuntimeError) as error:
            raise fields.refusal("interaction_id", f"is refused: {error.args[0]}") from error
        self._log.rewarded(live, name)
        is_learnt = self._listener is not None and self._listener.on_reward(live.session_id, name)
        await self._log.on_disk()
        return {"session_id": live.session_id, "interaction_id": name, "is_learnt": is_learnt}

    async def _export(self, fields: Fields, channel: Channel) -> None:
        session_id = check_id(fields.raw("session_id"), "session_id")
        style = fields.choice("style", ("individual", "concat")) or "individual"
        discount = fields.number("discount", low=0, high=1)
        wait_s = fields.number("wait_s", low=0)
        fields.finish()
        live = self._sessions.of_id(session_id)
        if live.origin == "attached":
            raise RefusedError(404, f"session {session_id!r} is exported by its owner")
        await self._until_over(live, wait_s, channel)
        rows = _rows(live, cast(ExportStyle, style), discount)
        body = {
            "session_id": session_id,
            "end_reason": live.end_reason,
            "style": style,
            "interactions": {name: _exported(row) for name, row in rows.items()},
        }
        await channel.write_whole(Reply(body=body))
        # Only now: a client that did not get its answer asks again.
        self._sessions.drop(live)
        await self._log.on_disk()

    async def _until_over(self, live: LiveSession, wait_s: float | None, channel: Channel) -> None:
        try:
            async with channel.until_gone(), asyncio.timeout(wait_s):
                await live.is_over.wait()
        except TimeoutError:
            raise RefusedError(
                408, f"session {live.session_id!r} did not end in {wait_s} s", retry_after_s=1
            ) from None
        if live.end_reason == "superseded":
            raise RefusedError(
                410, "a later attempt at this task took its place", code="session_superseded"
            )

    def _session(self, head: Head, fields: Fields) -> LiveSession:
        name = session_name(head, fields.raw("session_id"))
        return self._access.find(self._access.identify(head), name)


def _rows(live: LiveSession, style: ExportStyle, discount: float | None) -> Rows:
    """Discounted once, however often it is asked for."""
    try:
        given = None if live.is_discounted else discount
        rows = export_interactions(live.session.cache, style, given)
    except ExportError as error:
        raise RequestError(str(error), param="style") from error
    live.is_discounted = live.is_discounted or discount is not None
    return rows


def _exported(row: InteractionWithTokenLogpReward) -> JsonObject:
    flat = row.to_row()
    return {
        "reward": row.reward,
        "messages": row.messages,
        "output_message_list": row.output_message_list,
        "trajectory": {
            "input_ids": flat.token_ids.tolist(),
            "loss_mask": flat.loss_mask.tolist(),
            "logprobs": flat.logprobs.tolist(),
            "versions": flat.versions.tolist(),
            "temperatures": flat.temperatures.tolist(),
        },
    }
