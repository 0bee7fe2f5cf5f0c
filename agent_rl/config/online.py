"""``online``: learning from the conversations that the gateway serves."""

from __future__ import annotations

import math
import time
from typing import Literal, TypeAlias

from pydantic import Field, model_validator

from agent_rl.config.section import LimitS, Section, TimeoutS

Method: TypeAlias = Literal["binary", "opd", "combine"]

_S_PER_DAY = 86_400.0


class JudgeConfig(Section):
    """online.judge: the model that judges turns and writes hints."""

    base_url: str | None = Field(
        None, description="OpenAI-compatible endpoint; null: the policy's own engine"
    )
    api_key: str | None = Field(
        None, repr=False, description="of the endpoint; null: it asks for none"
    )
    model: str = Field("default", description="name that the endpoint knows the judge by")
    votes: int = Field(3, ge=1, description="answers of which the majority decides; a tie is 0")
    temperature: float = Field(0.6, ge=0.0, description="of votes and hints; 0: greedy")
    max_tokens: int | None = Field(
        1024, ge=1, description="of one vote; null: what the context leaves"
    )
    timeout_s: TimeoutS = Field(300.0, description="of one vote with its retries; null: no limit")
    max_retries: int = Field(2, ge=0, description="of one vote")
    max_concurrent: int = Field(8, ge=1, description="votes asked for at the same time")
    turn_prompt: str | None = Field(None, description="file in place of prompts/turn_judge.txt")
    hint_prompt: str | None = Field(None, description="file in place of prompts/hint.txt")
    cost_per_million_input_tokens: float = Field(0.0, ge=0.0, description="of prompts")
    cost_per_million_output_tokens: float = Field(0.0, ge=0.0, description="of answers")
    max_cost: float | None = Field(
        None, gt=0.0, description="judging stops when it has cost this much; serving goes on"
    )
    max_tokens_in_all: int | None = Field(
        None, ge=1, description="judging stops after so many tokens, prompts included"
    )

    @model_validator(mode="after")
    def _cost_needs_a_price(self) -> JudgeConfig:
        is_free = self.cost_per_million_input_tokens == self.cost_per_million_output_tokens == 0.0
        if self.max_cost is not None and is_free:
            raise ValueError("max_cost needs cost_per_million_input_tokens or _output_tokens")
        return self


class PrivacyConfig(Section):
    """online.privacy: what of the conversations is written to disk, and for how long."""

    redact: bool = Field(
        True, description="mask e-mail addresses, phone and card numbers and keys before writing"
    )
    keep_days: float | None = Field(None, gt=0.0, description="older turns are deleted; null: none")
    keep_rows: int | None = Field(None, ge=1, description="so many turns are kept; null: all")

    def oldest_s(self) -> float:
        """The time of the oldest turn that may still be kept now; -inf: any."""
        return -math.inf if self.keep_days is None else time.time() - self.keep_days * _S_PER_DAY


class OnlineConfig(Section):
    """online: what is learnt from served conversations, and how."""

    method: Method = Field(
        "binary", description="binary: a judge's score; opd: hints distilled; combine: both"
    )
    update_mode: Literal["live", "gate"] = Field(
        "live", description="live: serving goes on while weights change; gate: 503 meanwhile"
    )
    queue_size: int = Field(1024, ge=1, description="samples that may wait for the trainer")
    max_staleness: int | None = Field(
        None, ge=0, description="versions that a waiting sample may be old; null: any number"
    )
    no_progress_warning_s: LimitS = Field(30.0, description="of a batch that does not fill")
    min_hint_chars: int = Field(11, ge=1, description="a shorter hint is not accepted")
    teacher_max_concurrent: int = Field(3, ge=1, description="sequences the teacher scores at once")
    record_turns: bool = Field(
        True, description="write each judged turn to turns.jsonl, and what waits to samples.journal"
    )
    judge: JudgeConfig = JudgeConfig()
    privacy: PrivacyConfig = PrivacyConfig()
