"""JudgeModel: one language model that is asked for verdicts, within a time and a budget.

Any OpenAI-compatible endpoint, or the policy's own engine through ArealOpenAI. A vote that failed
is None, never a guess. Once the budget is used up nothing is asked any more; whoever serves users
does not notice. Nothing that is asked here is recorded in a session.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from openai import AsyncOpenAI, OpenAIError

from agent_rl.client.areal_openai import ArealOpenAI
from agent_rl.config import JudgeConfig
from agent_rl.errors import EngineError
from agent_rl.stats import tracker as stats_tracker

logger = logging.getLogger(__name__)

_MAX_CHARS = 100_000  # of one vote: whatever a judge is told, it may write without end


@dataclass(slots=True, kw_only=True)
class Usage:
    """Totals since the start. ``failed`` votes came to nothing, timed-out ones included."""

    votes: int = 0
    failed: int = 0
    input_tokens: int = 0
    output_tokens: int = 0


class JudgeModel:
    """
    Args:
        client: where the judge is; with ``None`` made from ``config.base_url``.
    """

    def __init__(
        self, client: AsyncOpenAI | None = None, config: JudgeConfig | None = None
    ) -> None:
        self.config = config = config or JudgeConfig()
        self.usage = Usage()
        if client is None:
            client = AsyncOpenAI(base_url=config.base_url, api_key=config.api_key or "none")
        self._client = client.with_options(
            max_retries=config.max_retries, timeout=config.timeout_s or 86_400.0
        )
        # A recording client keeps nothing of what the judge is asked.
        self._extra: dict[str, Any] = {"store": False} if isinstance(client, ArealOpenAI) else {}
        if config.max_tokens is not None:
            self._extra["max_tokens"] = config.max_tokens
        self._slots = asyncio.Semaphore(config.max_concurrent)
        self._has_warned = False

    @property
    def cost(self) -> float:
        """What all votes cost, by the prices of the config."""
        config, usage = self.config, self.usage
        return (
            usage.input_tokens * config.cost_per_million_input_tokens
            + usage.output_tokens * config.cost_per_million_output_tokens
        ) / 1e6

    @property
    def is_exhausted(self) -> bool:
        """Whether the budget is used up; votes already on their way may still exceed it."""
        config, usage = self.config, self.usage
        tokens = usage.input_tokens + usage.output_tokens
        is_over = (config.max_cost is not None and self.cost >= config.max_cost) or (
            config.max_tokens_in_all is not None and tokens >= config.max_tokens_in_all
        )
        if is_over and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "the judge's budget is used up after %d votes (%d tokens, cost %.4g): turns are "
                "served but no longer judged",
                usage.votes,
                tokens,
                self.cost,
            )
        return is_over

    async def votes(self, prompt: str, count: int | None = None) -> Sequence[str | None]:
        """``count`` (default: ``config.votes``) independent answers; None for each that failed."""
        count = self.config.votes if count is None else count
        return await asyncio.gather(*(self._vote(prompt) for _ in range(count)))

    async def close(self) -> None:
        """Close the connections to the judge."""
        await self._client.close()

    async def _vote(self, prompt: str) -> str | None:
        async with self._slots:
            if self.is_exhausted:
                return None
            self.usage.votes += 1
            try:
                async with asyncio.timeout(self.config.timeout_s):
                    return await self._ask(prompt)
            except (OpenAIError, EngineError, TimeoutError) as error:
                self.usage.failed += 1
                stats_tracker.get("online").scalar(judge_vote_failed=1.0)
                logger.warning("a judge vote failed: %s: %s", type(error).__name__, error)
                return None

    async def _ask(self, prompt: str) -> str | None:
        completion = await self._client.chat.completions.create(
            model=self.config.model,
            messages=[{"role": "user", "content": prompt}],
            temperature=self.config.temperature,
            **self._extra,
        )
        if completion.usage is not None:
            self.usage.input_tokens += completion.usage.prompt_tokens
            self.usage.output_tokens += completion.usage.completion_tokens
        text = completion.choices[0].message.content if completion.choices else None
        if text is not None and len(text) > _MAX_CHARS:
            raise EngineError(f"the judge wrote {len(text)} characters; {_MAX_CHARS} are read")
        stats_tracker.get("online").scalar(judge_vote_failed=0.0)
        return text
