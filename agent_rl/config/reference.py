"""``ref``: the frozen policy that KL terms compare with."""

from __future__ import annotations

from pydantic import Field

from agent_rl.config.section import Dtype, Section


class RefConfig(Section):
    """ref: used when actor.kl_ctl or actor.kl_loss_coef is above 0."""

    path: str | None = Field(
        None,
        description="its folder; null: where the actor starts, which with actor.lora takes no "
        "memory (its adapters are switched off)",
    )
    dtype: Dtype | None = Field(None, description="null: actor.dtype")
    max_tokens_per_mb: int = Field(4096, ge=1, description="tokens of one forward pass")
