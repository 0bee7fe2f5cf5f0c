"""An agent that runs in a process of its own: a fresh interpreter for each episode.

So ``run`` may block, and an agent may find its model by environment variables. Order, rewards and
outcome are JSON over pipes (child_main.py is the other end); the model is reached over the
episode's own address. The child's whole process group is killed when the episode ends, is cancelled
or runs too long.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from agent_rl.client.areal_openai import ArealOpenAI
from agent_rl.errors import EpisodeError
from agent_rl.rollout.clock import place_in
from agent_rl.rollout.doors import Doors
from agent_rl.rollout.order import AgentSource, Order, RemoteTraceback, returned
from agent_rl.rollout.printed import Printed
from agent_rl.types import JsonObject

if TYPE_CHECKING:
    from agent_rl.gateway.sessions import Door

_START = "import sys; sys.path[:] = {path!r}; from agent_rl.rollout.child_main import main; main()"
_MAX_LINE = 16 << 20
_EXIT_GRACE_S = 1.0


class ChildAgent:
    """
    Args:
        workers: at most so many children at a time; the others wait.
    """

    def __init__(self, agent: AgentSource, doors: Doors, workers: asyncio.Semaphore) -> None:
        self._agent = agent
        self._doors = doors
        self._workers = workers

    async def run(self, client: ArealOpenAI, data: JsonObject) -> object:
        """What the agent returned.

        Raises:
            EpisodeError: it raised, its process died, or ``data`` is not JSON.
        """
        async with self._doors.open(client.http_client.session) as door, place_in(self._workers):
            order = Order.of(self._agent, data, door)
            name = f"{self._agent.name}, task {order.task_id}"
            async with child_process(_environment(door), name) as (process, printed):
                write(process, order.encode())
                return await self._converse(process, client, printed)

    async def _converse(self, process: Process, client: ArealOpenAI, printed: Printed) -> object:
        """Answer rewards until the outcome comes."""
        assert process.stdout is not None, "it is a pipe"
        while line := await process.stdout.readline():
            message = json.loads(line)
            if "reward" in message:
                write(process, _set_reward(client, *message["reward"]))
                continue
            if "error" in message:  # what it printed is complete when the process has ended
                await printed.ended(_EXIT_GRACE_S)
            return returned(message, printed.tail)
        code = await process.wait()
        await printed.ended(_EXIT_GRACE_S)
        raise EpisodeError(
            f"the process of {self._agent.name} ended with code {code} before run returned"
        ) from RemoteTraceback(f"it printed last:\n{printed.tail}")


def _environment(door: Door) -> dict[str, str]:
    """This process's variables, with the model's address in those that SDKs read.

    Anthropic's SDK adds /v1 itself. A proxy must not be asked for a loopback address.
    """
    no_proxy = ",".join(filter(None, [os.environ.get("NO_PROXY"), "127.0.0.1", "localhost"]))
    environment = {
        **os.environ,
        "OPENAI_BASE_URL": door.base_url,
        "OPENAI_API_KEY": door.api_key,
        "ANTHROPIC_BASE_URL": door.base_url.removesuffix("/v1"),
        "ANTHROPIC_API_KEY": door.api_key,
        "NO_PROXY": no_proxy,
        "no_proxy": no_proxy,
    }
    environment.pop("ANTHROPIC_AUTH_TOKEN", None)  # would be sent instead of the key
    return environment


@asynccontextmanager
async def child_process(
    environment: Mapping[str, str], name: str
) -> AsyncIterator[tuple[Process, Printed]]:
    """A child whose group, grandchildren included, is gone when the block ends."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-u", "-c", _START.format(path=sys.path)),
        stdin=PIPE,
        stdout=PIPE,
        stderr=PIPE,
        env=environment,
        limit=_MAX_LINE,
        start_new_session=True,
    )
    assert process.stderr is not None, "it is a pipe"
    printed = Printed(process.stderr, name)
    try:
        yield process, printed
        with contextlib.suppress(TimeoutError):  # it may still tidy up
            await asyncio.wait_for(process.wait(), _EXIT_GRACE_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        await printed.ended(_EXIT_GRACE_S)
        printed.cancel()


def write(process: Process, message: JsonObject) -> None:
    assert process.stdin is not None, "it is a pipe"
    process.stdin.write(json.dumps(message).encode() + b"\n")


def _set_reward(client: ArealOpenAI, interaction_id: str | None, reward: float) -> JsonObject:
    """Also what it raises is an answer: the child raises it where the agent's code is."""
    try:
        if interaction_id is None:
            client.set_last_reward(reward)
        else:
            client.set_reward(interaction_id, reward)
    except (KeyError, RuntimeError, ValueError) as error:
        return {"error": type(error).__name__, "message": str(error.args[0])}
    return {"error": None}
