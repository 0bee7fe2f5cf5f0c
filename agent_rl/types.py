"""The nouns on the arrows: one type for each hand-over between two layers.

Alignment law: every per-token sequence has the length of its token ids and index ``i`` speaks of
token ``i``. ``None`` means "not known", never zero. Lengths are checked once, here, where an object
is built. This module knows neither torch nor transformers at run time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias, TypeVar

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")

JsonObject: TypeAlias = dict[str, Any]
"""A JSON object from outside: a request body, a chat message, a tool schema, a dataset row."""

RowValue: TypeAlias = "Tensor | RolloutGroup | list[Any] | float"
TensorDict: TypeAlias = "dict[str, RowValue]"
"""Rows of one or more trajectories, keys as in the table of docs/guides/workflows.md."""

StopReason: TypeAlias = Literal["stop", "length", "tool_calls", "abort"]
ExportStyle: TypeAlias = Literal["individual", "concat"]
ChatTemplateType: TypeAlias = Literal["hf", "concat"]


_GREEDY_BELOW = 1e-5
"""Servers are greedy below it too; logits divided by much less are no numbers any more."""


def _option(default: T, description: str) -> T:
    """A field with the words that `agent-rl config` shows."""
    return field(default=default, metadata={"description": description})


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationConfig:
    """How tokens are sampled. ``max_new_tokens=None`` means "as many as the context leaves".

    ``max_tokens`` bounds prompt and completion together. ``greedy`` is the same as temperature 0,
    and as one below 1e-5.
    ``n_samples`` is the target group size; one ``ModelRequest`` always yields one completion.
    ``top_logprobs`` asks the engine for that many alternatives at each token.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    n_samples: int = _option(1, "always 1; the episodes of a datum are rollout.group_size")
    max_new_tokens: int | None = _option(None, "of one answer; null: what the context leaves")
    max_tokens: int | None = _option(None, "of prompt and answer together; null: the context")
    min_new_tokens: int = _option(0, "an answer does not end before")
    temperature: float = _option(1.0, "0: greedy")
    top_p: float = _option(1.0, "sample from the likeliest tokens up to this probability; 1: off")
    top_k: int = _option(0, "sample from so many of the likeliest tokens; 0: off")
    min_p: float = _option(0.0, "drop tokens below this part of the likeliest one's probability")
    greedy: bool = _option(False, "always the likeliest token")
    stop: tuple[str, ...] = _option((), "texts that end an answer and are cut off")
    stop_token_ids: tuple[int, ...] = _option((), "ids that end an answer, beside the model's own")
    frequency_penalty: float = _option(0.0, "taken from a token's logit each time it was sampled")
    presence_penalty: float = _option(0.0, "taken once from the logit of a sampled token")
    repetition_penalty: float = _option(1.0, "divides logits of tokens that occurred; 1: off")
    logit_bias: Mapping[int, float] = field(
        default_factory=dict, metadata={"description": "token id -> added to its logit"}
    )
    top_logprobs: int = _option(0, "likeliest tokens to report beside each sampled one")
    seed: int | None = _option(None, "null: from the seed of the run, for each episode its own")
    grammar: str | None = _option(None, "that answers match, in llguidance's Lark dialect")

    def __post_init__(self) -> None:
        checks = (
            ("n_samples", self.n_samples >= 1, "at least 1"),
            ("max_new_tokens", self.max_new_tokens is None or self.max_new_tokens >= 1, ">= 1"),
            ("max_tokens", self.max_tokens is None or self.max_tokens >= 1, ">= 1"),
            ("min_new_tokens", self.min_new_tokens >= 0, ">= 0"),
            ("temperature", 0.0 <= self.temperature < math.inf, ">= 0 and finite"),
            ("top_p", 0.0 < self.top_p <= 1.0, "in (0, 1]"),
            ("top_k", self.top_k >= 0, ">= 0 (0 is off)"),
            ("min_p", 0.0 <= self.min_p < 1.0, "in [0, 1)"),
            ("repetition_penalty", self.repetition_penalty > 0.0, "> 0"),
            ("top_logprobs", 0 <= self.top_logprobs <= 20, "in [0, 20]"),
        )
        for name, is_ok, rule in checks:
            if not is_ok:
                raise ValueError(f"gconfig.{name} is {getattr(self, name)!r}; it must be {rule}")

    @property
    def is_greedy(self) -> bool:
        return self.greedy or self.temperature < _GREEDY_BELOW

    @property
    def logprob_temperature(self) -> float:
        """The temperature under which behaviour log-probs are stated: 1 when greedy."""
        return 1.0 if self.is_greedy else self.temperature


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRequest:
    """client -> engine. Token ids, never messages; ``rid`` names the request for ``abort``."""

    rid: str
    input_ids: Sequence[int]
    gconfig: GenerationConfig = field(default_factory=GenerationConfig)
    tokenizer: PreTrainedTokenizerBase | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    image_data: Sequence[str] | None = None

    def __post_init__(self) -> None:
        if not self.input_ids:
            raise ValueError("ModelRequest.input_ids is empty; a prompt needs at least one token")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenDelta:
    """engine -> client while streaming: the next tokens of one completion, in order."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]

    def __post_init__(self) -> None:
        _check_lengths("TokenDelta", self.token_ids, logprobs=self.logprobs, versions=self.versions)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelResponse:
    """engine -> client: one completion, exactly as sampled.

    ``output_logprobs`` are ``log_softmax(logits / temperature)`` at the sampled token, before any
    top-p/top-k/min-p truncation, and finite; ``output_versions`` is the version of the weights that
    produced each token. ``output_top_logprobs`` holds (token id, log-prob) pairs where they were
    asked for.
    ``output_forced``, given under a grammar, says which tokens were the only ones allowed.
    ``num_cached_tokens`` of the prompt the engine did not have to compute; None: not known.
    The stop token, when one was sampled, is the last output token.
    """

    input_tokens: tuple[int, ...]
    output_tokens: tuple[int, ...]
    output_logprobs: tuple[float, ...]
    output_versions: tuple[int, ...]
    stop_reason: StopReason
    latency_s: float = 0.0
    ttft_s: float = 0.0
    output_top_logprobs: tuple[tuple[tuple[int, float], ...], ...] | None = None
    output_forced: tuple[bool, ...] | None = None
    num_cached_tokens: int | None = None

    def __post_init__(self) -> None:
        for name in ("input_tokens", "output_tokens", "output_logprobs", "output_versions"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        _check_lengths(
            "ModelResponse",
            self.output_tokens,
            output_logprobs=self.output_logprobs,
            output_versions=self.output_versions,
            output_top_logprobs=self.output_top_logprobs,
            output_forced=self.output_forced,
        )
        for index, logprob in enumerate(self.output_logprobs):
            if not math.isfinite(logprob):  # nothing can be trained on it
                raise ValueError(
                    f"ModelResponse: output_logprobs[{index}] is {logprob}; the log-prob of a "
                    "sampled token is finite"
                )


def _check_lengths(owner: str, token_ids: Sequence[int], **per_token: Sequence[Any] | None) -> None:
    for name, values in per_token.items():
        if values is not None and len(values) != len(token_ids):
            raise ValueError(
                f"{owner}: {len(token_ids)} token ids but {len(values)} {name}; "
                "per-token lists must have one entry for each token"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutGroup:
    """How the rows of one trajectory batch belong to logical rollouts.

    ``row_counts[i]`` contiguous rows belong to logical rollout ``i``; ``rewards[i]`` is its reward
    reference, None where none was given; ``truncated[i]`` says that it ended where its budget did.
    Example: slot 0 exports 3 rows, slot 1 one row -> ``row_counts=(3, 1)``: physical size 4,
    logical size 2.
    """

    row_counts: tuple[int, ...]
    rewards: tuple[float | None, ...] | None = None
    truncated: tuple[bool, ...] = ()

    def __post_init__(self) -> None:
        counts = tuple(self.row_counts)
        truncated = tuple(self.truncated) or (False,) * len(counts)
        rewards = (None,) * len(counts) if self.rewards is None else tuple(self.rewards)
        if not counts or any(type(count) is not int or count < 1 for count in counts):
            raise ValueError(f"RolloutGroup.row_counts must be positive integers, got {counts!r}")
        if len(rewards) != len(counts):
            raise ValueError(
                f"RolloutGroup has {len(counts)} row_counts but {len(rewards)} rewards"
            )
        if len(truncated) != len(counts) or any(type(flag) is not bool for flag in truncated):
            raise ValueError(
                f"RolloutGroup.truncated must be one bool for each row count, got {truncated!r}"
            )
        for reward in rewards:
            is_number = isinstance(reward, int | float) and not isinstance(reward, bool)
            if reward is not None and not (is_number and math.isfinite(reward)):
                raise ValueError(
                    f"RolloutGroup.rewards must be finite numbers or None, got {reward!r}"
                )
        object.__setattr__(self, "row_counts", counts)
        object.__setattr__(self, "rewards", rewards)
        object.__setattr__(self, "truncated", truncated)

    @property
    def references(self) -> tuple[float | None, ...]:
        """The reward references, one for each logical rollout."""
        assert self.rewards is not None, "rewards are filled in at construction"
        return self.rewards

    @property
    def num_rows(self) -> int:
        return sum(self.row_counts)

    @property
    def truncated_rows(self) -> list[bool]:
        """``truncated`` of each row's logical rollout."""
        pairs = zip(self.row_counts, self.truncated, strict=True)
        return [flag for count, flag in pairs for _ in range(count)]

    @property
    def num_rollouts(self) -> int:
        return len(self.row_counts)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajBatchMeta:
    """Where each trajectory (one prompt's group) stands in a concatenated batch of rows.

    ``traj_group_sizes[i]`` rows come from trajectory ``i`` and ``traj_seqlens[i]`` was its padded
    width; ``rollout_groups[i]`` says which of those rows belong to one logical rollout.
    """

    traj_group_sizes: tuple[int, ...]
    traj_seqlens: tuple[int, ...]
    rollout_groups: tuple[RolloutGroup, ...]

    def __post_init__(self) -> None:
        if not len(self.traj_group_sizes) == len(self.traj_seqlens) == len(self.rollout_groups):
            raise ValueError(
                "TrajBatchMeta: traj_group_sizes, traj_seqlens and rollout_groups differ in length"
            )
        for size, group in zip(self.traj_group_sizes, self.rollout_groups, strict=True):
            if group.num_rows != size:
                raise ValueError(
                    f"TrajBatchMeta: a trajectory has {size} rows but its rollout_group counts "
                    f"{group.num_rows}"
                )

    @property
    def n_trajs(self) -> int:
        return len(self.traj_group_sizes)

    @property
    def num_rows(self) -> int:
        return sum(self.traj_group_sizes)
