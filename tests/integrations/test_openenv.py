from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("openenv.core", reason="needs pip install -e '.[openenv]'")

import uvicorn
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State
from scenario import Stage, played

from agent_rl.integrations.openenv import openenv_agent


class Say(Action):
    text: str


class Heard(Observation):
    said: str


class Echo(Environment):
    """Earns the number of characters; ends after two."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0
        self.item = ""

    def reset(self, seed: Any = None, episode_id: Any = None, **kwargs: Any) -> Heard:
        self.steps, self.item = 0, kwargs["item"]
        return Heard(said=f"speak of {self.item}", reward=0.0, done=False)

    def step(self, action: Say, timeout_s: Any = None, **kwargs: Any) -> Heard:
        if action.text == "boom":
            raise RuntimeError("the game crashed")
        self.steps += 1
        said = f"{action.text}, {self.item}?"
        return Heard(said=said, reward=float(len(action.text)), done=self.steps == 2)

    @property
    def state(self) -> State:
        return State(step_count=self.steps)


@pytest.fixture
def address() -> Iterator[str]:
    listener = socket.create_server(("127.0.0.1", 0))
    app = create_app(Echo, Say, Heard, max_concurrent_envs=4)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    thread = threading.Thread(
        target=lambda: asyncio.run(server.serve(sockets=[listener])), daemon=True
    )
    thread.start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    server.should_exit = True
    thread.join(10)


def test_two_sessions_at_once(address: str) -> None:
    stage = Stage({"corn": ["good", "well"], "flax": ["bad", "sad"]})
    stage.play(
        openenv_agent(
            address, act=lambda text: {"text": text}, observe=lambda seen: str(seen["said"])
        )
    )
    for item, rewards in (("corn", [6.0, 4.0]), ("flax", [4.5, 3.0])):
        assert [turn.reward for turn in stage.clients[item].interactions.values()] == rewards
        played(stage, item, num_rows=1)


def test_an_environment_that_breaks(address: str) -> None:
    stage = Stage({"corn": ["boom"]})
    stage.play(openenv_agent(address, act=lambda text: {"text": text}))
    assert stage.groups["corn"] is None
    assert stage.stats["rollout/failed/agent"] == 1.0
