"""``parallel``."""

from __future__ import annotations

from pydantic import Field, model_validator

from agent_rl.config.section import Section


class ParallelConfig(Section):
    """parallel: training in several processes, as many as ``torchrun`` starts."""

    reshard_after_forward: bool = Field(
        True, description="true: whole layers exist only while they compute; false: less traffic"
    )
    sequence_parallel_size: int = Field(1, description="1: a row is never divided")

    @model_validator(mode="after")
    def _rows_are_whole(self) -> ParallelConfig:
        if self.sequence_parallel_size != 1:
            raise ValueError(
                f"sequence_parallel_size={self.sequence_parallel_size}: sequence parallelism is "
                "out of scope; leave it at 1 and lower actor.max_tokens_per_mb"
            )
        return self
