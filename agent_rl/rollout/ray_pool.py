"""RayPool and RayAgent: agents in Ray actors, on as many machines as the Ray cluster has.

An actor runs one episode at a time and reaches the model at the episode's own address, over TCP.
Order and outcome are JSON text; what happens in between is ray_worker.py's. An actor that dies
fails its episode and is replaced; so is one whose episode is cancelled or runs too long.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from agent_rl.client.areal_openai import ArealOpenAI
from agent_rl.config import RayConfig
from agent_rl.errors import EpisodeError, MissingDependencyError
from agent_rl.rollout.doors import Doors
from agent_rl.rollout.order import AgentSource, Order, returned
from agent_rl.types import JsonObject


class RayPool:
    """``config.num_actors`` actors, started by the first episodes. Used on one event loop."""

    def __init__(self, config: RayConfig) -> None:
        self.config = config
        self._room = asyncio.Semaphore(config.num_actors)
        self._idle: list[Any] = []
        self._starting = asyncio.Lock()

    @asynccontextmanager
    async def actor(self) -> AsyncIterator[Any]:
        """One that nobody else uses. It is killed unless the block ends well."""
        async with self._room:
            actor = await self._take()
            try:
                yield actor
            except BaseException:
                _ray().kill(actor)
                raise
            self._idle.append(actor)

    async def _take(self) -> Any:
        async with self._starting:  # Ray is initialised once
            return self._idle.pop() if self._idle else await asyncio.to_thread(self._start)

    def _start(self) -> Any:
        ray = _ray()
        if not ray.is_initialized():
            ray.init(
                address=self.config.address,
                log_to_driver=False,
                include_dashboard=False,
                num_cpus=None if self.config.address else self.config.num_actors,
            )
        from agent_rl.rollout.ray_worker import EpisodeActor

        remote = ray.remote(EpisodeActor)
        return remote.options(num_cpus=self.config.cpus_per_actor, max_restarts=0).remote(sys.path)


class RayAgent:
    """
    Raises:
        MissingDependencyError: Ray is not installed.
    """

    def __init__(self, agent: AgentSource, doors: Doors, pool: RayPool) -> None:
        _ray()
        self._agent = agent
        self._doors = doors
        self._pool = pool

    async def run(self, client: ArealOpenAI, data: JsonObject) -> object:
        """What the agent returned.

        Raises:
            EpisodeError: it raised, its actor died, or ``data`` is not JSON.
        """
        session = client.http_client.session
        async with self._doors.open(session, self._pool.config.gateway_host) as door:
            order = Order.of(self._agent, data, door)
            async with self._pool.actor() as actor:
                outcome = await self._outcome(actor, order)
        return returned(outcome)

    async def _outcome(self, actor: Any, order: Order) -> JsonObject:
        try:
            text = await actor.run.remote(json.dumps(order.encode()))
        except _ray().exceptions.RayError as error:
            raise EpisodeError(f"the Ray actor of {self._agent.name} died: {error}") from error
        outcome: JsonObject = json.loads(text)
        return outcome


def _ray() -> Any:
    # Ray asks home for usage statistics unless told not to, before it is imported.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError as error:
        raise MissingDependencyError(
            "rollout.agent.mode=ray needs Ray; run: pip install 'agent-rl[ray]'"
        ) from error
    return ray
