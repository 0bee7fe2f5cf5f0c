"""The whole config of a training run."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from agent_rl.config.actor import ActorConfig
from agent_rl.config.critic import CriticConfig
from agent_rl.config.engine import EngineConfig
from agent_rl.config.gateway import GatewayConfig
from agent_rl.config.online import OnlineConfig
from agent_rl.config.parallel import ParallelConfig
from agent_rl.config.reference import RefConfig
from agent_rl.config.rollout import RolloutConfig
from agent_rl.config.section import FolderName, Section
from agent_rl.config.stats import StatsLoggerConfig
from agent_rl.types import GenerationConfig

_OF_A_REQUEST = {
    "n_samples": "the episodes of a datum are rollout.group_size",
    "seed": "every episode of a group would sample the same; the run's own is seed",
    "top_logprobs": "an agent that wants them sends top_logprobs with its request",
}


class StepsConfig(Section):
    """saver, recover and evaluator: how often; whichever is due first. All null: never."""

    freq_epochs: int | None = Field(None, ge=1, description="every so many epochs")
    freq_steps: int | None = Field(None, ge=1, description="every so many steps")
    freq_secs: float | None = Field(None, gt=0, description="after so many seconds")


class EvaluatorConfig(StepsConfig):
    """evaluator."""

    eval_before_train: bool = Field(False, description="evaluate once before the first step")


class RecoverConfig(StepsConfig):
    """recover: the state in {run folder}/recover that a restarted run goes on from.

    It is also written at Ctrl-C, SIGTERM and the end.
    """

    mode: Literal["off", "auto"] = Field(
        "off", description="auto: write the state, and go on from it where there is one"
    )
    freq_secs: float | None = Field(600.0, gt=0, description="after so many seconds")

    @model_validator(mode="after")
    def _is_on_where_it_has_a_frequency(self) -> RecoverConfig:
        if self.mode == "off":
            self.refuse_idle("freq_epochs", "freq_steps", "freq_secs", need="mode=auto")
        return self


class PPOConfig(Section):
    """The config of ``PPOTrainer``."""

    experiment_name: FolderName = Field(
        "agent_rl", min_length=1, description="name of runs that belong together"
    )
    trial_name: FolderName = Field(
        "trial", description="name of this run; empty: no folder of its own"
    )
    fileroot: str = Field(
        "runs", description="the run is written to {fileroot}/{experiment_name}/{trial_name}"
    )
    seed: int = Field(1, description="of data order, sampling and training")
    total_train_epochs: int = Field(1, ge=1, description="passes over train_dataset")
    total_train_steps: int | None = Field(
        None, ge=1, description="steps, each one batch; null: by epochs"
    )
    tokenizer_path: str = Field(
        "", description="Hugging Face folder of model and tokenizer; needed"
    )
    gconfig: GenerationConfig = Field(
        GenerationConfig(), description="sampling, where an agent's request says nothing"
    )
    eval_gconfig: GenerationConfig | None = Field(None, description="null: greedy gconfig")
    rollout: RolloutConfig = RolloutConfig()
    engine: EngineConfig = EngineConfig()
    actor: ActorConfig = ActorConfig()
    parallel: ParallelConfig = ParallelConfig()
    critic: CriticConfig | None = Field(None, description="null: no critic")
    ref: RefConfig | None = Field(None, description="null: the actor's start, where one is needed")
    gateway: GatewayConfig = GatewayConfig()
    online: OnlineConfig = OnlineConfig()
    train_dataset: str | None = Field(None, description="JSONL or Parquet file")
    valid_dataset: str | None = Field(None, description="JSONL or Parquet file")
    saver: StepsConfig = StepsConfig()
    recover: RecoverConfig = RecoverConfig()
    evaluator: EvaluatorConfig = EvaluatorConfig()
    stats_logger: StatsLoggerConfig = StatsLoggerConfig()

    @model_validator(mode="after")
    def _sampling_is_of_a_run(self) -> PPOConfig:
        for name in ("gconfig", "eval_gconfig"):
            given = getattr(self, name) or GenerationConfig()
            for option, reason in _OF_A_REQUEST.items():
                if (value := getattr(given, option)) != getattr(GenerationConfig(), option):
                    raise ValueError(f"{name}.{option}={value} is of no use to a run: {reason}")
        return self

    @model_validator(mode="after")
    def _journal_needs_recovery(self) -> PPOConfig:
        if self.rollout.journal and self.recover.mode == "off":
            raise ValueError(
                "rollout.journal=true needs recover.mode=auto: only the state of a run says which "
                "groups of the journal are trained"
            )
        return self
