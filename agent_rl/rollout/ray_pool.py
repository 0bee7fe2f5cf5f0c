"""RayPool and RayAgent: agents in Ray actors, on as many machines as the Ray cluster has.

An actor runs one episode at a time and reaches the model at the episode's own address, over TCP.
Order and outcome are JSON text; what happens in between is ray_worker.py's. An actor that dies
fails its episode and is replaced; so is one whose episode is cancelled or runs too long. That one
cannot be started is no agent's fault. Which cluster they are in is ray_cluster.py's.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

from agent_rl.client.areal_openai import ArealOpenAI
from agent_rl.config import RayConfig
from agent_rl.errors import EpisodeError
from agent_rl.rollout.clock import place_in, standing_still
from agent_rl.rollout.doors import Doors
from agent_rl.rollout.order import AgentSource, Order, returned
from agent_rl.rollout.ray_cluster import connect, connected, first_line, ray_thread, require_ray
from agent_rl.types import JsonObject

_START_TIMEOUT_S = 300.0


class RayPool:
    """``config.num_actors`` actors, started by the first episodes. Used on one event loop.

    On a Ray of this process's own they take no CPUs in Ray's books: this pool bounds them, and the
    actors of another pool find room.
    """

    def __init__(self, config: RayConfig) -> None:
        self.config = config
        self._room = asyncio.Semaphore(config.num_actors)
        self._idle: list[Any] = []

    @asynccontextmanager
    async def actor(self) -> AsyncIterator[Any]:
        """One that nobody else uses. It is killed unless the block ends well."""
        async with place_in(self._room):
            with standing_still():
                actor = await self._take()
            try:
                yield actor
            except BaseException:
                require_ray().kill(actor)
                raise
            self._idle.append(actor)

    def close(self) -> None:
        """When no episode runs any more."""
        while self._idle and require_ray().is_initialized():
            require_ray().kill(self._idle.pop())

    async def _take(self) -> Any:
        while self._idle:
            actor = self._idle.pop()
            with suppress(require_ray().exceptions.RayError):  # it died while it had nothing to do
                await actor.ready.remote()
                return actor
        return await self._new_actor()

    async def _new_actor(self) -> Any:
        """One that is ready for an order.

        Raises:
            EpisodeError: it cannot be started.
            AgentHostError: Ray was shut down, and cannot be reached again.
        """
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                actor = await ray_thread().run(self._create())
                await actor.ready.remote()
        except TimeoutError as error:
            raise EpisodeError(
                f"Ray started no actor in {_START_TIMEOUT_S:g} s; has the cluster at "
                f"rollout.agent.ray.address={self.config.address} room for "
                f"rollout.agent.ray.cpus_per_actor={self.config.cpus_per_actor:g}?",
                boundary="engine",
            ) from error
        except require_ray().exceptions.RayError as error:
            raise EpisodeError(
                f"a Ray actor did not start: {first_line(error)}", boundary="engine"
            ) from error
        return actor

    async def _create(self) -> Any:
        """An actor whose process may still be starting; Ray ends it if nobody waits for it."""
        await connected(self.config)
        ray = require_ray()
        from agent_rl.rollout.ray_worker import EpisodeActor

        num_cpus = self.config.cpus_per_actor if self.config.address else 0
        remote = ray.remote(EpisodeActor)
        return remote.options(num_cpus=num_cpus, max_restarts=0).remote(sys.path)


class RayAgent:
    """Connects this process to the cluster, before any episode.

    Raises:
        MissingDependencyError: Ray is not installed.
        AgentHostError: the cluster cannot be reached.
    """

    def __init__(self, agent: AgentSource, doors: Doors, pool: RayPool) -> None:
        require_ray()
        connect(pool.config)
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
        except require_ray().exceptions.RayError as error:
            why = first_line(error)
            raise EpisodeError(f"the Ray actor of {self._agent.name} died: {why}") from error
        outcome: JsonObject = json.loads(text)
        return outcome
