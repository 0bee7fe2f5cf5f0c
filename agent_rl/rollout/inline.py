"""An agent that runs on the event loop of the episodes, in this process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from agent_rl.client.areal_openai import ArealOpenAI
from agent_rl.errors import EpisodeError, WorkflowResolutionError, boundary
from agent_rl.rollout.arguments import wanted_arguments
from agent_rl.rollout.blame import owner_of
from agent_rl.rollout.doors import Doors
from agent_rl.rollout.unawaited import refuse_unawaited
from agent_rl.types import JsonObject


class InlineAgent:
    """
    Args:
        agent: a class, constructed with ``kwargs`` for each episode, or an instance for all.
        doors: for an agent that takes a bare address.

    Raises:
        WorkflowResolutionError: ``run`` is not a coroutine, or needs what cannot be passed.
    """

    def __init__(
        self, agent: object, kwargs: Mapping[str, Any], name: str, doors: Doors | None
    ) -> None:
        self._agent = agent
        self._kwargs = dict(kwargs)
        self._name = name
        self._doors = doors
        self._wanted = wanted_arguments(agent, name)
        if not self._wanted.is_async:
            raise WorkflowResolutionError(
                f"{name}.run must be `async def run(self, data, ...)`, and a decorator of it a "
                "coroutine function as well; move blocking code into `await asyncio.to_thread"
                "(...)`, or set rollout.agent.mode=subproc"
            )
        if self._wanted.needs_address and doors is None:
            raise WorkflowResolutionError(
                f"{name}.run takes an address, which only a RolloutEngine can give it"
            )

    async def run(self, client: ArealOpenAI, data: JsonObject) -> object:
        """What the agent returned. Threads and tasks that it leaves behind get no more answers.

        Raises:
            EpisodeError: it raised.
        """
        async with self._arguments(client) as arguments:
            try:
                with boundary("agent"):
                    agent: Any = self._agent
                    if isinstance(agent, type):
                        agent = agent(**self._kwargs)
                    returned = await agent.run(data, **arguments)
                    refuse_unawaited(returned, self._name)
                    return returned
            except EpisodeError as error:
                if error.__cause__ is not None:
                    error.boundary = owner_of(error.__cause__)
                raise
            finally:
                client.http_client.session.end()

    @asynccontextmanager
    async def _arguments(self, client: ArealOpenAI) -> AsyncIterator[dict[str, object]]:
        """By name. With ``http_client`` the address is that of the client: no port is needed."""
        available: dict[str, object] = {
            "client": client,
            "session": client,
            "http_client": client.http_client,
            "base_url": str(client.base_url),
            "api_key": client.api_key,
        }
        if not self._wanted.needs_address or self._doors is None:
            yield {name: available[name] for name in self._wanted.names}
            return
        async with self._doors.open(client.http_client.session) as door:
            available |= {"base_url": door.base_url, "api_key": door.api_key}
            yield {name: available[name] for name in self._wanted.names}
