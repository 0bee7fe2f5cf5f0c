"""agent_rl: swap one client and any LLM agent becomes trainable.

Public names are imported on first use, so that ``import agent_rl`` loads neither torch nor
transformers.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_MODULES = {
    "stats_tracker": "agent_rl.stats.tracker",
    "workflow_context": "agent_rl.workflow_context",
}
_NAMES = {
    "agent_rl.client.areal_openai": ["ArealOpenAI"],
    "agent_rl.config": ["GatewayConfig", "PPOConfig", "load_config"],
    "agent_rl.engine.base": ["InferenceEngine", "WeightUpdate"],
    "agent_rl.engine.local": ["LocalEngine"],
    "agent_rl.engine.scripted": ["ScriptedEngine"],
    "agent_rl.engine.small_model": ["small_model"],
    "agent_rl.errors": ["AgentRLError"],
    "agent_rl.gateway.server": ["Gateway"],
    "agent_rl.record.interaction": ["InteractionWithTokenLogpReward"],
    "agent_rl.rollout.executor": ["RolloutEngine"],
    "agent_rl.rollout.group": ["GroupedRolloutWorkflow"],
    "agent_rl.rollout.workflow": ["RolloutWorkflow"],
    "agent_rl.stats.logger": ["FinetuneSpec", "StatsLogger"],
    "agent_rl.stats.tracker": ["ReduceType"],
    "agent_rl.train.trainer": ["PPOTrainer"],
    "agent_rl.types": [
        "GenerationConfig",
        "ModelRequest",
        "ModelResponse",
        "RolloutGroup",
        "TokenDelta",
        "TrajBatchMeta",
    ],
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names}

__all__ = sorted([*_HOMES, *_MODULES, "__version__"])


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'agent_rl' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
