"""``stats_logger`` and its sinks."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import BeforeValidator, Field, model_validator

from agent_rl.config.section import LimitS, Section


def _line_or_off(value: object) -> object:
    """YAML reads ``off`` as false, and ``on`` as true."""
    return {True: "line", False: "off"}[value] if isinstance(value, bool) else value


ConsoleStyle: TypeAlias = Literal["line", "table", "off"]


class TensorBoardConfig(Section):
    """stats_logger.tensorboard."""

    path: str | None = Field(None, description="folder of the event files; null: off")


class WandbConfig(Section):
    """stats_logger.wandb."""

    mode: Literal["online", "offline", "shared", "disabled"] = Field(
        "disabled", description="offline: on this machine; shared: several processes, one run"
    )
    base_url: str | None = Field(None, description="null: WANDB_BASE_URL, else the public service")
    api_key: str | None = Field(None, repr=False, description="null: WANDB_API_KEY or a login")
    entity: str | None = Field(None, description="user or team that owns the run")
    project: str | None = Field(None, description="null: experiment_name")
    name: str | None = Field(None, description="null: trial_name")
    job_type: str | None = Field(None, description="kind of run, to filter by")
    group: str | None = Field(None, description="null: {experiment_name}_{trial_name}")
    notes: str | None = Field(None, description="shown with the run")
    tags: tuple[str, ...] = Field((), description="shown with the run, to filter by")
    id_suffix: str = Field(
        "train",
        min_length=1,
        description="last part of the run's id; timestamp: the time, so every start is a new run",
    )


class SwanLabConfig(Section):
    """stats_logger.swanlab."""

    mode: Literal["cloud", "local", "offline", "disabled"] = Field(
        "disabled", description="local: its dashboard on this machine; offline: files only"
    )
    api_key: str | None = Field(None, repr=False, description="null: SWANLAB_API_KEY or a login")
    project: str | None = Field(None, description="null: experiment_name")
    name: str | None = Field(None, description="null: {trial_name}_train")


class TrackioConfig(Section):
    """stats_logger.trackio."""

    mode: Literal["online", "local", "disabled"] = Field(
        "disabled", description="online: to a Space; local: on this machine"
    )
    project: str | None = Field(None, description="null: experiment_name")
    name: str | None = Field(None, description="null: trial_name")
    space_id: str | None = Field(None, description="the Space of mode online")

    @model_validator(mode="after")
    def _online_needs_a_space(self) -> TrackioConfig:
        if self.mode == "online" and self.space_id is None:
            raise ValueError("mode=online needs space_id; mode=local keeps the run on this machine")
        return self


class StatsLoggerConfig(Section):
    """stats_logger: where metrics go. A sink that fails is reported once and stops nothing."""

    console: Annotated[ConsoleStyle, BeforeValidator(_line_or_off)] = Field(
        "line",
        description="what a run prints. line: what it does, and a line after each step; table: all "
        "metrics too; off: nothing",
    )
    jsonl: bool = Field(True, description="append every step to metrics.jsonl")
    tensorboard: TensorBoardConfig = TensorBoardConfig()
    wandb: WandbConfig = WandbConfig()
    swanlab: SwanLabConfig = SwanLabConfig()
    trackio: TrackioConfig = TrackioConfig()
    close_timeout_s: LimitS = Field(
        15.0, description="how long the end of a run waits for sinks that still send"
    )
