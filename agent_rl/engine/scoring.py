"""Scoring: log-probs of ids that are already there, under the weights as they are now.

A ``ScoreJob`` is one step of the decode thread: the weights cannot change within it. The sequence
goes through the model in chunks, so a long one needs no more memory than a short one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

_CHUNK_TOKENS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredToken:
    """``top_logprobs``: the most likely ids of that place with their log-probs."""

    logprob: float
    top_logprobs: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScoreJob:
    """Of the last ``num_scored`` ids, each given all before it; the first id has no log-prob.

    ids [5, 6, 7, 8], num_scored 2 -> log p(7 | 5 6), log p(8 | 5 6 7).
    """

    input_ids: tuple[int, ...]
    num_scored: int
    temperature: float = 1.0
    num_top: int = 0
    result: Future[list[ScoredToken]] = field(default_factory=Future)

    def __post_init__(self) -> None:
        if not 1 <= self.num_scored < len(self.input_ids):
            raise ValueError(
                f"num_scored is {self.num_scored}; with {len(self.input_ids)} ids it must be at "
                f"least 1 and below that: nothing predicts the first id"
            )
        if self.temperature <= 0.0:
            raise ValueError(f"temperature is {self.temperature}; it must be above 0")

    def chunks(self) -> Iterator[tuple[int, int, int]]:
        """(start, end, scored): inputs ``ids[start:end]``, of which the last ``scored`` count.

        The input at place p predicts the id at p + 1, so the last id is no input.
        """
        last = len(self.input_ids) - 1
        first_scored = last - self.num_scored
        for start in range(0, last, _CHUNK_TOKENS):
            end = min(start + _CHUNK_TOKENS, last)
            yield start, end, max(0, end - max(start, first_scored))


def read_scores(
    logits_SV: Tensor, ids: Sequence[int], temperature: float, num_top: int
) -> list[ScoredToken]:
    """Row i of the logits predicts ``ids[i]``."""
    logprobs_SV = (logits_SV.float() / temperature).log_softmax(-1)
    rows = logprobs_SV.gather(1, logits_SV.new_tensor(ids).long()[:, None])[:, 0].tolist()
    top = logprobs_SV.topk(num_top, dim=-1)
    pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
    return [
        ScoredToken(logprob=logprob, top_logprobs=tuple(zip(top_ids, top_values, strict=True)))
        for logprob, (top_ids, top_values) in zip(rows, pairs, strict=True)
    ]
