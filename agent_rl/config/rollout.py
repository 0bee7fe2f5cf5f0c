"""``rollout`` and ``rollout.agent``."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from agent_rl.config.section import ChatSection, Fsync, LimitS, Section, TimeoutS
from agent_rl.types import ExportStyle


class RayConfig(Section):
    """rollout.agent.ray: for mode ray."""

    address: str | None = Field(
        None,
        description="of a running Ray cluster, or auto; null: the one that this process belongs "
        "to, else a new one on this machine",
    )
    connect_timeout_s: LimitS = Field(120.0, description="how long Ray may take to be ready")
    num_actors: int = Field(4, ge=1, description="episodes at a time, each in an actor")
    cpus_per_actor: float = Field(
        1.0, ge=0, description="that a running cluster (address) sets aside for each"
    )
    gateway_host: str = Field(
        "127.0.0.1", description="this machine's address, as the actors' machines reach it"
    )


class AgentConfig(ChatSection):
    """rollout.agent: how an agent (``async def run``) becomes an episode."""

    mode: Literal["inline", "subproc", "ray", "online"] = Field(
        "inline",
        description="where agents run: on the event loop; each episode in a process of its own; "
        "in Ray actors; outside, calling the gateway",
    )
    ray: RayConfig = RayConfig()
    subproc_max_workers: int = Field(4, ge=1, description="processes at a time, mode subproc")
    export_style: ExportStyle = Field(
        "individual", description="one row per interaction, or concat: one per leaf path"
    )
    turn_discount: float = Field(
        1.0, ge=0.0, le=1.0, description="carries a later interaction's reward back"
    )
    max_requests: int | None = Field(
        64, gt=0, description="model calls one episode may make; null is no limit"
    )
    on_agent_error: Literal["drop", "zero", "keep"] = Field(
        "drop",
        description="an agent that raises: drop its turns, use them with a last reward of 0, or "
        "keep the rewards that were set",
    )

    @model_validator(mode="after")
    def _concat_needs_concat(self) -> AgentConfig:
        if self.export_style == "concat" and self.chat_template_type != "concat":
            raise ValueError(
                "export_style=concat needs chat_template_type=concat, so that each prompt extends "
                "the ids of its parent"
            )
        return self


class BudgetConfig(Section):
    """rollout.budget: what one episode may use. One that needs more is truncated: no failure, its
    turns are trained on."""

    max_turns: int | None = Field(None, ge=1, description="answers of the model")
    max_tokens: int | None = Field(None, ge=1, description="sampled tokens of all answers")
    max_tool_calls: int | None = Field(
        None, ge=0, description="tool calls in its answers; agents only"
    )
    reward: float | None = Field(
        0.0,
        description="last reward of a truncated episode whose agent gave none; null: it is "
        "rejected",
    )

    @model_validator(mode="after")
    def _reward_is_of_a_limit(self) -> BudgetConfig:
        if not self.is_limited:
            self.refuse_idle("reward", need="max_turns, max_tokens or max_tool_calls")
        return self

    @property
    def is_limited(self) -> bool:
        return any(
            limit is not None for limit in (self.max_turns, self.max_tokens, self.max_tool_calls)
        )


class RolloutConfig(Section):
    """rollout: how episodes are collected."""

    group_size: int = Field(1, ge=1, description="episodes per datum that share a baseline")
    drop_incomplete_group: bool = Field(
        False, description="one unusable episode makes the whole group unusable"
    )
    reward_normalization: bool = Field(
        False, description="rewards of interactions become (reward - group mean) / group std"
    )
    reward_normalization_use_std: bool = Field(True, description="false: only subtract the mean")
    consumer_batch_size: int = Field(8, ge=1, description="groups in one training batch")
    max_concurrent_rollouts: int | None = Field(
        None, ge=1, description="groups running at once; null: consumer_batch_size"
    )
    max_head_offpolicyness: int = Field(
        0, ge=0, description="versions that collection may run ahead of training; 0: synchronous"
    )
    queue_size: int | None = Field(
        None, ge=1, description="groups that submit() lets wait; null: 16 max_concurrent_rollouts"
    )
    episode_timeout_s: TimeoutS = Field(600.0, description="deadline of one episode; null: none")
    on_error: Literal["reject", "raise"] = Field(
        "reject", description="reject: a failed episode costs its own sample; raise: stop"
    )
    journal: bool = Field(
        False, description="finished groups are on disk before they count; see guides/workflows"
    )
    journal_fsync: Fsync = Field(
        "always", description="never: a power failure, but no crash of the process, may lose some"
    )
    dump_to_file: bool = Field(False, description="write every trajectory as JSON lines")
    fileroot: str | None = Field(
        None, description="folder of dump and journal; null: the run's folder"
    )
    tokenizer_path: str | None = Field(
        None, description="of agents and of the dump; null: the top tokenizer_path"
    )
    agent: AgentConfig = AgentConfig()
    budget: BudgetConfig = BudgetConfig()

    @model_validator(mode="after")
    def _no_parameter_of_what_is_off(self) -> RolloutConfig:
        if not self.reward_normalization:
            self.refuse_idle("reward_normalization_use_std", need="reward_normalization=true")
        if not self.journal:
            self.refuse_idle("journal_fsync", need="journal=true")
        if not (self.journal or self.dump_to_file):
            self.refuse_idle("fileroot", need="journal=true or dump_to_file=true")
        return self

    @model_validator(mode="after")
    def _budget_comes_before_the_safety_net(self) -> RolloutConfig:
        turns, requests = self.budget.max_turns, self.agent.max_requests
        if turns is not None and requests is not None and requests <= turns:
            raise ValueError(
                f"rollout.budget.max_turns={turns} is never reached: after "
                f"rollout.agent.max_requests={requests} calls the episode fails; raise max_requests"
            )
        return self
