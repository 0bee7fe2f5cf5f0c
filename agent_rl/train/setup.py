"""What a run starts from: its folder, rows, model and engine, as the config names them.

Everything that can be wrong with the input is found here, before anything is trained.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from agent_rl.api.sampling import refuse_unsupported
from agent_rl.config import AgentConfig, PPOConfig, RefConfig
from agent_rl.engine.base import InferenceEngine
from agent_rl.engine.connect import connect_engine
from agent_rl.engine.loading import end_ids, load_model
from agent_rl.engine.local import LocalEngine
from agent_rl.engine.small_model import model_folder
from agent_rl.engine.weights import WeightPublisher
from agent_rl.errors import ConfigError
from agent_rl.online.service import OnlineService
from agent_rl.record.dump import TrajectoryDump
from agent_rl.rollout.executor import RolloutEngine
from agent_rl.stats.logger import FinetuneSpec, StatsLogger
from agent_rl.tokens.certify import certify
from agent_rl.train.actor import Actor
from agent_rl.train.critic import Critic
from agent_rl.train.dataset import Dataset, load_rows
from agent_rl.train.health import ZERO_ADVANTAGES, FaultWatch
from agent_rl.train.lora import add_adapters
from agent_rl.train.recover import Recovery, Stateful
from agent_rl.train.reference import Reference
from agent_rl.train.replica import Replica
from agent_rl.train.team import Team

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from agent_rl.types import GenerationConfig, JsonObject

logger = logging.getLogger(__name__)


def run_dir(config: PPOConfig, fileroot: str | None = None) -> Path:
    return Path(fileroot or config.fileroot) / config.experiment_name / config.trial_name


def dataset_rows(key: str, given: Dataset | None, configured: str | None) -> list[JsonObject]:
    if given is not None and configured is not None:
        raise ConfigError(f"{key} is both an argument and a config key; give one")
    source = given if given is not None else configured
    return [] if source is None else load_rows(source)


def training_rows(config: PPOConfig, given: Dataset | None, *, is_online: bool) -> list[JsonObject]:
    """
    Raises:
        ConfigError: there are none, and no users give them.
    """
    rows = dataset_rows("train_dataset", given, config.train_dataset)
    if not rows and not is_online:
        raise ConfigError("there is no train_dataset: give PPOTrainer one or set the key")
    return rows or [{}] * config.rollout.consumer_batch_size  # online, an epoch is one step


def validation_rows(config: PPOConfig, given: Dataset | None) -> list[JsonObject]:
    """
    Raises:
        ConfigError: there are none, and the evaluator is to use them.
    """
    rows = dataset_rows("valid_dataset", given, config.valid_dataset)
    asked = [name for name, value in config.evaluator if value]
    if asked and not rows:
        raise ConfigError(
            f"evaluator.{asked[0]} has no effect: there is no valid_dataset; give PPOTrainer one "
            "or set the key"
        )
    return rows


def model_name(config: PPOConfig) -> str:
    """Empty: the model is that of an engine which is given."""
    return config.actor.path or config.tokenizer_path


def model_path(config: PPOConfig) -> str:
    path = model_name(config)
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


def watch_faults(config: PPOConfig, actor: Actor, *, is_online: bool) -> FaultWatch:
    """Says at once where no reward can teach, so that it is not said after each step."""
    is_alone = config.rollout.group_size == 1 and not is_online
    if is_alone and actor.estimator.warn_of_singletons():
        return FaultWatch(known=[ZERO_ADVANTAGES])
    return FaultWatch()


@dataclass(frozen=True, slots=True, kw_only=True)
class Workflows:
    """What ``PPOTrainer.train`` was asked to run, as arguments of ``RolloutEngine``."""

    train: dict[str, Any]
    eval: dict[str, Any]


def join_team(config: PPOConfig) -> Team:
    """
    Raises:
        ConfigError: an option that trains in one process only.
    """
    team = Team.join(_device(config), reshards=config.parallel.reshard_after_forward)
    one_process_only = {"lora": config.actor.lora is not None, "compile": config.actor.compile}
    for name, is_on in one_process_only.items():
        if is_on and team.size > 1:
            raise ConfigError(f"actor.{name} trains in one process; torchrun started {team.size}")
    return team


def model_to_train(config: PPOConfig, engine: InferenceEngine | None, team: Team) -> Any:
    """That of a LocalEngine of the user's where one process does both, else from the folder.

    Raises:
        ConfigError: adapters, which such an engine does not sample with.
    """
    lora = config.actor.lora
    if isinstance(engine, LocalEngine) and team.size == 1:
        if lora is not None:
            raise ConfigError(
                "actor.lora: a LocalEngine of yours samples without the adapters; give no engine"
            )
        return engine.model
    model = _load(model_path(config), config, config.actor.dtype)
    if lora is not None:
        add_adapters(model, lora)
    return model


def open_engine(
    config: PPOConfig, model: Any, tokenizer: PreTrainedTokenizerBase, team: Team
) -> InferenceEngine:
    """What ``config.engine`` says: servers, or the embedded engine on the actor's parameters.

    Servers start from the folder of the model to train, or have been started so by the user. In a
    team the model is going to be sharded, so the embedded engine has weights of its own.
    """
    if config.engine.backend != "local":
        folder = str(model_folder(model_path(config)))
        return connect_engine(config.engine, folder, run_dir(config) / "servers")
    own = model if team.size == 1 else _load(model_path(config), config, config.actor.dtype)
    limits = config.engine
    return LocalEngine(
        own, tokenizer, max_batch_size=limits.max_batch_size, max_seq_len=limits.max_seq_len
    )


def make_actor(
    config: PPOConfig,
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    *,
    total_steps: int,
    team: Team,
) -> Actor:
    """The actor on ``model``, with the reference and the critic that the config asks for.

    Raises:
        ConfigError: ``ref`` is set and no KL term is on.
    """
    actor, temperature = config.actor, config.gconfig.logprob_temperature
    reference = critic = None
    if actor.kl_ctl or actor.kl_loss_coef:
        ref = config.ref or RefConfig()
        is_actor = ref.path is None and actor.lora is not None
        frozen = model
        if not is_actor:
            frozen = _load(ref.path or model_path(config), config, ref.dtype or actor.dtype)
        reference = Reference(frozen, ref, temperature=temperature, is_actor=is_actor, team=team)
    elif config.ref is not None:
        raise ConfigError("ref has no effect: set actor.kl_ctl or actor.kl_loss_coef above 0")
    if config.critic is not None:
        own = model
        if config.critic.trunk == "separate":
            path = config.critic.path or model_path(config)
            own = _load(path, config, config.critic.dtype)
        critic = Critic(own, config.critic, total_steps=total_steps, team=team)
    return Actor(
        model,
        actor,
        total_steps=total_steps,
        temperature=temperature,
        reference=reference,
        critic=critic,
        team=team,
        # What ends a completion in the engine is no sign of a row that was cut off.
        end_ids=(*end_ids(model, tokenizer), *config.gconfig.stop_token_ids),
    )


def _load(path: str, config: PPOConfig, dtype: str) -> Any:
    return load_model(path, device=torch.device(_device(config)), dtype=getattr(torch, dtype))


def _device(config: PPOConfig) -> str:
    return config.actor.device or ("cuda" if torch.cuda.is_available() else "cpu")


def online_service(
    config: PPOConfig, engine: InferenceEngine, tokenizer: PreTrainedTokenizerBase, folder: Path
) -> OnlineService:
    """What serves the engine to users and learns from them; not started yet.

    Raises:
        ConfigError: a group baseline, which groups of one do not have, or hints without a weight.
    """
    norm, method = config.actor.reward_norm, config.online.method
    if norm is not None and norm.uses_group_statistics and method != "opd":
        raise ConfigError(
            "rollout.agent.mode=online: each turn is a group of one, and group statistics make its "
            "advantage 0; set actor.reward_norm.mean_level=running and std_level=null"
        )
    if method != "binary" and not config.actor.distillation.weight:
        raise ConfigError(
            f"online.method={method} needs actor.distillation.weight above 0: hints teach nothing"
        )
    return OnlineService(
        engine,
        tokenizer,
        config.online,
        config.gateway,
        run_dir=folder,
        model=None if config.recover.mode == "off" else model_name(config),
        top_k=config.actor.distillation.topk,
    )


def weight_publisher(config: PPOConfig, replica: Replica) -> WeightPublisher:
    """How servers get new weights; of a model with adapters only these."""
    has_adapters = config.actor.lora is not None
    return WeightPublisher(
        "lora" if has_adapters else config.engine.update,
        root=run_dir(config) / "weights",
        save=replica.export_adapters if has_adapters else replica.export,
        tensors=lambda: replica.gather().items(),
    )


def open_logger(config: PPOConfig, total_steps: int, steps_per_epoch: int) -> StatsLogger:
    spec = FinetuneSpec(
        total_train_epochs=-(-total_steps // steps_per_epoch),
        steps_per_epoch=steps_per_epoch,
        total_train_steps=total_steps,
    )
    return StatsLogger(config, spec, log_dir=run_dir(config))


def recovery(config: PPOConfig, parts: Mapping[str, Stateful]) -> Recovery | None:
    """None: ``recover.mode`` is off."""
    if config.recover.mode == "off":
        return None
    folder = run_dir(config) / "recover"
    return Recovery(folder, seed=config.seed, model=model_name(config), parts=parts)


def rollout_engine(
    config: PPOConfig,
    engine: InferenceEngine,
    tokenizer: PreTrainedTokenizerBase,
    eval_gconfig: GenerationConfig,
    min_usable_group_size: int,
) -> RolloutEngine:
    """Dump and journal are in the run's folder by default.

    Raises:
        RequestError: ``gconfig`` has what the engine cannot do; each episode would fail on it.
    """
    for name, sampling in (("gconfig", config.gconfig), ("eval_gconfig", eval_gconfig)):
        refuse_unsupported(sampling, engine, grammar_param=f"{name}.grammar")
    folder = run_dir(config, config.rollout.fileroot)
    does_dump = config.rollout.dump_to_file
    return RolloutEngine(
        engine,
        config.rollout,
        # None: it loads the one that rollout.tokenizer_path names.
        tokenizer=None if config.rollout.tokenizer_path else tokenizer,
        gconfig=config.gconfig,
        eval_gconfig=eval_gconfig,
        min_usable_group_size=min_usable_group_size,
        seed=config.seed,
        dump=TrajectoryDump(folder, tokenizer.decode) if does_dump else None,
        journal=folder / "rollout.journal",
    )


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
