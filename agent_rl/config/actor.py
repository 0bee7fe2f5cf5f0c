"""``actor``: the policy, its loss and its optimizer."""

from __future__ import annotations

from typing import Literal, TypeAlias

from pydantic import Field, model_validator

from agent_rl.config.section import Dtype, Section

Aggregation: TypeAlias = Literal[
    "token-mean",
    "seq-mean-token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
    "dr-grpo",
    "rollout-mean",
]
KLEstimator: TypeAlias = Literal["k1", "k2", "k3"]


class OptimizerConfig(Section):
    """actor.optimizer and critic.optimizer: AdamW and its schedule."""

    lr: float = Field(2e-5, ge=0.0, description="peak learning rate")
    weight_decay: float = Field(0.01, ge=0.0, description="of matrices; vectors have none")
    beta1: float = Field(0.9, ge=0.0, lt=1.0, description="decay of the mean of gradients")
    beta2: float = Field(0.999, ge=0.0, lt=1.0, description="decay of the mean of their squares")
    eps: float = Field(1e-8, gt=0.0, description="added to the root of that mean")
    gradient_clipping: float = Field(1.0, gt=0.0, description="maximum norm of the gradient")
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="how the rate falls after the warm-up"
    )
    warmup_steps_proportion: float = Field(
        0.001, ge=0.0, le=1.0, description="of all steps, in which the rate rises to its peak"
    )
    min_lr_ratio: float = Field(
        0.0, ge=0.0, le=1.0, description="of the peak, below which the rate does not fall"
    )

    @model_validator(mode="after")
    def _a_constant_rate_has_no_floor(self) -> OptimizerConfig:
        if self.lr_scheduler_type == "constant":
            self.refuse_idle("min_lr_ratio", need="lr_scheduler_type linear or cosine")
        return self


class NormConfig(Section):
    """actor.reward_norm and actor.adv_norm (docs/guides/training.md has worked numbers)."""

    mean_level: Literal["batch", "group", "length", "running", "given"] | None = Field(
        "batch",
        description="what is subtracted: mean of the batch or group; length: of the group, "
        "weighted by trained tokens (OPO); running: of earlier steps; given: the trajectories' "
        "baseline_rewards (ReMax); null: nothing",
    )
    mean_leave1out: bool = Field(False, description="each rollout against the others (RLOO)")
    running_decay: float = Field(
        0.9, ge=0.0, lt=1.0, description="of mean_level=running: what a step leaves of the old mean"
    )
    std_level: Literal["batch", "group"] | None = Field(
        "batch", description="what is divided by: std of the batch or group; null: nothing"
    )
    std_unbiased: bool = Field(True, description="std with n - 1 in place of n")
    eps: float = Field(1e-5, gt=0.0, description="added to the std")

    @property
    def uses_group_statistics(self) -> bool:
        return self.mean_level in ("group", "length") or self.std_level == "group"

    @property
    def uses_references(self) -> bool:
        """Without a mean and a std nothing is shifted or scaled."""
        return (self.mean_level, self.std_level) != (None, None)

    @model_validator(mode="after")
    def _leave_one_out_of_a_mean(self) -> NormConfig:
        if self.mean_leave1out and self.mean_level not in ("batch", "group"):
            raise ValueError("mean_leave1out needs mean_level batch or group")
        if self.mean_level != "running":
            self.refuse_idle("running_decay", need="mean_level=running")
        return self


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
    upper: float = Field(5.0, description="upper bound")
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
        if self.level == "token":
            self.refuse_idle("agg", need="level=sequence")
        return self


class LoraConfig(Section):
    """actor.lora: train low-rank adapters; the other weights stay as they are."""

    rank: int = Field(16, ge=1, description="inner size of the adapters")
    alpha: int = Field(32, ge=1, description="adapters are scaled by alpha / rank")
    target_modules: tuple[str, ...] = Field(
        ("all-linear",), min_length=1, description="names of layers; all-linear: all but the head"
    )


class DistillationConfig(Section):
    """actor.distillation: learn from a teacher that scored the sampled tokens.

    Rows without ``teacher_logprobs`` (online/, or a workflow of yours) have no such term.
    """

    weight: float = Field(0.0, ge=0.0, description="of the teacher's part; 0: off")
    topk: int = Field(
        0,
        ge=0,
        description="0: teacher - proximal log-prob of the sampled token, in the advantage; k: KL "
        "over the teacher's k likeliest tokens and the rest, in the loss",
    )

    @model_validator(mode="after")
    def _topk_needs_weight(self) -> DistillationConfig:
        if self.topk and not self.weight:
            raise ValueError("topk has no effect with weight=0")
        return self


class ActorConfig(Section):
    """actor: the policy, its loss and its optimizer."""

    path: str | None = Field(None, description="Hugging Face folder; null: tokenizer_path")
    device: str | None = Field(None, description="null: cuda when there is one, else cpu")
    dtype: Dtype = Field("float32", description="of the weights")
    optimizer: OptimizerConfig = OptimizerConfig()
    ppo_n_minibatches: int = Field(1, ge=1, description="optimizer steps for one batch")
    max_tokens_per_mb: int = Field(
        2048, ge=1, description="tokens of one forward pass; a longer row is a pass of its own"
    )
    tree_packing: Literal["auto", "off"] = Field(
        "auto", description="auto: a prefix that rows share is computed once; off: rows apart"
    )
    compile: bool = Field(
        False, description="torch.compile of the training passes; slow at first, then faster"
    )
    lora: LoraConfig | None = Field(None, description="train adapters only")
    gradient_checkpointing: bool = Field(
        False, description="keep layer inputs only and compute the rest again: less memory"
    )
    recompute_logprob: bool = Field(
        False, description="ratios against the trainer's own log-probs, not the engine's"
    )
    use_decoupled_loss: bool = Field(
        False, description="recompute_logprob, and weights proximal / behaviour on top"
    )
    prox_logp_method: Literal["recompute", "loglinear"] = Field(
        "recompute",
        description="proximal log-probs of the decoupled loss: a forward pass, or loglinear: "
        "between behaviour and policy log-prob, by the token's age",
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
    loss_aggregation: Aggregation = Field(
        "token-mean", description="over what the token losses of a minibatch are averaged"
    )
    loss_horizon: int | None = Field(
        None, ge=1, description="constant length that *-norm and dr-grpo divide by"
    )
    entropy_coef: float = Field(0.0, ge=0.0, description="bonus on the entropy of each token")
    cross_entropy_coef: float = Field(
        0.0, ge=0.0, description="of -log p on rows with a reward above 0 (VAPO)"
    )
    kl_ctl: float = Field(
        0.0, ge=0.0, description="KL to the reference as a reward of each token; 0: off"
    )
    kl_estimator: KLEstimator = Field("k1", description="of kl_ctl")
    kl_loss_coef: float = Field(
        0.0, ge=0.0, description="KL to the reference as part of the loss; 0: off"
    )
    kl_loss_estimator: KLEstimator = Field("k3", description="of kl_loss_coef")
    eps_clip: float = Field(0.2, gt=0.0, description="how far below 1 a ratio may move for free")
    eps_clip_higher: float | None = Field(None, gt=0.0, description="above 1; null: eps_clip")
    c_clip: float | None = Field(None, gt=1.0, description="dual clip; null: off")
    sapo_tau_pos: float = Field(1.0, gt=0.0, description="of the soft gate, advantage > 0")
    sapo_tau_neg: float = Field(1.05, gt=0.0, description="of the soft gate, advantage <= 0")
    overlong_reward_penalty: bool = Field(
        False, description="a reward falls over the last overlong_tokens of max_new_tokens"
    )
    overlong_tokens: int | None = Field(None, ge=1, description="length of that fall")
    overlong_penalty_factor: float | None = Field(None, gt=0.0, description="depth of that fall")
    max_new_tokens: int = Field(1024, ge=1, description="length limit of the overlong penalty")
    truncated_rows: Literal["train", "zero", "mask"] = Field(
        "train",
        description="rows that end without an end token. train: like others; zero: their reward "
        "is 0 and in no baseline; mask: not trained, in no baseline (overlong filtering)",
    )
    reward_bias: float = Field(0.0, description="added to each reward")
    reward_scaling: float = Field(1.0, description="multiplies the sum of both")
    reward_clip: float = Field(20.0, gt=0.0, description="limit of the result's magnitude")
    reward_norm: NormConfig | None = Field(
        default_factory=lambda: NormConfig(mean_level="group", std_level="group"),
        description="GRPO by default: group mean and group std",
    )
    adv_norm: NormConfig | None = Field(None, description="of advantages, by token; null: off")
    reward_weight: float = Field(1.0, ge=0.0, description="of the reward's advantage")
    distillation: DistillationConfig = DistillationConfig()
    gamma: float = Field(1.0, ge=0.0, le=1.0, description="of GAE: discount from token to token")
    gae_lambda: float = Field(
        1.0, ge=0.0, le=1.0, description="of GAE: 0 trusts the critic, 1 the returns"
    )
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
        if self.prox_logp_method == "loglinear" and (
            not self.use_decoupled_loss or self.m2_threshold is not None
        ):
            raise ValueError("prox_logp_method=loglinear needs use_decoupled_loss, no m2_threshold")
        if self.adv_norm is not None and self.adv_norm.mean_level not in ("batch", "group", None):
            raise ValueError(f"adv_norm.mean_level={self.adv_norm.mean_level} is for reward_norm")
        if self.policy_loss == "sapo" and self.use_decoupled_loss:
            raise ValueError("policy_loss=sapo has its own gate; use_decoupled_loss must be false")
        if self.c_clip is not None and self.policy_loss != "ppo":
            raise ValueError(f"c_clip has no effect with policy_loss={self.policy_loss}")
        return self

    @model_validator(mode="after")
    def _no_parameter_of_what_is_off(self) -> ActorConfig:
        if not self.overlong_reward_penalty:
            names = ("overlong_tokens", "overlong_penalty_factor", "max_new_tokens")
            need = "overlong_reward_penalty=true (what limits an answer is gconfig.max_new_tokens)"
            self.refuse_idle(*names, need=need)
        if not self.use_decoupled_loss:
            self.refuse_idle("rejection_sampling", need="use_decoupled_loss=true")
        if not self.kl_ctl:
            self.refuse_idle("kl_estimator", need="kl_ctl above 0")
        if not self.kl_loss_coef:
            self.refuse_idle("kl_loss_estimator", need="kl_loss_coef above 0")
        if self.policy_loss == "sapo":
            self.refuse_idle("eps_clip", "eps_clip_higher", need="policy_loss ppo or cispo")
        else:
            self.refuse_idle("sapo_tau_pos", "sapo_tau_neg", need="policy_loss=sapo")
        return self
