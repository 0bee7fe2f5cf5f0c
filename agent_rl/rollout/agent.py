"""AgentWorkflow: an ordinary agent, anything with ``run(self, data, ...)``, as a workflow.

Each episode has its own client, so its own record; a class also gets a fresh instance for each
episode. Where it runs is the mode: inline.py on the event loop, child.py in a process of its own,
ray_pool.py in a Ray actor.
What ``run`` returns:

    a number                  the reward of the last interaction; others set before stay
    {interaction_id: number}  rewards by id
    None                      rewards were set through the client or session
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from agent_rl import workflow_context
from agent_rl.client.areal_openai import ArealOpenAI
from agent_rl.config import AgentConfig, BudgetConfig
from agent_rl.engine.base import InferenceEngine
from agent_rl.errors import (
    EpisodeError,
    EpisodeRejectedError,
    RewardError,
    WorkflowResolutionError,
)
from agent_rl.record.cache import InteractionCache
from agent_rl.record.interaction import InteractionWithTokenLogpReward
from agent_rl.record.reward import as_reward
from agent_rl.rollout.budget import BudgetedEngine
from agent_rl.rollout.child import ChildAgent
from agent_rl.rollout.doors import Doors
from agent_rl.rollout.episode import Exported
from agent_rl.rollout.inline import InlineAgent
from agent_rl.rollout.order import AgentSource
from agent_rl.rollout.ray_pool import RayAgent, RayPool
from agent_rl.rollout.workflow import RolloutWorkflow
from agent_rl.stats import tracker as stats_tracker
from agent_rl.types import GenerationConfig, JsonObject

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSettings:
    """What the client of an agent is made of, and what agents share that need a port."""

    tokenizer: PreTrainedTokenizerBase | None
    gconfig: GenerationConfig | None = None
    config: AgentConfig = field(default_factory=AgentConfig)
    doors: Doors | None = None
    workers: asyncio.Semaphore | None = None
    actors: RayPool | None = None

    async def close(self) -> None:
        """When no episode runs any more."""
        if self.doors is not None:
            await self.doors.close()
        if self.actors is not None:
            self.actors.close()


def agent_settings(
    config: AgentConfig,
    tokenizer: PreTrainedTokenizerBase | None,
    gconfig: GenerationConfig | None,
    eval_gconfig: GenerationConfig | None,
    doors: Doors,
) -> dict[bool, AgentSettings]:
    """Those of training and of evaluation, by ``is_eval``.

    Under mode online only evaluation runs agents here: on the event loop.
    """
    workers = asyncio.Semaphore(config.subproc_max_workers)
    actors = RayPool(config.ray)
    eval_mode = "inline" if config.mode == "online" else config.mode
    modes = {False: config, True: config.model_copy(update={"mode": eval_mode})}
    sampling = {False: gconfig, True: eval_gconfig or gconfig}
    return {
        is_eval: AgentSettings(
            tokenizer=tokenizer,
            gconfig=sampling[is_eval],
            config=modes[is_eval],
            doors=doors,
            workers=workers,
            actors=actors,
        )
        for is_eval in (False, True)
    }


class Runner(Protocol):
    """Runs the agent on one datum with the episode's client."""

    async def run(self, client: ArealOpenAI, data: JsonObject) -> object: ...


class AgentWorkflow(RolloutWorkflow):
    """
    Args:
        agent: a class, constructed with ``kwargs`` for each episode, or an instance for all.

    Raises:
        WorkflowResolutionError: the mode cannot run it, or ``run`` needs what cannot be passed.
    """

    def __init__(
        self,
        agent: object,
        kwargs: Mapping[str, Any] | None = None,
        *,
        settings: AgentSettings,
    ) -> None:
        name = agent.__qualname__ if isinstance(agent, type) else type(agent).__qualname__
        if settings.tokenizer is None:
            raise WorkflowResolutionError(
                f"the agent {name} needs a client, and that a tokenizer: give "
                "RolloutEngine(..., tokenizer=)"
            )
        self._name = name
        self._settings = settings
        self._runner = _runner(agent, kwargs or {}, name, settings)

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
        client.http_client.keep_to_this_episode()
        budgeted = engine if isinstance(engine, BudgetedEngine) else None
        if budgeted is not None:
            budgeted.count_tool_calls = lambda: _num_tool_calls(client)
        error = None
        start_s = time.perf_counter()
        try:
            returned = await self._runner.run(client, data)
        except EpisodeError as raised:
            if budgeted is not None and budgeted.is_truncated:
                returned = _reward_of_truncated(client, budgeted.budget, raised)
            elif config.on_agent_error == "drop" or not client.interactions:
                raise
            else:
                error, returned = raised, 0.0 if config.on_agent_error == "zero" else None
        if not client.interactions:
            raise EpisodeRejectedError(
                f"{self._name} finished without one recorded model call: all its calls failed, "
                "were not awaited, or it used another client than the one it was given (made from "
                "OPENAI_BASE_URL, or kept from another episode)",
                reason="no_model_call",
            )
        latency_s = time.perf_counter() - start_s
        self._set_rewards(client, returned)
        exported = client.export_interactions(config.export_style, config.turn_discount)
        with_reference = _with_reference(exported)
        _record_episode(client, latency_s)
        return Exported(with_reference, _orphans(client), error)

    def _set_rewards(self, client: ArealOpenAI, returned: object) -> None:
        if isinstance(returned, Mapping):
            for interaction_id, reward in returned.items():
                if interaction_id not in client.interactions:
                    raise RewardError(
                        f"{self._name} returned a reward for the unknown interaction id "
                        f"{interaction_id!r}; known: {', '.join(client.interactions)}; keys are "
                        "ids of completions: of the parts of one reward return the sum"
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


def _runner(agent: object, kwargs: Mapping[str, Any], name: str, settings: AgentSettings) -> Runner:
    if settings.config.mode == "online":
        raise WorkflowResolutionError(
            f"rollout.agent.mode=online runs no agent here, but {name} was given: leave workflow "
            "out, or set rollout.agent.mode=inline"
        )
    if settings.config.mode == "inline":
        return InlineAgent(agent, kwargs, name, settings.doors)
    if settings.doors is None or settings.workers is None or settings.actors is None:
        raise WorkflowResolutionError(
            f"rollout.agent.mode={settings.config.mode} needs a RolloutEngine"
        )
    source = AgentSource.of(agent, kwargs, name, settings.config.mode)
    if settings.config.mode == "ray":
        return RayAgent(source, settings.doors, settings.actors)
    return ChildAgent(source, settings.doors, settings.workers)


def _num_tool_calls(client: ArealOpenAI) -> int:
    return sum(
        len(message.get("tool_calls") or ())
        for interaction in client.interactions.values()
        for message in interaction.output_message_list
    )


def _reward_of_truncated(
    client: ArealOpenAI, budget: BudgetConfig, error: EpisodeError
) -> float | None:
    """What stands in for the reward that the agent did not come to return.

    Raises:
        EpisodeRejectedError: there is nothing to train on, or no reward for it.
    """
    if client.interactions and any(i.reward is not None for i in client.interactions.values()):
        return None
    if not client.interactions or budget.reward is None:
        raise EpisodeRejectedError(
            f"the episode was truncated by rollout.budget, without a reward: {error}",
            reason="truncated",
        ) from error
    return budget.reward


def _checked(reward: object) -> float:
    try:
        return as_reward(reward)
    except ValueError as error:
        raise RewardError(
            f"{error}; return a number or a dict of interaction id to number"
        ) from None


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
