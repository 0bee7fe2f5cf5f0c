"""``critic``: the model that says what return to expect, for GAE."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from agent_rl.config.actor import OptimizerConfig
from agent_rl.config.section import Dtype, Section


class CriticConfig(Section):
    """critic: absent, there is none, and advantages come from rewards alone."""

    trunk: Literal["separate", "shared"] = Field(
        "separate", description="a model of its own, or a value head on the actor's"
    )
    path: str | None = Field(None, description="folder of its start; null: that of the actor")
    dtype: Dtype = Field("float32", description="of its weights")
    optimizer: OptimizerConfig = Field(
        OptimizerConfig(lr=1e-5), description="of a separate critic; a shared head has the actor's"
    )
    ppo_n_minibatches: int = Field(1, ge=1, description="optimizer steps for one batch")
    max_tokens_per_mb: int = Field(2048, ge=1, description="tokens of one forward pass")
    gradient_checkpointing: bool = Field(False, description="see actor.gradient_checkpointing")
    loss_coef: float = Field(0.5, gt=0.0, description="of the value loss in a shared trunk's loss")
    eps_clip: float = Field(0.5, gt=0.0, description="how far a step may move a value for free")
    huber_delta: float | None = Field(None, gt=0.0, description="null: squared error")

    @model_validator(mode="after")
    def _fields_are_of_the_trunk(self) -> CriticConfig:
        if self.trunk == "separate":
            self.refuse_idle("loss_coef", need="trunk=shared")
        else:
            names = ("path", "dtype", "optimizer", "ppo_n_minibatches", "gradient_checkpointing")
            self.refuse_idle(*names, need="trunk=separate; a shared trunk is the actor's")
        return self
