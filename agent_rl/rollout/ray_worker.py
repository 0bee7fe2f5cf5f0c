"""EpisodeActor: what a Ray actor does with the order of one episode.

It runs where the agent is. Rewards that the agent sets on the way go to the episode's record at
once, over its address.
"""

from __future__ import annotations

import json
import sys

import httpx

from agent_rl.rollout.child_main import ChildSession, outcome_of
from agent_rl.rollout.order import Order, begin_taking_orders
from agent_rl.types import JsonObject

_TIMEOUT_S = 60.0


class EpisodeActor:
    """``path``: where the driver finds modules; an actor on its machine finds them there too."""

    def __init__(self, path: list[str]) -> None:
        import openai  # noqa: F401 - now, not within the deadline of the first episode

        begin_taking_orders()
        sys.path[:] = [*sys.path, *(entry for entry in path if entry not in sys.path)]

    def ready(self) -> None:
        """Answers when the process is there."""

    def run(self, text: str) -> str:
        """The outcome of the order."""
        order = Order.decode(json.loads(text))
        order.enter_context()
        session = ChildSession(GatewayLink(order.base_url, order.api_key))
        return json.dumps(outcome_of(order, session))


class GatewayLink:
    """Rewards go to the gateway that serves ``base_url``."""

    def __init__(self, base_url: str, api_key: str) -> None:
        self._url = f"{base_url.partition('/s/')[0]}/rl/set_reward"
        self._headers = {"Authorization": f"Bearer {api_key}"}

    def ask(self, message: JsonObject) -> JsonObject:
        """The answer that a pipe would give: {"error": None}, or what to raise."""
        interaction_id, reward = message["reward"]
        body = {"reward": reward}
        if interaction_id is not None:
            body["interaction_id"] = interaction_id
        answer = httpx.post(
            self._url, json=body, headers=self._headers, timeout=_TIMEOUT_S, trust_env=False
        )
        if answer.status_code == 200:
            return {"error": None}
        kind = "RuntimeError" if interaction_id is None else "KeyError"
        return {"error": kind, "message": answer.json()["error"]["message"]}
