"""RayPool and RayAgent: agents in Ray actors, on as many machines as the Ray cluster has.

An actor runs one episode at a time and reaches the model at the episode's own address, over TCP.
Order and outcome are JSON text; what happens in between is ray_worker.py's. An actor that dies
fails its episode and is replaced; so is one whose episode is cancelled or runs too long. Ray is of
the process: the first pool initialises it, no pool shuts it down.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

from agent_rl.client.areal_openai import ArealOpenAI
from agent_rl.config import RayConfig
from agent_rl.errors import EpisodeError, MissingDependencyError
from agent_rl.loop_thread import LoopThread
from agent_rl.rollout.clock import place_in, standing_still
from agent_rl.rollout.doors import Doors
from agent_rl.rollout.order import AgentSource, Order, returned
from agent_rl.types import JsonObject

_START_TIMEOUT_S = 300.0
_opening = threading.Lock()
_opened: LoopThread | None = None


def _ray_thread() -> LoopThread:
    """Where all pools initialise Ray and create actors, one after the other.

    It never ends: the kernel kills the servers that Ray starts when the thread that started them
    ends, as those do that ``asyncio.to_thread`` uses, with their event loop.
    """
    global _opened
    with _opening:
        if _opened is None:
            _opened = LoopThread("ray")
        return _opened


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
                _ray().kill(actor)
                raise
            self._idle.append(actor)

    def close(self) -> None:
        """When no episode runs any more."""
        while self._idle and _ray().is_initialized():
            _ray().kill(self._idle.pop())

    async def _take(self) -> Any:
        while self._idle:
            actor = self._idle.pop()
            with suppress(_ray().exceptions.RayError):  # it died while it had nothing to do
                await actor.ready.remote()
                return actor
        return await self._new_actor()

    async def _new_actor(self) -> Any:
        """One that is ready for an order.

        Raises:
            EpisodeError: it cannot be started.
        """
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                actor = await _ray_thread().run(self._create())
                await actor.ready.remote()
        except TimeoutError as error:
            raise EpisodeError(
                f"Ray started no actor in {_START_TIMEOUT_S:g} s; is there a cluster at "
                f"rollout.agent.ray.address={self.config.address}, with room for "
                f"rollout.agent.ray.cpus_per_actor={self.config.cpus_per_actor:g}?"
            ) from error
        except _ray().exceptions.RayError as error:
            raise EpisodeError(f"a Ray actor did not start: {_first_line(error)}") from error
        return actor

    async def _create(self) -> Any:
        """An actor whose process may still be starting; Ray ends it if nobody waits for it."""
        ray = _ray()
        if not ray.is_initialized():
            _initialise(ray, self.config.address)
        from agent_rl.rollout.ray_worker import EpisodeActor

        num_cpus = self.config.cpus_per_actor if self.config.address else 0
        remote = ray.remote(EpisodeActor)
        return remote.options(num_cpus=num_cpus, max_restarts=0).remote(sys.path)


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
            why = _first_line(error)
            raise EpisodeError(f"the Ray actor of {self._agent.name} died: {why}") from error
        outcome: JsonObject = json.loads(text)
        return outcome


def _initialise(ray: Any, address: str | None) -> None:
    """
    Raises:
        EpisodeError: there is no cluster at the address, or none could be started.
    """
    try:
        ray.init(address=address, include_dashboard=False)
    except (ConnectionError, RuntimeError, ValueError) as error:  # what ray.init raises itself
        why = _first_line(error)
        raise EpisodeError(f"rollout.agent.ray.address={address}: {why}") from error


def _first_line(error: Exception) -> str:
    """What Ray says below it is in the traceback."""
    return str(error).partition("\n")[0]


def _ray() -> Any:
    # Ray asks home for usage statistics unless told not to, before it is imported.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError as error:
        raise MissingDependencyError(
            "rollout.agent.mode=ray needs Ray; run: pip install ray"
        ) from error
    return ray
