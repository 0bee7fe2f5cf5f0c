"""All config models, and how a config is read: YAML file, then ``key=value`` overrides.

Every section is frozen, every field has its line, unknown keys and values out of range raise
ConfigError naming the key and the nearest valid one. Config is read at construction only.

    config = load_config("ppo.yaml", ["rollout.group_size=4", "actor.optimizer.lr=2e-5"])
"""

from agent_rl.config.actor import (
    ActorConfig,
    Aggregation,
    DistillationConfig,
    KLEstimator,
    LoraConfig,
    NormConfig,
    OptimizerConfig,
    RejectionSamplingConfig,
)
from agent_rl.config.critic import CriticConfig
from agent_rl.config.engine import EngineConfig, LaunchConfig
from agent_rl.config.gateway import GatewayConfig
from agent_rl.config.load import load_config
from agent_rl.config.online import JudgeConfig, Method, OnlineConfig, PrivacyConfig
from agent_rl.config.parallel import ParallelConfig
from agent_rl.config.ppo import EvaluatorConfig, PPOConfig, RecoverConfig, StepsConfig
from agent_rl.config.reference import RefConfig
from agent_rl.config.rollout import AgentConfig, BudgetConfig, RayConfig, RolloutConfig
from agent_rl.config.section import Dtype, FolderName, Fsync, Section, TimeoutS
from agent_rl.config.stats import (
    StatsLoggerConfig,
    SwanLabConfig,
    TensorBoardConfig,
    TrackioConfig,
    WandbConfig,
)

__all__ = [
    "ActorConfig",
    "AgentConfig",
    "Aggregation",
    "BudgetConfig",
    "CriticConfig",
    "DistillationConfig",
    "Dtype",
    "EngineConfig",
    "EvaluatorConfig",
    "FolderName",
    "Fsync",
    "GatewayConfig",
    "JudgeConfig",
    "KLEstimator",
    "LaunchConfig",
    "LoraConfig",
    "Method",
    "NormConfig",
    "OnlineConfig",
    "OptimizerConfig",
    "PPOConfig",
    "ParallelConfig",
    "PrivacyConfig",
    "RayConfig",
    "RecoverConfig",
    "RefConfig",
    "RejectionSamplingConfig",
    "RolloutConfig",
    "Section",
    "StatsLoggerConfig",
    "StepsConfig",
    "SwanLabConfig",
    "TensorBoardConfig",
    "TimeoutS",
    "TrackioConfig",
    "WandbConfig",
    "load_config",
]
