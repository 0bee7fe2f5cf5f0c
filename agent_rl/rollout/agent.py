"""AgentWorkflow: an ordinary agent (``async def run(self, data, ...)``) as a workflow.

Each episode has its own client, so its own record; a class also gets a fresh instance for each
episode. What ``run`` takes by name is passed: ``client``, ``session`` (where rewards are set; the
same object), ``http_client``, and beside that also ``base_url`` and ``api_key``, because such a
client reaches the engine without a port. What it returns:

    a number                  the reward of the last interaction; others set before stay
    {interaction_id: number}  rewards by id
    None                      rewards were set through the client or session

An agent that finds its model by environment variables is not served here: those belong to the whole
process, so concurrent episodes would share one record.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import openai

from agent_rl import workflow_context
from agent_rl.client.areal_openai import ArealOpenAI
from agent_rl.config import AgentConfig
from agent_rl.engine.base import InferenceEngine
from agent_rl.errors import (
    Boundary,
    EpisodeError,
    EpisodeRejectedError,
    RewardError,
    WorkflowResolutionError,
    boundary,
)
from agent_rl.record.cache import InteractionCache
from agent_rl.record.interaction import InteractionWithTokenLogpReward
from agent_rl.record.reward import as_reward
from agent_rl.rollout.episode import Exported
from agent_rl.rollout.workflow import RolloutWorkflow
from agent_rl.stats import tracker as stats_tracker
from agent_rl.types import GenerationConfig, JsonObject

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_ARGUMENTS = ("client", "session", "http_client", "base_url", "api_key")


@dataclass(frozen=True, slots=True, kw_only=True)
class InlineSettings:
    """What the client of an agent is made of."""

    tokenizer: PreTrainedTokenizerBase | None
    gconfig: GenerationConfig | None = None
    config: AgentConfig = field(default_factory=AgentConfig)


class AgentWorkflow(RolloutWorkflow):
    """
    Args:
        agent: a class, constructed with ``kwargs`` for each episode, or an instance for all.

    Raises:
        WorkflowResolutionError: ``run`` is not a coroutine, or needs what cannot be passed.
    """

    def __init__(
        self,
        agent: object,
        kwargs: Mapping[str, Any] | None = None,
        *,
        settings: InlineSettings,
    ) -> None:
        name = agent.__qualname__ if isinstance(agent, type) else type(agent).__qualname__
        if settings.tokenizer is None:
            raise WorkflowResolutionError(
                f"the agent {name} needs a client, and that a tokenizer: give "
                "RolloutEngine(..., tokenizer=)"
            )
        self._name = name
        self._agent = agent
        self._kwargs = dict(kwargs or {})
        self._settings = settings
        self._arguments = wanted_arguments(agent, name)

    async def arun_episode(self, engine: InferenceEngine, data: JsonObject) -> Exported:
        config = self._settings.config
        client = ArealOpenAI(
            engine,
            self._settings.tokenizer,
            gconfig=self._settings.gconfig,
            chat_template_type=config.chat_template_type,
            tool_call_parser=config.tool_call_parser,
            reasoning_parser=config.reasoning_parser,
            engine_max_tokens=config.engine_max_tokens,
            max_requests=config.max_requests,
        )
        error = None
        start_s = time.perf_counter()
        try:
            returned = await self._run(client, data)
        except EpisodeError as raised:
            if config.on_agent_error == "drop" or not client.interactions:
                raise
            error, returned = raised, 0.0 if config.on_agent_error == "zero" else None
        if not client.interactions:
            raise EpisodeRejectedError(
                f"{self._name} finished without one recorded model call: all its calls failed, or "
                "it used another client than the one it was given (made from OPENAI_BASE_URL, say)",
                reason="no_model_call",
            )
        latency_s = time.perf_counter() - start_s
        self._set_rewards(client, returned)
        exported = client.export_interactions(config.export_style, config.turn_discount)
        with_reference = _with_reference(exported)
        _record_episode(client, latency_s)
        return Exported(with_reference, _orphans(client), error)

    async def _run(self, client: ArealOpenAI, data: JsonObject) -> object:
        available = {
            "client": client,
            "session": client,
            "http_client": client._client,  # the SDK has no public name for it
            "base_url": str(client.base_url),
            "api_key": client.api_key,
        }
        arguments = {name: available[name] for name in self._arguments}
        try:
            with boundary("agent"):
                agent: Any = self._agent
                if isinstance(agent, type):
                    agent = agent(**self._kwargs)
                return await agent.run(data, **arguments)
        except EpisodeError as error:
            if error.__cause__ is not None:
                error.boundary = _owner(error.__cause__)
            raise

    def _set_rewards(self, client: ArealOpenAI, returned: object) -> None:
        if isinstance(returned, Mapping):
            for interaction_id, reward in returned.items():
                if interaction_id not in client.interactions:
                    raise RewardError(
                        f"{self._name} returned a reward for the unknown interaction id "
                        f"{interaction_id!r}; known: {', '.join(client.interactions)}"
                    )
                client.set_reward(interaction_id, _checked(reward))
        elif returned is not None:
            client.set_last_reward(_checked(returned))
        if all(interaction.reward is None for interaction in client.interactions.values()):
            raise EpisodeRejectedError(
                f"{self._name} returned no reward and set none through its client; return a "
                "number, or call client.set_last_reward(...)",
                reason="no_reward",
            )


def wanted_arguments(agent: object, name: str) -> tuple[str, ...]:
    """Names of what ``run`` takes besides the datum.

    Raises:
        WorkflowResolutionError: see AgentWorkflow.
    """
    run = agent.run  # type: ignore[attr-defined]
    if not inspect.iscoroutinefunction(inspect.unwrap(run)):
        raise WorkflowResolutionError(
            f"{name}.run must be `async def run(self, data, ...)`; move blocking code into "
            "`await asyncio.to_thread(...)`"
        )
    parameters = list(inspect.signature(run).parameters.values())
    is_method_of_class = isinstance(agent, type) and not isinstance(
        inspect.getattr_static(agent, "run"), staticmethod | classmethod
    )
    parameters = parameters[1:] if is_method_of_class else parameters
    if not parameters or parameters[0].kind not in _POSITIONAL:
        raise WorkflowResolutionError(f"{name}.run must take the datum as its first argument")
    named = {p.name: p for p in parameters[1:] if p.kind not in _VARIADIC}
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
    wanted = set(_ARGUMENTS) if takes_any else set(_ARGUMENTS) & named.keys()
    if "http_client" not in wanted:
        _refuse_address(name, named)
        wanted -= {"base_url", "api_key"}
    missing = [p.name for p in named.values() if p.default is p.empty and p.name not in wanted]
    if missing:
        raise WorkflowResolutionError(
            f"{name}.run needs {', '.join(missing)}, which nobody passes; it may take "
            f"{', '.join(_ARGUMENTS)}, anything else needs a default"
        )
    return tuple(argument for argument in _ARGUMENTS if argument in wanted)


_POSITIONAL = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
    inspect.Parameter.VAR_POSITIONAL,
)
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def _refuse_address(name: str, named: Mapping[str, inspect.Parameter]) -> None:
    """An address alone needs a server; a client beside an optional one does not."""
    address = named.get("base_url") or named.get("api_key")
    if address is None or ("client" in named and address.default is not address.empty):
        return
    raise WorkflowResolutionError(
        f"{name}.run takes {address.name} without http_client; a bare address needs the gateway, "
        "which this release does not have: take `client` or `http_client` (with base_url) instead"
    )


def _checked(reward: object) -> float:
    try:
        return as_reward(reward)
    except ValueError as error:
        raise RewardError(
            f"{error}; return a number or a dict of interaction id to number"
        ) from None


def _owner(cause: BaseException) -> Boundary:
    """Whose fault an exception that came out of an agent is."""
    if isinstance(cause, openai.APIConnectionError | openai.InternalServerError):
        return "engine"
    return "client" if isinstance(cause, openai.APIError) else "agent"


def _record_episode(client: ArealOpenAI, latency_s: float) -> None:
    """Metrics of one usable episode, tools and judges included in its latency."""
    paths = [each.path for each in client.interactions.values() if each.is_complete]
    stats_tracker.get(workflow_context.stat_scope()).scalar(
        num_turns=len(paths),
        num_sampled_tokens=sum(path.num_output for path in paths),
        num_prompt_tokens=sum(path.num_prompt for path in paths),
        episode_latency_s=latency_s,
    )


def _orphans(client: ArealOpenAI) -> list[InteractionWithTokenLogpReward]:
    record = client.interactions
    assert isinstance(record, InteractionCache), "the client's record"
    return [i for name, i in record.items() if name in record.orphans and i.is_complete]


def _with_reference(
    exported: dict[str, InteractionWithTokenLogpReward],
) -> dict[str, InteractionWithTokenLogpReward]:
    """The terminal reward becomes the episode's reference, unless the agent gave one."""
    if not exported:
        raise EpisodeRejectedError("no complete interaction was recorded", reason="no_model_call")
    terminal = list(exported.values())[-1].reward
    assert terminal is not None, "discounting gives every interaction a reward"
    stats_tracker.get(workflow_context.stat_scope()).scalar(reward=terminal)
    if all(interaction.rollout_reward is None for interaction in exported.values()):
        for interaction in exported.values():
            interaction.rollout_reward = terminal
    return exported
