"""Teacher: the policy with a hint in its prompt, asked how likely the answer is that was sampled.

    teacher ids = template(messages with the hint) + the sampled ids, as they were sampled

The sampled ids are never decoded and encoded again: index i of the result is about sampled token i.
Log-probs are stated under the temperature that the token was sampled with, like the policy's own.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

from agent_rl.api.session import Session
from agent_rl.engine.base import ScoringEngine
from agent_rl.errors import ConfigError, ContextLengthError, TokenError
from agent_rl.online.hints import teacher_messages
from agent_rl.record.interaction import InteractionWithTokenLogpReward

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherScores:
    """One entry for each sampled token; ``top`` only where it was asked for."""

    logprobs: tuple[float, ...]
    top: tuple[tuple[tuple[int, float], ...], ...] | None = None


class Teacher:
    """
    Args:
        engine: scores the ids; the policy's own.
        top_k: also the most likely tokens of each place; 0: none.

    Raises:
        ConfigError: the engine cannot score ids.
    """

    def __init__(self, engine: object, *, top_k: int = 0, max_concurrent: int = 3) -> None:
        if not isinstance(engine, ScoringEngine):
            raise ConfigError(
                f"online.method opd and combine need an engine that scores given ids, which "
                f"{type(engine).__name__} does not; use method=binary or the embedded engine"
            )
        self._engine = engine
        self._top_k = top_k
        self._slots = asyncio.Semaphore(max_concurrent)

    async def scores(
        self, session: Session, interaction: InteractionWithTokenLogpReward, hint: str
    ) -> TeacherScores | None:
        """None, with a warning, when the hint does not fit: into the template or the context.

        Raises:
            EngineError: the engine is closed or broke down.
        """
        sampled = tuple(interaction.path.output)
        messages = teacher_messages(interaction.messages, hint)
        try:
            prompt = session.format.render(
                messages, interaction.tools, interaction.chat_template_kwargs
            )
            return await self._score(prompt + sampled, len(sampled), interaction.temperature)
        except (TokenError, ContextLengthError) as error:
            logger.warning("turn %s has no teacher: %s", interaction.interaction_id, error)
            return None

    async def _score(
        self, ids: tuple[int, ...], num_sampled: int, temperature: float
    ) -> TeacherScores:
        engine = self._engine
        async with self._slots:
            logprobs = await engine.score(ids, num_sampled, temperature=temperature)
            top = None
            if self._top_k:
                top = await engine.score_top(ids, num_sampled, self._top_k, temperature=temperature)
        return TeacherScores(logprobs=logprobs, top=top)
