"""The engine seam: token ids in, sampled token ids with log-probs and versions out.

An engine never sees a message. All calls that may wait are coroutines and may be made from any
event loop; versions are plain integers of the weights. Cancelling ``agenerate`` or closing the
iterator of ``astream`` frees the slot.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias, runtime_checkable

from agent_rl.errors import WrongTypeError, shown
from agent_rl.types import GenerationConfig, ModelRequest, ModelResponse, TokenDelta

if TYPE_CHECKING:
    from torch import Tensor

StreamItem: TypeAlias = TokenDelta | ModelResponse
UpdateMethod: TypeAlias = Literal["in_process", "disk", "lora", "distributed", "tensor"]
NamedTensor: TypeAlias = "tuple[str, Tensor]"


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightUpdate:
    """trainer -> engine: weights of ``version`` are ready.

    ``in_process``: the engine shares the trainer's parameters, nothing is copied.
    ``disk``: ``path`` is a Hugging Face folder of safetensors.
    ``lora``: ``path`` is a folder with an adapter in PEFT's form, used on top of the base weights.
    ``distributed``: ``tensors()`` gives name and value of each parameter, to be broadcast; it may
    be called again when a server fails on the way. ``tensor``: the same, by shared memory.
    """

    version: int
    method: UpdateMethod = "in_process"
    path: Path | None = None
    tensors: Callable[[], Iterable[NamedTensor]] | None = None


def require_engine(value: object, owner: str) -> None:
    """Raises WrongTypeError naming ``owner``, the call that was given something else."""
    if callable(getattr(value, "agenerate", None)):
        return
    raise WrongTypeError(
        f"{owner}: the engine must have the methods of InferenceEngine, such as "
        f"LocalEngine(model_path) has; {shown(value)} is none"
    )


class InferenceEngine(Protocol):
    @property
    def max_seq_len(self) -> int:
        """Prompt and completion tokens that one sequence may hold."""

    @property
    def supported(self) -> frozenset[str]:
        """Names of the optional ``GenerationConfig`` fields that this engine honours.

        The fields of every engine (max_new_tokens, max_tokens, temperature, greedy, n_samples,
        stop_token_ids) are not listed. The API refuses a request that uses any other field.
        """

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        """Sample one completion.

        Raises:
            ContextLengthError: the prompt leaves no room for one new token.
            EngineError: the engine is closed or broke down.
        """

    def astream(self, req: ModelRequest) -> AsyncIterator[StreamItem]:
        """Token deltas in order, then the ModelResponse that holds all of them."""

    async def abort(self, rid: str) -> None:
        """End that request with stop reason "abort" and the tokens it has; else do nothing."""

    async def pause(self) -> None:
        """Return once no decode step is running; requests wait, none fails."""

    async def resume(self) -> None:
        """Go on from the tokens each request has."""

    def get_version(self) -> int: ...

    def set_version(self, version: int) -> None: ...

    async def update_weights(self, update: WeightUpdate) -> None:
        """Use new weights from the next token on, dropping caches made by the old ones.

        Raises:
            EngineError: the engine cannot take weights by this method; the message names it.
        """

    async def health(self) -> bool: ...

    async def close(self) -> None:
        """Fail what is running with EngineError, free memory and threads. May be called twice."""


@runtime_checkable
class ScoringEngine(Protocol):
    """What an engine may offer beside sampling: log-probs of ids that are already there."""

    async def score(
        self, input_ids: Sequence[int], num_scored: int, *, temperature: float = 1.0
    ) -> tuple[float, ...]:
        """Log-probs of the last ``num_scored`` ids, each given all before it.

        ids [5, 6, 7, 8], num_scored 2 -> log p(7 | 5 6), log p(8 | 5 6 7).

        Raises:
            ValueError: ``num_scored`` is not between 1 and the number of ids minus one.
            ContextLengthError: more ids than the context holds.
            EngineError: the engine is closed or broke down.
        """

    async def score_top(
        self, input_ids: Sequence[int], num_scored: int, num_top: int, *, temperature: float = 1.0
    ) -> tuple[tuple[tuple[int, float], ...], ...]:
        """At the same places, the ``num_top`` most likely ids with their log-probs, in order."""


def token_budget(gconfig: GenerationConfig, num_prompt_tokens: int, max_seq_len: int) -> int:
    """How many new tokens the request may sample; below 1 means that the prompt is too long."""
    limits = [max_seq_len - num_prompt_tokens]
    if gconfig.max_new_tokens is not None:
        limits.append(gconfig.max_new_tokens)
    if gconfig.max_tokens is not None:
        limits.append(gconfig.max_tokens - num_prompt_tokens)
    return min(limits)
