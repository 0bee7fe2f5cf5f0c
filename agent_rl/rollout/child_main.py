"""The child process of one episode: construct the agent, run it, send back the outcome.

    parent -> child   the order (order.py); then one answer for each reward
    child -> parent   {"reward": [id or null, number]} ...; last the outcome

One JSON object a line, over the standard pipes; what the agent prints goes to standard error. When
the parent's end closes, however the parent ended, the whole process group dies. Kept light: the
agent's own imports decide how fast a child starts.
"""

from __future__ import annotations

import asyncio
import json
import os
import queue
import signal
import threading
import traceback
from collections.abc import Mapping
from typing import IO, Any, Protocol

from agent_rl.errors import EpisodeError, RewardError
from agent_rl.foreign_error import close_forgotten, described, place_of
from agent_rl.record.reward import as_interaction_id, as_reward
from agent_rl.rollout.arguments import wanted_arguments
from agent_rl.rollout.blame import owner_of
from agent_rl.rollout.order import Order, begin_taking_orders
from agent_rl.rollout.unawaited import refuse_unawaited
from agent_rl.types import JsonObject

_MAX_TEXT = 20_000
_EXCEPTIONS: dict[str, type[Exception]] = {
    "KeyError": KeyError,
    "RuntimeError": RuntimeError,
    "ValueError": ValueError,
}


class ParentLink:
    """The pipes. A thread reads, so that the parent's end is noticed whatever the agent does."""

    def __init__(self, incoming: IO[bytes], outgoing: IO[bytes]) -> None:
        self._incoming = incoming
        self._outgoing = outgoing
        self._answers: queue.SimpleQueue[JsonObject] = queue.SimpleQueue()
        self._turn = threading.Lock()
        threading.Thread(target=self._read, name="agent-rl-parent", daemon=True).start()

    def receive(self) -> JsonObject:
        return self._answers.get()

    def send(self, message: JsonObject) -> None:
        self._outgoing.write(json.dumps(message).encode() + b"\n")
        self._outgoing.flush()

    def ask(self, message: JsonObject) -> JsonObject:
        with self._turn:
            self.send(message)
            return self.receive()

    def _read(self) -> None:
        for line in self._incoming:
            self._answers.put(json.loads(line))
        os.killpg(os.getpgrp(), signal.SIGKILL)


class RewardLink(Protocol):
    def ask(self, message: JsonObject) -> JsonObject: ...


class ChildSession:
    """``session`` in a child process: rewards are set in the parent's record at once."""

    def __init__(self, link: RewardLink) -> None:
        self._link = link

    def set_reward(self, interaction_id: str, reward: float) -> None:
        """Raises KeyError for an unknown id, ValueError for what is not a finite number."""
        self._set(as_interaction_id(interaction_id), reward)

    def set_last_reward(self, reward: float) -> None:
        """Raises RuntimeError when nothing is recorded yet; ValueError as ``set_reward``."""
        self._set(None, reward)

    def _set(self, interaction_id: str | None, reward: float) -> None:
        answer = self._link.ask({"reward": [interaction_id, as_reward(reward)]})
        if answer["error"] is not None:
            raise _EXCEPTIONS[answer["error"]](answer["message"])


def main() -> None:
    """What ``child.py`` starts a fresh interpreter for."""
    begin_taking_orders()
    link = ParentLink(os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb"))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)  # input() finds nothing to read
    os.dup2(2, 1)
    order = Order.decode(link.receive())
    order.enter_context()
    link.send(outcome_of(order, ChildSession(link)))


def outcome_of(order: Order, session: ChildSession) -> JsonObject:
    """What the agent returned, or how it failed."""
    try:
        returned = _run(order.agent.construct(), order, session)
        refuse_unawaited(returned, order.agent.name)
        return {"returned": _plain(returned)}
    except EpisodeError as error:
        return {"error": str(error), "owner": error.boundary, "place": "", "traceback": ""}
    except BaseException as error:  # the process's edge: the parent raises it as an EpisodeError
        close_forgotten(error)
        return {
            "error": _shortened(f"agent raised {described(error)}"),
            "owner": owner_of(error),
            "place": place_of(error),
            "traceback": _shortened(traceback.format_exc()),
        }


def _shortened(text: str) -> str:
    """Its beginning and its end, where it is too long for an outcome."""
    half = _MAX_TEXT // 2
    return text if len(text) <= _MAX_TEXT else f"{text[:half]} ... {text[-half:]}"


def _run(agent: Any, order: Order, session: ChildSession) -> object:
    wanted = wanted_arguments(agent, order.agent.name)
    available: dict[str, object] = {
        "session": session,
        "base_url": order.base_url,
        "api_key": order.api_key,
    }
    if "http_client" in wanted.names or "client" in wanted.names:
        available |= _clients(order, session, is_async=wanted.is_async)
    arguments = {name: available[name] for name in wanted.names}
    if wanted.is_async:
        return asyncio.run(agent.run(order.data, **arguments))
    return agent.run(order.data, **arguments)


def _clients(order: Order, session: ChildSession, *, is_async: bool) -> dict[str, object]:
    """The SDK's own client at the episode's address, with the two methods that set rewards."""
    import openai

    sdk = openai.AsyncOpenAI if is_async else openai.OpenAI
    client = sdk(base_url=order.base_url, api_key=order.api_key)
    for name in ("set_reward", "set_last_reward"):
        setattr(client, name, getattr(session, name))
    http_client = openai.DefaultAsyncHttpxClient() if is_async else openai.DefaultHttpxClient()
    return {"client": client, "http_client": http_client}


def _plain(returned: object) -> float | dict[str, float] | None:
    if returned is None:
        return None
    if isinstance(returned, Mapping) and not all(isinstance(name, str) for name in returned):
        raise RewardError(f"run returned rewards for {[*returned]!r}; give each interaction's id")
    try:
        if isinstance(returned, Mapping):
            return {name: as_reward(reward) for name, reward in returned.items()}
        return as_reward(returned)
    except ValueError as error:
        raise RewardError(
            f"{error}; return a number or a dict of interaction id to number"
        ) from None
