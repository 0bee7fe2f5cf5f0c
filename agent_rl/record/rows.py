"""Rows below one another: tensor dicts of different widths as one.

    ids [[1, 2, 3]] and [[4, 5, 6, 7, 8]]  ->  [[1, 2, 3, 0, 0], [4, 5, 6, 7, 8]]

Pads are 0 on the right (False in ``attention_mask``); they are never read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from agent_rl.types import RowValue, TensorDict

if TYPE_CHECKING:
    from torch import Tensor


def pad_concat(tables: Sequence[Mapping[str, RowValue]]) -> TensorDict:
    """All rows in order. Tensors are padded to the widest and joined on dimension 0, lists are
    appended; of any other value the first one is kept. The tables are not changed.

    Raises:
        ValueError: there is no table, or they differ in keys, dtypes or number of dimensions.
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
            joined[key] = _join([value for value in values if isinstance(value, Tensor)], key)
        elif isinstance(first, list):
            joined[key] = [item for value in values if isinstance(value, list) for item in value]
        else:
            joined[key] = first
    return joined


def _join(tensors: Sequence[Tensor], key: str) -> Tensor:
    """Writes into one tensor of the final size: each value is copied once."""
    first = tensors[0]
    if first.ndim == 0 or len({(tensor.ndim, tensor.dtype) for tensor in tensors}) > 1:
        shapes = ", ".join(f"{tensor.dtype} {list(tensor.shape)}" for tensor in tensors)
        raise ValueError(f"{key}: cannot join rows of {shapes}")
    num_rows = sum(tensor.shape[0] for tensor in tensors)
    widths = [max(sizes) for sizes in zip(*(tensor.shape[1:] for tensor in tensors), strict=True)]
    joined = first.new_zeros((num_rows, *widths))
    start = 0
    for tensor in tensors:
        end = start + tensor.shape[0]
        joined[(slice(start, end), *(slice(size) for size in tensor.shape[1:]))] = tensor
        start = end
    return joined
