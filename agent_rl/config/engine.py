"""``engine``."""

from __future__ import annotations

from pydantic import Field

from agent_rl.config.section import Section


class EngineConfig(Section):
    """engine: the embedded engine; it shares the actor's parameters, device and dtype."""

    max_batch_size: int = Field(32, ge=1, description="sequences decoded together")
    max_seq_len: int = Field(2048, ge=8, description="prompt and completion tokens of a sequence")
