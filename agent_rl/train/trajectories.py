"""What a trajectory must be to be trained on: its keys, their shapes, and values that can be used.

A trajectory is what a workflow returned, padded to ``[rows, S]``; what is wrong with it is named
here, before anything is computed. Off the mask any value is allowed and none is kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from agent_rl.errors import WorkflowContractError
from agent_rl.train import teacher
from agent_rl.types import RolloutGroup, TensorDict

PER_TOKEN = ("attention_mask", "loss_mask", "logprobs", "versions", "temperatures")
PER_ROW = ("rewards", "baseline_rewards", "is_truncated")


def checked(
    trajectories: Sequence[TensorDict],
) -> tuple[list[dict[str, Tensor]], list[RolloutGroup]]:
    """The tensors of each trajectory, and its group.

    Raises:
        WorkflowContractError: there is none, no row has a token, a key is missing or has a wrong
            shape, or they have different keys.
    """
    if not trajectories:
        raise WorkflowContractError("a batch needs at least one trajectory")
    tables, groups = map(list, zip(*map(_checked, trajectories), strict=True))
    keys = {frozenset(table).difference(teacher.KEYS) for table in tables}
    if len(keys) > 1:
        raise WorkflowContractError(
            "trajectories of one batch must have the same keys; got "
            + " and ".join(sorted(str(sorted(key)) for key in keys))
        )
    if not any(bool(table["attention_mask"].any()) for table in tables):
        raise WorkflowContractError(
            "attention_mask is 0 everywhere in this batch: no row has a token"
        )
    return tables, groups


def _checked(trajectory: TensorDict) -> tuple[dict[str, Tensor], RolloutGroup]:
    """The tensors of one trajectory and its group; without a group each row is a rollout."""
    tensors = {
        key: value.detach().cpu()
        for key in ("input_ids", *PER_TOKEN, *teacher.KEYS, *PER_ROW)
        if isinstance(value := trajectory.get(key), Tensor)
    }
    for key in ("input_ids", "attention_mask", "loss_mask", "rewards"):
        if key not in tensors:
            raise WorkflowContractError(f"a trajectory has no tensor {key!r}; training needs it")
    shape = tensors["input_ids"].shape
    if len(shape) != 2 or not shape[0]:
        raise WorkflowContractError(f"input_ids must be [rows, tokens], got {tuple(shape)}")
    expected: Mapping[str, tuple[int, ...]] = {
        key: (shape[0],) if key in PER_ROW else tuple(shape) for key in tensors
    }
    for key, value in tensors.items():
        if key not in teacher.KEYS and tuple(value.shape) != expected[key]:
            raise WorkflowContractError(
                f"{key} must have the shape {expected[key]}, got {tuple(value.shape)}"
            )
    group = trajectory.get("rollout_group", RolloutGroup(row_counts=(1,) * shape[0]))
    if not isinstance(group, RolloutGroup) or group.num_rows != shape[0]:
        raise WorkflowContractError(f"rollout_group must count {shape[0]} rows, got {group!r}")
    return tensors, group


def check_first_tokens(mask: Tensor, lengths: tuple[int, ...]) -> None:
    starts = [start for start, n in zip(accumulate(lengths, initial=0), lengths, strict=False) if n]
    if bool(mask[starts].any()):
        raise WorkflowContractError(
            "loss_mask is 1 on the first token of a row; nothing predicts that token"
        )


def behaviour_logprobs(logprobs: Tensor | None, mask: Tensor) -> Tensor | None:
    if logprobs is None:
        return None
    kept = torch.where(mask, logprobs.float(), 0.0)
    if not bool(torch.isfinite(kept).all()):
        raise WorkflowContractError(
            "logprobs of a trained token (loss_mask 1) is nan or infinite; leave the key out if "
            "the engine gives no log-probs"
        )
    return kept


def sampling_temperatures(values: Tensor | None, mask: Tensor) -> Tensor | None:
    if values is None:
        return None
    kept = torch.where(mask, values.float(), 1.0)
    if not bool(((kept > 0.0) & torch.isfinite(kept)).all()):
        raise WorkflowContractError(
            "temperatures of trained tokens must be above 0 and finite; tokens that were chosen "
            "greedily have log-probs at temperature 1"
        )
    return kept
