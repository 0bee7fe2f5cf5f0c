"""What a teacher says of sampled tokens: the rows of a batch that are distilled, on-policy.

The teacher is another model, or the same one with a hint in its prompt; it scored the tokens where
they were sampled. Index i speaks of token i and nan says that there is no teacher, so rows with and
without one stand in the same batch. Knows no student and no loss.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from agent_rl.errors import WorkflowContractError

KEYS = ("teacher_logprobs", "teacher_topk_ids", "teacher_topk_logprobs")
"""[rows, S], [rows, S, k] twice; a trajectory without a teacher leaves them out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Teacher:
    """``logprobs`` is nan off the loss mask."""

    logprobs: Tensor  # [T] float32, of the sampled token
    topk_ids: Tensor | None = None  # [T, k] int64
    topk_logprobs: Tensor | None = None  # [T, k] float32

    @property
    def is_known(self) -> Tensor:
        """[T] trained tokens that the teacher speaks of."""
        return torch.isfinite(self.logprobs)

    def narrowed(self, k: int) -> Teacher:
        """With the first ``k`` of the likeliest tokens; 0: with none.

        Raises:
            WorkflowContractError: a token that the teacher speaks of has fewer than ``k``.
        """
        if not k:
            return Teacher(logprobs=self.logprobs)
        given = 0 if self.topk_ids is None else self.topk_ids.shape[1]
        if self.topk_ids is None or self.topk_logprobs is None or given < k:
            raise WorkflowContractError(
                f"actor.distillation.topk={k}, but the trajectories have {given} likeliest tokens "
                f"({KEYS[1]}, {KEYS[2]})"
            )
        narrowed = Teacher(
            logprobs=self.logprobs,
            topk_ids=self.topk_ids[:, :k],
            topk_logprobs=self.topk_logprobs[:, :k],
        )
        if bool((self.is_known & ~narrowed.is_topk_known).any()):
            raise WorkflowContractError(
                f"actor.distillation.topk={k}, but some tokens with {KEYS[0]} have no {KEYS[2]}"
            )
        return narrowed

    @property
    def is_topk_known(self) -> Tensor:
        """[T] of these, the ones with log-probs of the k likeliest tokens."""
        if self.topk_logprobs is None:
            return torch.zeros_like(self.is_known)
        return self.is_known & torch.isfinite(self.topk_logprobs).all(1)


def join_teachers(
    tables: Sequence[Mapping[str, Tensor]], attended: Sequence[Tensor], mask: Tensor
) -> Teacher | None:
    """The teachers of trajectories one after the other, padding left out; None: none has one.

    ``attended`` are their attention masks, ``mask`` [T] the trained tokens.

    Raises:
        WorkflowContractError: a shape is wrong, or a log-prob of a trained token is infinite.
    """
    if not any(key in table for table in tables for key in KEYS):
        return None
    width = _topk_width(tables)
    logprobs = _join("teacher_logprobs", tables, attended, torch.full((), torch.nan))
    logprobs = torch.where(mask, logprobs, torch.nan)
    if bool(torch.isinf(logprobs).any()):
        raise WorkflowContractError(
            "teacher_logprobs of a trained token is infinite; nan says that there is no teacher"
        )
    if width is None:
        return Teacher(logprobs=logprobs)
    ids = _join("teacher_topk_ids", tables, attended, torch.zeros(width, dtype=torch.int64))
    topk = _join("teacher_topk_logprobs", tables, attended, torch.full((width,), torch.nan))
    # Whatever stands for an id where the teacher says nothing: it is looked up all the same.
    ids = torch.where(torch.isfinite(topk), ids, 0)
    return Teacher(logprobs=logprobs, topk_ids=ids, topk_logprobs=topk)


def _join(
    key: str, tables: Sequence[Mapping[str, Tensor]], attended: Sequence[Tensor], filler: Tensor
) -> Tensor:
    parts = []
    for table, mask in zip(tables, attended, strict=True):
        if key in table:
            parts.append(table[key][mask].to(filler.dtype))
        else:
            parts.append(filler.expand(int(mask.sum()), *filler.shape))
    return torch.cat(parts)


def _topk_width(tables: Sequence[Mapping[str, Tensor]]) -> int | None:
    """k of the top-k keys; None: no trajectory has them."""
    _, ids_key, logprobs_key = KEYS
    widths = set()
    for table in tables:
        given = {key: tuple(table[key].shape) for key in KEYS if key in table}
        shape = tuple(table["input_ids"].shape)
        if not given:
            continue
        if given.get(KEYS[0]) != shape:
            raise WorkflowContractError(f"{KEYS[0]} must have the shape {shape}, got {given}")
        topk = {given.get(ids_key), given.get(logprobs_key)}
        if topk == {None}:
            continue
        (size, *others) = topk
        if others or size is None or len(size) != 3 or size[:2] != shape:
            raise WorkflowContractError(
                f"{ids_key} and {logprobs_key} must both have the shape ({shape[0]}, {shape[1]}, "
                f"k), got {given}"
            )
        widths.add(size[2])
    if len(widths) > 1:
        raise WorkflowContractError(f"{ids_key} must have one k in a batch, got {sorted(widths)}")
    return next(iter(widths), None)
