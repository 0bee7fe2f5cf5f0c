"""DataLoader: an endless, seeded, resumable walk over a dataset, item by item.

Each epoch is one permutation that depends on the seed and the epoch only, so the state is two
integers. An item is given exactly once per epoch, also across a save and restore at any point; an
epoch may end in the middle of a batch.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from agent_rl.errors import CheckpointError, DatasetError, WrongTypeError, shown
from agent_rl.types import JsonObject


class DataSource(Protocol):
    """What ``prepare_batch`` draws from; DataLoader is one."""

    batch_size: int
    num_items: int

    def take(self, count: int) -> list[JsonObject]: ...


class DataLoader:
    """
    Args:
        dataset: rows of any kind that can be indexed; each is given out as a new dict.
        batch_size: groups in one training batch.
        shuffle: False keeps the order of the dataset in every epoch.

    Raises:
        DatasetError: fewer rows than one batch needs.
    """

    def __init__(
        self,
        dataset: Sequence[Mapping[str, object]],
        batch_size: int,
        *,
        shuffle: bool = True,
        seed: int = 1,
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}; it must be at least 1")
        if len(dataset) < batch_size:
            raise DatasetError(
                f"the dataset has {len(dataset)} rows but one batch needs {batch_size}; add rows "
                "or lower rollout.consumer_batch_size"
            )
        self.batch_size = batch_size
        self.num_items = len(dataset)
        self._dataset = dataset
        self._shuffle = shuffle
        self._seed = seed
        self._epoch = 0
        self._position = 0
        self._order = self._permutation()

    def __len__(self) -> int:
        """Full batches in one epoch."""
        return self.num_items // self.batch_size

    def take(self, count: int) -> list[JsonObject]:
        """The next ``count`` items; a new epoch begins where one ends."""
        items = []
        for _ in range(count):
            if self._position == self.num_items:
                self._epoch, self._position = self._epoch + 1, 0
                self._order = self._permutation()
            items.append(dict(self._dataset[self._order[self._position]]))
            self._position += 1
        return items

    def state_dict(self) -> JsonObject:
        return {"epoch": self._epoch, "position": self._position, "num_items": self.num_items}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where ``state_dict`` was called.

        Raises:
            CheckpointError: the state belongs to a dataset of another size.
        """
        if state["num_items"] != self.num_items:
            raise CheckpointError(
                f"the saved dataloader walked over {state['num_items']} rows and this dataset has "
                f"{self.num_items}; resume with the same dataset"
            )
        self._epoch, self._position = int(state["epoch"]), int(state["position"])
        self._order = self._permutation()

    def _permutation(self) -> list[int]:
        order = list(range(self.num_items))
        if self._shuffle:
            random.Random(f"{self._seed}/{self._epoch}").shuffle(order)
        return order


def patience(dataloader: DataSource) -> int:
    """Groups that may end in a row without one acceptance: two passes over the data, but at least
    8 and at most 64 batches.

    Raises:
        WrongTypeError: it is another library's loader.
    """
    if not hasattr(dataloader, "take"):
        raise WrongTypeError(
            "prepare_batch draws from agent_rl.rollout.dataloader.DataLoader(rows, batch_size), "
            f"not from {shown(dataloader)}"
        )
    size = dataloader.batch_size
    return min(max(2 * dataloader.num_items, 8 * size), 64 * size)


def as_data(rows: Sequence[JsonObject]) -> list[JsonObject]:
    """Raises WrongTypeError for one row in place of a list of them."""
    if isinstance(rows, Mapping | str):
        raise WrongTypeError(f"a batch is a list of rows, not {shown(rows)}; write [row] for one")
    return [as_native(row) for row in rows]


def as_native(value: object) -> Any:
    """A copy with numpy arrays and scalars as lists and Python numbers, also inside lists and
    dicts: rows of a Parquet file have them, and templates (``if tools``) and JSON break on them.
    Objects of other classes are not copied."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return [as_native(item) for item in value.tolist()]
    if isinstance(value, Mapping):
        return {key: as_native(item) for key, item in value.items()}
    if isinstance(value, list):
        return [as_native(item) for item in value]
    if isinstance(value, tuple) and type(value) is tuple:
        return tuple(as_native(item) for item in value)
    return value
