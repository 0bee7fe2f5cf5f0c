"""All config models, and how a config is read: YAML file, then ``key=value`` overrides.

Every section is frozen, every field has its line, unknown keys and values out of range raise
ConfigError naming the key and the nearest valid one. Config is read at construction only.

    config = load_config("ppo.yaml", ["rollout.group_size=4", "actor.optimizer.lr=2e-5"])
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from agent_rl.errors import ConfigError
from agent_rl.types import ChatTemplateType, ExportStyle, GenerationConfig


def _no_limit_is_none(value: Any) -> Any:
    return None if isinstance(value, float) and math.isinf(value) and value > 0 else value


TimeoutS = Annotated[Annotated[float, Field(gt=0)] | None, BeforeValidator(_no_limit_is_none)]
"""Seconds; None and inf mean no limit, 0 and negatives are refused."""


_EXPONENT = re.compile(r"[+-]?[0-9]+(\.[0-9]*)?[eE][+-]?[0-9]+")
"""2e-5 is a number to everyone but YAML 1.1, which wants 2.0e-5."""


def _one_folder(name: str) -> str:
    if name in (".", "..") or any(sign in name for sign in "/\\\0"):
        raise ValueError("it must name one folder: no slashes, not . or ..")
    return name


FolderName = Annotated[str, AfterValidator(_one_folder)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


class AgentConfig(Section):
    """rollout.agent: how an agent (``async def run``) becomes an episode."""

    export_style: ExportStyle = Field(
        "individual", description="one row per interaction, or concat: one per leaf path"
    )
    turn_discount: float = Field(
        1.0, ge=0.0, le=1.0, description="carries a later interaction's reward back"
    )
    chat_template_type: ChatTemplateType = Field(
        "hf", description="hf: render each turn; concat: extend the parent's ids"
    )
    tool_call_parser: str = Field("auto", description="name of the tool-call format")
    reasoning_parser: str = Field("auto", description="name of the reasoning format")
    engine_max_tokens: int | None = Field(
        None, gt=0, description="cap on prompt and completion tokens of one call"
    )
    max_requests: int | None = Field(
        64, gt=0, description="model calls one episode may make; null is no limit"
    )
    on_agent_error: Literal["drop", "zero", "keep"] = Field(
        "drop",
        description="an agent that raises: drop its turns, use them with a last reward of 0, or "
        "keep the rewards that were set",
    )

    @model_validator(mode="after")
    def _concat_needs_concat(self) -> AgentConfig:
        if self.export_style == "concat" and self.chat_template_type != "concat":
            raise ValueError(
                "export_style=concat needs chat_template_type=concat, so that each prompt extends "
                "the ids of its parent"
            )
        return self


class RolloutConfig(Section):
    """rollout: how episodes are collected."""

    group_size: int = Field(1, ge=1, description="episodes per datum that share a baseline")
    drop_incomplete_group: bool = Field(
        False, description="one unusable episode makes the whole group unusable"
    )
    reward_normalization: bool = Field(
        False, description="rewards of interactions become (reward - group mean) / group std"
    )
    reward_normalization_use_std: bool = Field(True, description="false: only subtract the mean")
    consumer_batch_size: int = Field(8, ge=1, description="groups in one training batch")
    max_concurrent_rollouts: int | None = Field(
        None, ge=1, description="groups running at once; null: consumer_batch_size"
    )
    max_head_offpolicyness: int = Field(
        0, ge=0, description="versions that collection may run ahead of training; 0: synchronous"
    )
    queue_size: int | None = Field(
        None, ge=1, description="groups that submit() lets wait; null: 16 max_concurrent_rollouts"
    )
    episode_timeout_s: TimeoutS = Field(600.0, description="deadline of one episode; null: none")
    on_error: Literal["reject", "raise"] = Field(
        "reject", description="reject: a failed episode costs its own sample; raise: stop"
    )
    dump_to_file: bool = Field(False, description="write every trajectory as JSON lines")
    fileroot: str | None = Field(None, description="folder of the dump; null: the run's folder")
    tokenizer_path: str | None = Field(
        None, description="of agents and of the dump; null: the top tokenizer_path"
    )
    agent: AgentConfig = AgentConfig()


class EngineConfig(Section):
    """engine: the embedded engine; it shares the actor's parameters, device and dtype."""

    max_batch_size: int = Field(32, ge=1, description="sequences decoded together")
    max_seq_len: int = Field(2048, ge=8, description="prompt and completion tokens of a sequence")


class OptimizerConfig(Section):
    """actor.optimizer: AdamW and its schedule."""

    lr: float = Field(2e-5, ge=0.0, description="peak learning rate")
    weight_decay: float = Field(0.01, ge=0.0)
    beta1: float = Field(0.9, ge=0.0, lt=1.0)
    beta2: float = Field(0.999, ge=0.0, lt=1.0)
    eps: float = Field(1e-8, gt=0.0)
    gradient_clipping: float = Field(1.0, gt=0.0, description="maximum norm of the gradient")
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps_proportion: float = Field(0.001, ge=0.0, le=1.0)
    min_lr_ratio: float = Field(0.0, ge=0.0, le=1.0)


class NormConfig(Section):
    """actor.reward_norm and actor.adv_norm (docs/guides/training.md has worked numbers)."""

    mean_level: Literal["batch", "group"] | None = "batch"
    mean_leave1out: bool = False
    std_level: Literal["batch", "group"] | None = "batch"
    std_unbiased: bool = True
    eps: float = Field(1e-5, gt=0.0)

    @property
    def uses_group_statistics(self) -> bool:
        return "group" in (self.mean_level, self.std_level)

    @property
    def uses_references(self) -> bool:
        """Without a mean and a std nothing is shifted or scaled."""
        return (self.mean_level, self.std_level) != (None, None)


class RejectionSamplingConfig(Section):
    """actor.rejection_sampling: bounds on proximal / behaviour, the decoupled loss's weight.

    TIS: level=token, action=clamp. IcePop: level=token, action=mask, both bounds. MIS:
    level=sequence, action=mask, agg=sum.
    """

    level: Literal["token", "sequence"] = Field(
        "token", description="what is tested and weighted: each token, or each row as a whole"
    )
    action: Literal["mask", "clamp"] = Field(
        "mask", description="mask: out of bounds is not trained; clamp: its weight is the bound"
    )
    metric: Literal["ratio", "kl_k1", "kl_k2", "kl_k3"] = Field(
        "ratio", description="what the bounds are about; kl_*: of proximal against behaviour"
    )
    agg: Literal["mean", "sum", "max"] = Field(
        "mean", description="how a row's tokens become one number; level=sequence only"
    )
    upper: float = 5.0
    lower: float | None = Field(None, description="null: no lower bound")

    @model_validator(mode="after")
    def _bounds_fit_the_metric(self) -> RejectionSamplingConfig:
        if self.lower is not None and self.lower > self.upper:
            raise ValueError(f"lower={self.lower} is above upper={self.upper}")
        if self.metric == "ratio":
            if self.upper <= 1.0 or (self.lower is not None and self.lower <= 0.0):
                raise ValueError("metric=ratio needs upper > 1 and lower > 0 (or null)")
        elif self.action == "clamp":
            raise ValueError("action=clamp needs metric=ratio: a KL bound is no weight")
        elif self.metric in ("kl_k2", "kl_k3") and self.upper <= 0.0:
            raise ValueError(f"metric={self.metric} is never negative; upper must be above 0")
        return self


class ActorConfig(Section):
    """actor: the policy, its loss and its optimizer."""

    path: str | None = Field(None, description="Hugging Face folder; null: tokenizer_path")
    device: str | None = Field(None, description="null: cuda when there is one, else cpu")
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="of the weights")
    optimizer: OptimizerConfig = OptimizerConfig()
    ppo_n_minibatches: int = Field(1, ge=1, description="optimizer steps for one batch")
    max_tokens_per_mb: int = Field(
        2048, ge=1, description="tokens of one forward pass; a longer row is a pass of its own"
    )
    tree_packing: Literal["auto", "off"] = Field(
        "auto", description="auto: a prefix that rows share is computed once; off: rows apart"
    )
    gradient_checkpointing: bool = Field(
        False, description="keep layer inputs only and compute the rest again: less memory"
    )
    recompute_logprob: bool = Field(
        False, description="ratios against the trainer's own log-probs, not the engine's"
    )
    use_decoupled_loss: bool = Field(
        False, description="recompute_logprob, and weights proximal / behaviour on top"
    )
    rejection_sampling: RejectionSamplingConfig = RejectionSamplingConfig()
    m2_threshold: float | None = Field(
        None, gt=0.0, description="M2PO: limit of the mean squared log-ratio; null: off"
    )
    policy_loss: Literal["ppo", "cispo", "sapo"] = Field(
        "ppo", description="ppo: clipped ratio; cispo: capped weight; sapo: soft gate"
    )
    importance_sampling_level: Literal["token", "sequence"] = Field(
        "token", description="sequence: one ratio for each row (GSPO)"
    )
    loss_aggregation: Literal[
        "token-mean",
        "seq-mean-token-mean",
        "seq-mean-token-sum",
        "seq-mean-token-sum-norm",
        "dr-grpo",
        "rollout-mean",
    ] = Field("token-mean", description="over what the token losses of a minibatch are averaged")
    loss_horizon: int | None = Field(
        None, ge=1, description="constant length that *-norm and dr-grpo divide by"
    )
    entropy_coef: float = Field(0.0, ge=0.0, description="bonus on the entropy of each token")
    eps_clip: float = Field(0.2, gt=0.0)
    eps_clip_higher: float | None = Field(None, gt=0.0, description="null: eps_clip")
    c_clip: float | None = Field(None, gt=1.0, description="dual clip; null: off")
    sapo_tau_pos: float = Field(1.0, gt=0.0, description="of the soft gate, advantage > 0")
    sapo_tau_neg: float = Field(1.05, gt=0.0, description="of the soft gate, advantage <= 0")
    overlong_reward_penalty: bool = Field(
        False, description="a reward falls over the last overlong_tokens of max_new_tokens"
    )
    overlong_tokens: int | None = Field(None, ge=1)
    overlong_penalty_factor: float | None = Field(None, gt=0.0)
    max_new_tokens: int = Field(1024, ge=1, description="length limit of the overlong penalty")
    reward_bias: float = 0.0
    reward_scaling: float = 1.0
    reward_clip: float = Field(20.0, gt=0.0)
    reward_norm: NormConfig | None = Field(
        default_factory=lambda: NormConfig(mean_level="group", std_level="group"),
        description="GRPO by default: group mean and group std",
    )
    adv_norm: NormConfig | None = None
    gamma: float = Field(1.0, ge=0.0, le=1.0)
    gae_lambda: float = Field(1.0, ge=0.0, le=1.0)
    min_usable_group_size: int | None = Field(
        None, ge=1, description="null: 2 with group statistics, else 1"
    )

    @model_validator(mode="after")
    def _no_option_without_effect(self) -> ActorConfig:
        if self.overlong_reward_penalty and None in (
            self.overlong_tokens,
            self.overlong_penalty_factor,
        ):
            raise ValueError(
                "overlong_reward_penalty needs overlong_tokens and overlong_penalty_factor"
            )
        needs_horizon = self.loss_aggregation in ("seq-mean-token-sum-norm", "dr-grpo")
        if needs_horizon != (self.loss_horizon is not None):
            raise ValueError(
                "loss_horizon goes with loss_aggregation seq-mean-token-sum-norm or dr-grpo"
            )
        if self.m2_threshold is not None and not (
            self.recompute_logprob or self.use_decoupled_loss
        ):
            raise ValueError("m2_threshold needs recompute_logprob or use_decoupled_loss")
        if self.policy_loss == "sapo" and self.use_decoupled_loss:
            raise ValueError("policy_loss=sapo has its own gate; use_decoupled_loss must be false")
        if self.c_clip is not None and self.policy_loss != "ppo":
            raise ValueError(f"c_clip has no effect with policy_loss={self.policy_loss}")
        return self


class StepsConfig(Section):
    """saver, recover and evaluator: how often; whichever is due first. All null: never."""

    freq_epochs: int | None = Field(None, ge=1)
    freq_steps: int | None = Field(None, ge=1)
    freq_secs: float | None = Field(None, gt=0)


class EvaluatorConfig(StepsConfig):
    """evaluator."""

    eval_before_train: bool = Field(False, description="evaluate once before the first step")


class TensorBoardConfig(Section):
    """stats_logger.tensorboard."""

    path: str | None = Field(None, description="folder of the event files; null: off")


class WandbConfig(Section):
    """stats_logger.wandb."""

    mode: Literal["online", "offline", "shared", "disabled"] = "disabled"
    base_url: str | None = Field(None, description="null: WANDB_BASE_URL, else the public service")
    api_key: str | None = Field(None, repr=False, description="null: WANDB_API_KEY or a login")
    entity: str | None = Field(None, description="user or team that owns the run")
    project: str | None = Field(None, description="null: experiment_name")
    name: str | None = Field(None, description="null: trial_name")
    job_type: str | None = None
    group: str | None = Field(None, description="null: {experiment_name}_{trial_name}")
    notes: str | None = None
    tags: tuple[str, ...] = ()
    id_suffix: str = Field(
        "train",
        min_length=1,
        description="last part of the run's id; timestamp: the time, so every start is a new run",
    )


class SwanLabConfig(Section):
    """stats_logger.swanlab."""

    mode: Literal["cloud", "local", "offline", "disabled"] = "disabled"
    api_key: str | None = Field(None, repr=False, description="null: SWANLAB_API_KEY or a login")
    project: str | None = Field(None, description="null: experiment_name")
    name: str | None = Field(None, description="null: {trial_name}_train")


class TrackioConfig(Section):
    """stats_logger.trackio."""

    mode: Literal["online", "local", "disabled"] = "disabled"
    project: str | None = Field(None, description="null: experiment_name")
    name: str | None = Field(None, description="null: trial_name")
    space_id: str | None = Field(None, description="the Space of mode online")

    @model_validator(mode="after")
    def _online_needs_a_space(self) -> TrackioConfig:
        if self.mode == "online" and self.space_id is None:
            raise ValueError("mode=online needs space_id; mode=local keeps the run on this machine")
        return self


class StatsLoggerConfig(Section):
    """stats_logger: where metrics go. A sink that fails is reported once and stops nothing."""

    console: bool = Field(True, description="print a table after each step")
    jsonl: bool = Field(True, description="append every step to metrics.jsonl")
    tensorboard: TensorBoardConfig = TensorBoardConfig()
    wandb: WandbConfig = WandbConfig()
    swanlab: SwanLabConfig = SwanLabConfig()
    trackio: TrackioConfig = TrackioConfig()
    close_timeout_s: float = Field(
        15.0, gt=0.0, description="how long the end of a run waits for sinks that still send"
    )


class PPOConfig(Section):
    """The config of ``PPOTrainer``."""

    experiment_name: FolderName = Field("agent_rl", min_length=1)
    trial_name: FolderName = Field("trial", description="may be empty: no folder of its own")
    fileroot: str = Field(
        "runs", description="the run is written to {fileroot}/{experiment_name}/{trial_name}"
    )
    seed: int = 1
    total_train_epochs: int = Field(1, ge=1)
    total_train_steps: int | None = Field(None, ge=1, description="null: by epochs")
    tokenizer_path: str = Field("", description="Hugging Face folder of model and tokenizer")
    gconfig: GenerationConfig = GenerationConfig()
    eval_gconfig: GenerationConfig | None = Field(None, description="null: greedy gconfig")
    rollout: RolloutConfig = RolloutConfig()
    engine: EngineConfig = EngineConfig()
    actor: ActorConfig = ActorConfig()
    train_dataset: str | None = Field(None, description="JSONL or Parquet file")
    valid_dataset: str | None = Field(None, description="JSONL or Parquet file")
    saver: StepsConfig = StepsConfig()
    evaluator: EvaluatorConfig = EvaluatorConfig()
    stats_logger: StatsLoggerConfig = StatsLoggerConfig()


def load_config(
    path: str | Path | None = None, overrides: Iterable[str] = (), *, base: PPOConfig | None = None
) -> PPOConfig:
    """Read YAML, apply ``a.b=value`` overrides (values are YAML too), check everything.

    ``base`` gives the values that neither mentions, in place of the defaults.

    Raises:
        ConfigError: the file cannot be read, a key is unknown or a value out of range.
    """
    tree: dict[str, Any] = base.model_dump(exclude_unset=True) if base is not None else {}
    if path is not None:
        _merge(tree, _read_yaml(Path(path)))
    for override in overrides:
        key, separator, text = override.partition("=")
        if not separator or not key.strip():
            raise ConfigError(f"override {override!r} must look like key=value")
        _set(tree, key.strip().split("."), _parse_value(override, text))
    try:
        return PPOConfig.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(_explain(error)) from None


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the config {path}: {error}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"the config {path} is not valid YAML: {error}") from error
    if tree is not None and not isinstance(tree, dict):
        raise ConfigError(f"the config {path} must be a mapping, not {type(tree).__name__}")
    return tree or {}


def _parse_value(override: str, text: str) -> Any:
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"override {override!r}: the value is not valid YAML: {error}") from error
    if isinstance(value, str) and _EXPONENT.fullmatch(value):
        return float(value)
    return value


def _merge(tree: dict[str, Any], update: Mapping[str, Any]) -> None:
    for key, value in update.items():
        if isinstance(value, Mapping) and isinstance(tree.get(key), dict):
            _merge(tree[key], value)
        else:
            tree[key] = value


def _set(tree: dict[str, Any], keys: list[str], value: Any) -> None:
    for key in keys[:-1]:
        child = tree.get(key)
        if not isinstance(child, dict):
            child = tree[key] = {}
        tree = child
    tree[keys[-1]] = value


def _explain(error: ValidationError) -> str:
    """One line for each fault: the key, what is wrong, the nearest valid key."""
    lines = []
    for fault in error.errors():
        keys = [str(part) for part in fault["loc"] if not str(part).startswith("function-")]
        key = ".".join(keys)
        if fault["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
            names = _field_names(keys[:-1])
            near = difflib.get_close_matches(keys[-1], names, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"valid keys: {', '.join(names)}"
            lines.append(f"unknown config key {key!r}; {hint}")
        else:
            message = fault["msg"].removeprefix("Value error, ")
            lines.append(f"config key {key!r} = {fault['input']!r}: {message}")
    return "; ".join(lines)


def _field_names(keys: list[str]) -> list[str]:
    """The keys that are valid inside the section that ``keys`` leads to."""
    section: Any = PPOConfig
    for key in keys:
        annotation = section.model_fields[key].annotation
        options = [annotation, *get_args(annotation)]
        section = next(
            option
            for option in options
            if hasattr(option, "__init__")
            and (
                isinstance(option, type)
                and (issubclass(option, BaseModel) or option is GenerationConfig)
            )
        )
    if section is GenerationConfig:
        return list(GenerationConfig.__dataclass_fields__)
    return list(section.model_fields)
