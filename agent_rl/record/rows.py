"""Rows below one another: tensor dicts of different widths as one.

    ids [[1, 2, 3]] and [[4, 5, 6, 7, 8]]  ->  [[1, 2, 3, 0, 0], [4, 5, 6, 7, 8]]

Pads are 0 on the right (False in ``attention_mask``); they are never read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from agent_rl.types import TensorDict

if TYPE_CHECKING:
    from torch import Tensor


def pad_concat(tables: Sequence[TensorDict]) -> TensorDict:
    """All rows in order. Tensors are padded to the widest and joined on dimension 0, lists are
    appended; of any other value the first one is kept.

    Raises:
        ValueError: there is no table, or they have different keys.
    """
    from torch import Tensor

    if not tables:
        raise ValueError("there are no rows to join")
    for table in tables:
        if table.keys() != tables[0].keys():
            raise ValueError(f"rows have different keys: {sorted(tables[0])} and {sorted(table)}")
    joined: TensorDict = {}
    for key, first in tables[0].items():
        values = [table[key] for table in tables]
        if isinstance(first, Tensor):
            joined[key] = _join([value for value in values if isinstance(value, Tensor)])
        elif isinstance(first, list):
            joined[key] = [item for value in values if isinstance(value, list) for item in value]
        else:
            joined[key] = first
    return joined


def _join(tensors: Sequence[Tensor]) -> Tensor:
    import torch

    if tensors[0].ndim < 2:
        return torch.cat([tensor.reshape(-1) for tensor in tensors])
    width = max(tensor.shape[1] for tensor in tensors)
    padded = []
    for tensor in tensors:
        rows, length, *rest = tensor.shape
        padded.append(torch.cat([tensor, tensor.new_zeros(rows, width - length, *rest)], dim=1))
    return torch.cat(padded)
