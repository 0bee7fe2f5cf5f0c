"""Rows of collected trajectories -> packed tensors, and packed tensors -> micro-batches.

Invariants: rows keep their order and are stored without padding, one after the other; every
per-token tensor is ``[T]`` and index i speaks of token i (0, -1 or False off the mask). The shift
by one, from a token to the position that predicts it, happens in ``micro_batches``, nowhere else.
Knows no model and no loss.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from agent_rl.train import teacher, tree
from agent_rl.train.advantage import last_places
from agent_rl.train.teacher import Teacher
from agent_rl.train.trajectories import (
    PER_ROW,
    PER_TOKEN,
    behaviour_logprobs,
    check_first_tokens,
    checked,
    sampling_temperatures,
)
from agent_rl.types import TensorDict, TrajBatchMeta


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """``R`` rows with ``T`` tokens in all.

    A row whose reward is not finite is trained where a teacher speaks, and nowhere else.
    """

    token_ids: Tensor  # [T] int64
    loss_mask: Tensor  # [T] bool
    logprobs: Tensor | None  # [T] float32, behaviour log-probs
    versions: Tensor | None  # [T] int64
    temperatures: Tensor | None  # [T] float32, that logprobs are stated under; 1 off the mask
    teacher: Teacher | None
    rewards: Tensor  # [R] float64; nan: not known
    baseline_rewards: Tensor | None  # [R] float64, what the workflow gave to compare with
    is_truncated: Tensor | None  # [R] bool: the row ended at a limit, not by the model's choice
    lengths: tuple[int, ...]
    meta: TrajBatchMeta

    @classmethod
    def from_trajectories(cls, trajectories: Sequence[TensorDict]) -> Batch:
        """Merge trajectories in order; padding on either side of a row is left out.

        Keys: input_ids, attention_mask, loss_mask [rows, S] and rewards [rows]; optional are
        logprobs, versions, temperatures, teacher_logprobs [rows, S], teacher_topk_ids and
        teacher_topk_logprobs [rows, S, k], baseline_rewards and is_truncated [rows], and
        rollout_group.

        Raises:
            WorkflowContractError: a key is missing or has a wrong shape, a trained token has no
                finite log-prob, the first token of a row is marked as trained, or no row has any.
        """
        tables, rollout_groups = checked(trajectories)
        attended = [table["attention_mask"].bool() for table in tables]
        packed = {
            key: torch.cat([table[key][m] for table, m in zip(tables, attended, strict=True)])
            for key in ("input_ids", *PER_TOKEN)
            if key in tables[0]
        }
        lengths = tuple(int(n) for mask in attended for n in mask.sum(1))
        per_row = {
            key: torch.cat([table[key] for table in tables]) for key in PER_ROW if key in tables[0]
        }
        rewards = per_row["rewards"].double()
        known = torch.isfinite(rewards)
        mask = packed["loss_mask"].bool()
        taught = teacher.join_teachers(tables, attended, mask)
        is_taught = torch.zeros_like(mask) if taught is None else taught.is_known
        mask &= _per_token(known, lengths) | is_taught
        check_first_tokens(mask, lengths)
        return cls(
            token_ids=packed["input_ids"].long(),
            loss_mask=mask,
            logprobs=behaviour_logprobs(packed.get("logprobs"), mask),
            versions=_masked(packed.get("versions"), mask, -1),
            temperatures=sampling_temperatures(packed.get("temperatures"), mask),
            teacher=taught,
            rewards=torch.where(known, rewards, torch.nan),
            baseline_rewards=_as(torch.float64, per_row.get("baseline_rewards")),
            is_truncated=_as(torch.bool, per_row.get("is_truncated")),
            lengths=lengths,
            meta=TrajBatchMeta(
                traj_group_sizes=tuple(group.num_rows for group in rollout_groups),
                traj_seqlens=tuple(mask.shape[1] for mask in attended),
                rollout_groups=tuple(rollout_groups),
            ),
        )

    @property
    def num_rows(self) -> int:
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def starts(self) -> tuple[int, ...]:
        """Index of the first token of each row."""
        return tuple(accumulate(self.lengths[:-1], initial=0))

    @property
    def rows(self) -> Tensor:
        """[T] the row of each token."""
        return _per_token(torch.arange(self.num_rows), self.lengths)

    @property
    def rollouts(self) -> Tensor:
        """[R] the logical rollout of each row, counted over the whole batch."""
        counts = [count for group in self.meta.rollout_groups for count in group.row_counts]
        return torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))

    @property
    def groups(self) -> Tensor:
        """[R] the trajectory (one prompt's group) of each row."""
        sizes = torch.tensor(self.meta.traj_group_sizes)
        return torch.repeat_interleave(torch.arange(len(sizes)), sizes)

    @property
    def rollout_groups(self) -> Tensor:
        """[logical rollouts] the trajectory of each."""
        counts = torch.tensor([group.num_rollouts for group in self.meta.rollout_groups])
        return torch.repeat_interleave(torch.arange(len(counts)), counts)

    @property
    def rewarded(self) -> Tensor:
        """[T] trained tokens of rows with a known reward."""
        return self.loss_mask & self.to_tokens(torch.isfinite(self.rewards))

    def truncated(self, end_ids: Sequence[int]) -> Tensor:
        """[R] rows that ended at a limit: as given, or by their last trained token.

        Without ``is_truncated`` in the trajectories, a row that does not end with one of the ids.
        """
        if self.is_truncated is not None:
            return self.is_truncated
        if not end_ids:
            return torch.zeros(self.num_rows, dtype=torch.bool)
        last = last_places(self.loss_mask, self.rows, self.num_rows)
        is_end = torch.isin(self.token_ids, torch.tensor(end_ids))
        return (last >= 0) & ~is_end[last.clamp(min=0)]

    def without_rows(self, is_left_out: Tensor) -> Batch:
        """No token of these rows is trained."""
        return replace(self, loss_mask=self.loss_mask & ~self.to_tokens(is_left_out))

    def without_teacher(self) -> Batch:
        """As if no trajectory had a teacher."""
        return replace(self, teacher=None, loss_mask=self.rewarded)

    def without_choices(self) -> Batch:
        """For passes that need no log-probs but those of the sampled tokens."""
        if self.teacher is None:
            return self
        return replace(self, teacher=self.teacher.narrowed(0))

    def to_tokens(self, per_row: Tensor) -> Tensor:
        """[R] -> [T]."""
        return _per_token(per_row, self.lengths)

    def is_in(self, rows: Sequence[int]) -> Tensor:
        """[T] whether the token's row is one of these."""
        chosen = torch.zeros(self.num_rows, dtype=torch.bool)
        chosen[rows] = True
        return self.to_tokens(chosen)


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """One forward pass: ``N`` nodes, ``K`` of which are predicted, for ``M`` trained tokens.

    Rows that share a trained token share its prediction, so ``K <= M``. Token ``tokens[m]`` of the
    batch has the log-prob of ``targets[k]`` after node ``predictors[k]``, with ``k = slots[m]``.
    """

    input_ids: Tensor  # [N]
    positions: Tensor  # [N]
    segments: tuple[tree.Segment, ...]
    predictors: Tensor  # [K]
    targets: Tensor  # [K]
    temperatures: Tensor | None  # [K]; None: that of the run
    choices: Tensor | None  # [K, k] other ids whose log-probs are wanted: the teacher's likeliest
    slots: Tensor  # [M]
    tokens: Tensor  # [M]
    nodes: Tensor  # [M] the node of each trained token itself
    rows: Tensor  # [M] row of the batch; every trained token of a row is in the same micro-batch

    def to(self, device: torch.device) -> MicroBatch:
        tensors: dict[str, Any] = {
            name: value.to(device)
            for name in self.__slots__
            if isinstance(value := getattr(self, name), Tensor)
        }
        return replace(self, **tensors)


def micro_batches(
    batch: Batch, rows: Sequence[int], *, max_tokens: int, share_prefixes: bool
) -> list[MicroBatch]:
    """Forward passes that together train each token of these rows once. Deterministic.

    Rows without a trained token are left out; a row is never divided.
    """
    token_ids, mask, starts = batch.token_ids.numpy(), batch.loss_mask.numpy(), batch.starts
    chosen = []
    for row in rows:
        start = starts[row]
        trained = np.flatnonzero(mask[start : start + batch.lengths[row]])
        if len(trained):
            chosen.append(_Row(row, start, trained))
    forests = tree.plant(
        # What follows the last trained token of a row influences nothing.
        [token_ids[row.start : row.start + row.trained[-1] + 1] for row in chosen],
        max_tokens=max_tokens,
        share_prefixes=share_prefixes,
    )
    return [_micro_batch(forest, [chosen[i] for i in forest.rows], batch) for forest in forests]


class _Row(NamedTuple):
    number: int
    start: int
    trained: tree.IntArray
    """Indices inside the row."""


def _micro_batch(forest: tree.Forest, rows: Sequence[_Row], batch: Batch) -> MicroBatch:
    nodes, predictors, tokens, numbers = [], [], [], []
    for row_nodes, row in zip(forest.nodes, rows, strict=True):
        nodes.append(row_nodes[row.trained])
        predictors.append(row_nodes[row.trained - 1])  # the next-token shift
        tokens.append(row.start + row.trained)
        numbers.append(np.full_like(row.trained, row.number))
    trained, places = np.concatenate(nodes), np.concatenate(tokens)
    temperatures = batch.temperatures
    topk_ids = None if batch.teacher is None else batch.teacher.topk_ids
    if topk_ids is not None:  # hints differ by row, and with them what a teacher finds likely
        keys = places[:, None]
    elif temperatures is None:
        keys = trained[:, None]
    else:  # rows share a prediction only where they state it under one temperature
        keys = np.stack([trained, temperatures[torch.from_numpy(places)].numpy()], axis=1)
    _, first, slots = np.unique(keys, axis=0, return_index=True, return_inverse=True)
    first_places = torch.from_numpy(places[first])
    return MicroBatch(
        input_ids=torch.from_numpy(forest.token_ids),
        positions=torch.from_numpy(forest.positions),
        segments=forest.segments,
        predictors=torch.from_numpy(np.concatenate(predictors)[first]),
        targets=torch.from_numpy(forest.token_ids[trained[first]]),
        temperatures=None if temperatures is None else temperatures[first_places],
        choices=None if topk_ids is None else topk_ids[first_places],
        slots=torch.from_numpy(slots.reshape(-1)),
        tokens=torch.from_numpy(places),
        nodes=torch.from_numpy(trained),
        rows=torch.from_numpy(np.concatenate(numbers)),
    )


def idle_micro_batch(batch: Batch) -> MicroBatch:
    """A pass over one token that trains nothing: its gradient is 0 for every parameter."""
    nothing = torch.zeros(0, dtype=torch.int64)
    one = torch.zeros(1, dtype=torch.int64)
    topk_ids = None if batch.teacher is None else batch.teacher.topk_ids
    return MicroBatch(
        input_ids=one,
        positions=one,
        segments=(tree.Segment(start=0, end=1),),
        predictors=nothing,
        targets=nothing,
        temperatures=None if batch.temperatures is None else batch.temperatures[:0],
        choices=None if topk_ids is None else topk_ids[:0],
        slots=nothing,
        tokens=nothing,
        nodes=nothing,
        rows=nothing,
    )


def minibatches(batch: Batch, count: int) -> list[list[int]]:
    """Rows of each optimizer step: up to ``count`` parts of about equally many trained tokens."""
    trained = torch.zeros(batch.num_rows, dtype=torch.int64)
    trained.index_add_(0, batch.rows, batch.loss_mask.long())
    return balanced(batch, range(batch.num_rows), trained.tolist(), count)


def balanced(
    batch: Batch, rows: Iterable[int], sizes: Sequence[int], count: int
) -> list[list[int]]:
    """The rows in up to ``count`` parts whose sums of ``sizes`` [R] are about equal.

    A trajectory (one prompt's group, which shares a prefix) stays together where there are enough
    of them; a logical rollout always does. Longest first to the lightest part; rows in order.
    """
    groups, rollouts = batch.groups.tolist(), batch.rollouts.tolist()
    rows = list(rows)
    units = groups if len({groups[row] for row in rows}) >= count else rollouts
    members: dict[int, list[int]] = {}
    for row in rows:
        members.setdefault(units[row], []).append(row)
    weights = {unit: sum(sizes[row] for row in mine) for unit, mine in members.items()}
    parts: list[list[int]] = [[] for _ in range(min(count, len(members)))]
    loads = [0] * len(parts)
    for unit in sorted(members, key=lambda unit: (-weights[unit], unit)):
        lightest = min(range(len(parts)), key=lambda part: (loads[part], len(parts[part]), part))
        parts[lightest] += members[unit]
        loads[lightest] += weights[unit]
    return sorted(sorted(part) for part in parts)


def _per_token(per_row: Tensor, lengths: tuple[int, ...]) -> Tensor:
    return torch.repeat_interleave(per_row, torch.tensor(lengths, device=per_row.device))


def _as(dtype: torch.dtype, values: Tensor | None) -> Tensor | None:
    return None if values is None else values.to(dtype)


def _masked(values: Tensor | None, mask: Tensor, filler: int) -> Tensor | None:
    return None if values is None else torch.where(mask, values.long(), filler)
