"""RayPool and RayAgent: agents in Ray actors, on as many machines as the Ray cluster has.

An actor runs one episode at a time and reaches the model at the episode's own address, over TCP.
Order and outcome are JSON text; what happens in between is child_main.py's. An actor that dies
fails its episode and is replaced; so is one whose episode is cancelled or runs too long.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from agent_rl.client.areal_openai import ArealOpenAI
from agent_rl.config import RayConfig
from agent_rl.errors import EpisodeError, MissingDependencyError, RewardError
from agent_rl.rollout.arguments import wanted_arguments
from agent_rl.rollout.child import ChildTraceback, context_fields, json_data, json_kwargs, place
from agent_rl.rollout.doors import Doors
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
    Args:
        agent: a class that the actors' machines can import, constructed there with ``kwargs``.

    Raises:
        WorkflowResolutionError: as ``ChildAgent``.
        MissingDependencyError: Ray is not installed.
    """

    def __init__(
        self, agent: object, kwargs: Mapping[str, Any], name: str, doors: Doors, pool: RayPool
    ) -> None:
        _ray()
        wanted_arguments(agent, name)
        self._name = name
        self._order = {**place(agent, name, "ray"), "kwargs": json_kwargs(kwargs, name)}
        self._doors = doors
        self._pool = pool

    async def run(self, client: ArealOpenAI, data: JsonObject) -> object:
        """What the agent returned.

        Raises:
            EpisodeError: it raised, its actor died, or ``data`` is not JSON.
        """
        session = client.http_client.session
        async with (
            self._doors.open(session, self._pool.config.gateway_host) as door,
            self._pool.actor() as actor,
        ):
            order = {
                **self._order,
                "data": json_data(data, "ray"),
                "base_url": door.base_url,
                "api_key": door.api_key,
                "context": context_fields(),
            }
            outcome = await self._outcome(actor, order)
        if "returned" in outcome:
            return outcome["returned"]
        if outcome["owner"] == "reward":
            raise RewardError(outcome["error"])
        raise EpisodeError(
            f"agent raised {outcome['error']}", boundary=outcome["owner"]
        ) from ChildTraceback("\n" + outcome["traceback"])

    async def _outcome(self, actor: Any, order: JsonObject) -> JsonObject:
        try:
            text = await actor.run.remote(json.dumps(order))
        except _ray().exceptions.RayError as error:
            raise EpisodeError(f"the Ray actor of {self._name} died: {error}") from error
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
