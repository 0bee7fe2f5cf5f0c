"""RolloutWorkflow: the low-level way to run one episode, and what a workflow may return.

An agent (``async def run``) is the usual way; agent.py wraps it into this class.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeAlias

from agent_rl.engine.base import InferenceEngine
from agent_rl.types import JsonObject, TensorDict

if TYPE_CHECKING:
    from agent_rl.record.interaction import InteractionWithTokenLogpReward

WorkflowReturn: TypeAlias = "TensorDict | Mapping[str, InteractionWithTokenLogpReward] | None"


class RolloutWorkflow(ABC):
    """Tokenise the prompt, call the engine, compute the reward, return the rows."""

    @abstractmethod
    async def arun_episode(self, engine: InferenceEngine, data: JsonObject) -> WorkflowReturn:
        """Run one episode on one datum.

        Returns:
            Rows as tensors (``input_ids`` and ``attention_mask`` are [B, S]; docs/guides/workflows
            has the other keys), or interactions by id as the client exports them, or None: the
            episode is rejected and never trained on.
        """
