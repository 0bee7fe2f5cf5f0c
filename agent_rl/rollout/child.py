"""An agent that runs in a process of its own: a fresh interpreter for each episode.

So ``run`` may block, and an agent may find its model by environment variables. Order, rewards and
result are JSON over pipes (see child_main.py); the model is reached over the episode's own address.
The child's whole process group is killed when the episode ends, is cancelled or runs too long.
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
from typing import TYPE_CHECKING, Any

from agent_rl import workflow_context
from agent_rl.client.areal_openai import ArealOpenAI
from agent_rl.errors import EpisodeError, JournalError, RewardError, WorkflowResolutionError
from agent_rl.record.codec import as_json
from agent_rl.rollout.arguments import wanted_arguments
from agent_rl.rollout.child_main import is_child
from agent_rl.rollout.doors import Doors
from agent_rl.types import JsonObject

if TYPE_CHECKING:
    from agent_rl.gateway.sessions import Door

_START = "import sys; sys.path[:] = {path!r}; from agent_rl.rollout.child_main import main; main()"
_MAX_LINE = 16 << 20
_MAX_PRINTED = 8 << 10
_EXIT_GRACE_S = 1.0


class ChildTraceback(Exception):
    """The traceback inside the child, as text: the cause of the error that is raised here."""


class ChildAgent:
    """
    Args:
        agent: a class that the child can import, constructed there with ``kwargs``.
        workers: at most so many children at a time; the others wait.

    Raises:
        WorkflowResolutionError: it cannot be imported from elsewhere, ``kwargs`` are not JSON, or
            ``run`` needs what cannot be passed.
    """

    def __init__(
        self,
        agent: object,
        kwargs: Mapping[str, Any],
        name: str,
        doors: Doors,
        workers: asyncio.Semaphore,
    ) -> None:
        if is_child():
            raise WorkflowResolutionError(
                "an agent's process began to run episodes itself: put what your script does under "
                'if __name__ == "__main__"'
            )
        wanted_arguments(agent, name)
        self._name = name
        self._order = {**place(agent, name, "subproc"), "kwargs": json_kwargs(kwargs, name)}
        self._doors = doors
        self._workers = workers

    async def run(self, client: ArealOpenAI, data: JsonObject) -> object:
        """What the agent returned.

        Raises:
            EpisodeError: it raised, its process died, or ``data`` is not JSON.
        """
        async with self._doors.open(client.http_client.session) as door, self._workers:
            order = {
                **self._order,
                "data": json_data(data, "subproc"),
                "base_url": door.base_url,
                "api_key": door.api_key,
                "context": context_fields(),
            }
            async with child_process(_environment(door)) as process:
                assert process.stdin is not None and process.stderr is not None, "both are pipes"
                printed = asyncio.create_task(_tail(process.stderr))
                write(process, order)
                return await self._converse(process, client, printed)

    async def _converse(
        self, process: Process, client: ArealOpenAI, printed: asyncio.Task[str]
    ) -> object:
        """Answer rewards until the result comes."""
        assert process.stdout is not None, "it is a pipe"
        while line := await process.stdout.readline():
            message = json.loads(line)
            if "reward" in message:
                write(process, _set_reward(client, *message["reward"]))
            elif "returned" in message:
                return message["returned"]
            else:
                raise await self._failure(message, printed)
        code = await process.wait()
        raise EpisodeError(
            f"the process of {self._name} ended with code {code} before run returned"
        ) from ChildTraceback(f"it printed last:\n{await printed}")

    async def _failure(self, message: JsonObject, printed: asyncio.Task[str]) -> EpisodeError:
        if message["owner"] == "reward":
            return RewardError(message["error"])
        error = EpisodeError(f"agent raised {message['error']}", boundary=message["owner"])
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(printed), _EXIT_GRACE_S)
        tail = printed.result() if printed.done() else ""
        error.__cause__ = ChildTraceback(
            "\n" + message["traceback"] + (f"it printed last:\n{tail}" if tail else "")
        )
        return error


def place(agent: object, name: str, mode: str) -> JsonObject:
    """Where a fresh interpreter finds the class.

    Raises:
        WorkflowResolutionError: nowhere.
    """
    if not isinstance(agent, type):
        raise WorkflowResolutionError(
            f"rollout.agent.mode={mode} constructs the agent in its own process: give the class "
            f"{name} (or its import path) and workflow_kwargs, not an instance"
        )
    if "<locals>" in agent.__qualname__:
        raise WorkflowResolutionError(
            f"rollout.agent.mode={mode} cannot import {agent.__qualname__}: define the class at "
            "the top level of a module"
        )
    script, module = None, agent.__module__
    if module == "__main__":
        main = sys.modules["__main__"]
        spec = getattr(main, "__spec__", None)
        script = None if spec is not None else getattr(main, "__file__", None)
        module = spec.name if spec is not None else module
        if spec is None and script is None:
            raise WorkflowResolutionError(
                f"rollout.agent.mode={mode} cannot import {name} from a notebook or a prompt: "
                "put the class into a file and import it"
            )
    return {"module": module, "script": script, "name": agent.__qualname__}


def context_fields() -> JsonObject:
    """What the agent's code may ask its ``workflow_context`` for."""
    context = workflow_context.get()
    return {"is_eval": context.is_eval, "task_id": context.task_id}


def json_kwargs(kwargs: Mapping[str, Any], name: str) -> JsonObject:
    for key, value in kwargs.items():
        try:
            as_json(value, key)
        except JournalError as error:
            raise WorkflowResolutionError(
                f"workflow_kwargs of {name} go to another process as JSON: {error}"
            ) from error
    return dict(kwargs)


def json_data(data: JsonObject, mode: str) -> JsonObject:
    try:
        plain: JsonObject = as_json(data, "the datum")
    except JournalError as error:
        raise EpisodeError(f"{error}; rollout.agent.mode={mode} needs plain values") from error
    return plain


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
async def child_process(environment: Mapping[str, str]) -> AsyncIterator[Process]:
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
    try:
        yield process
        with contextlib.suppress(TimeoutError):  # it may still tidy up
            await asyncio.wait_for(process.wait(), _EXIT_GRACE_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


def write(process: Process, message: JsonObject) -> None:
    assert process.stdin is not None, "it is a pipe"
    process.stdin.write(json.dumps(message).encode() + b"\n")


async def _tail(stream: asyncio.StreamReader) -> str:
    """The end of what the stream gives."""
    kept = b""
    while chunk := await stream.read(_MAX_PRINTED):
        kept = (kept + chunk)[-_MAX_PRINTED:]
    return kept.decode("utf-8", errors="replace")


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
