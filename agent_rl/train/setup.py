"""What a run starts from: its folder, rows, model and engine, as the config names them.

Everything that can be wrong with the input is found here, before anything is trained.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import yaml

from agent_rl.config import AgentConfig, PPOConfig
from agent_rl.engine.base import InferenceEngine
from agent_rl.engine.loading import load_model
from agent_rl.engine.local import LocalEngine
from agent_rl.errors import CheckpointError, ConfigError
from agent_rl.record.dump import TrajectoryDump
from agent_rl.stats.redact import redact_sensitive_config
from agent_rl.tokens.certify import certify
from agent_rl.train.dataset import load_rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from agent_rl.types import JsonObject

logger = logging.getLogger(__name__)

Dataset = str | Path | Iterable[Mapping[str, object]]


def run_dir(config: PPOConfig, fileroot: str | None = None) -> Path:
    return Path(fileroot or config.fileroot) / config.experiment_name / config.trial_name


def dataset_rows(key: str, given: Dataset | None, configured: str | None) -> list[JsonObject]:
    if given is not None and configured is not None:
        raise ConfigError(f"{key} is both an argument and a config key; give one")
    source = given if given is not None else configured
    return [] if source is None else load_rows(source)


def model_path(config: PPOConfig) -> str:
    path = config.actor.path or config.tokenizer_path
    if not path:
        raise ConfigError("set tokenizer_path (or actor.path): the folder of the model to train")
    return path


def min_usable_group_size(config: PPOConfig) -> int:
    """2 where a group's mean or std is used: such statistics need two observations.

    ``actor.min_usable_group_size`` wins; with a target of one episode, one is complete.

    Raises:
        ConfigError: the explicit value is above the target, or below 2 with group statistics.
    """
    actor, target = config.actor, config.rollout.group_size
    explicit = actor.min_usable_group_size
    norms = [norm for norm in (actor.reward_norm, actor.adv_norm) if norm is not None]
    floor = 2 if any(norm.uses_group_statistics for norm in norms) else 1
    if explicit is None:
        return min(floor, target)
    if explicit > target:
        raise ConfigError(
            f"actor.min_usable_group_size={explicit} is above rollout.group_size={target}"
        )
    if explicit < floor:
        raise ConfigError(
            f"actor.min_usable_group_size={explicit} must be at least 2 with group statistics in "
            "actor.reward_norm or actor.adv_norm"
        )
    return explicit


def engine_and_model(
    config: PPOConfig, tokenizer: PreTrainedTokenizerBase, engine: InferenceEngine | None
) -> tuple[InferenceEngine, Any]:
    if isinstance(engine, LocalEngine):
        return engine, engine.model
    device = config.actor.device or ("cuda" if torch.cuda.is_available() else "cpu")
    model = load_model(
        model_path(config),
        device=torch.device(device),
        dtype=getattr(torch, config.actor.dtype),
    )
    if engine is not None:
        return engine, model
    limits = config.engine
    return (
        LocalEngine(
            model,
            tokenizer,
            max_batch_size=limits.max_batch_size,
            max_seq_len=limits.max_seq_len,
        ),
        model,
    )


def write_config(config: PPOConfig, folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tree = redact_sensitive_config(config.model_dump(mode="json"))
        text = yaml.safe_dump(tree, sort_keys=False)
        (folder / "config.yaml").write_text(text, encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"cannot write the run's folder {folder}: {error}") from error


def trajectory_dump(config: PPOConfig, tokenizer: PreTrainedTokenizerBase) -> TrajectoryDump | None:
    """What ``rollout.dump_to_file`` asks for; into the run's folder by default."""
    if not config.rollout.dump_to_file:
        return None
    return TrajectoryDump(run_dir(config, config.rollout.fileroot), tokenizer.decode)


def report_certification(tokenizer: PreTrainedTokenizerBase, agent: AgentConfig) -> None:
    """Say at start-up what this tokenizer and template can do exactly."""
    certification = certify(
        tokenizer,
        tool_call_parser=agent.tool_call_parser,
        reasoning_parser=agent.reasoning_parser,
    )
    logger.info("%s", certification.summary())
    if agent.chat_template_type == "concat" and not certification.is_multi_turn_exact:
        logger.warning(
            "rollout.agent.chat_template_type=concat, but this chat template has no exact next "
            "turn (%s): later turns start new branches",
            certification.feature("multi-turn").reason,
        )
