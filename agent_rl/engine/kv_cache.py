"""SlotCache: keys and values of every sequence, in fixed slots that decode without copying.

One tensor for keys and one for values per layer, [slots, heads, capacity, head size]. Capacity
grows with the longest sequence up to ``max_len``, so memory is bounded by 2 * layers * slots *
heads * max_len * head size elements. New memory is zeroed: positions past a sequence's end are
masked, but a NaN there would survive the mask.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

_CAPACITY_STEP = 128
_GROWTH = 1.5


class SlotCache(Cache):  # type: ignore[misc]  # transformers is untyped
    """``aim`` says which slots and positions the next forward pass is about; then call the model.

    Example: slots 0 and 1 hold 5 and 3 tokens and decode one more each:
    ``aim(slots=[0, 1], positions_BT=[[5], [3]], length=6)``; attention sees [2, heads, 6, size].
    """

    def __init__(self, *, num_slots: int, max_len: int) -> None:
        super().__init__(layers=[])  # transformers' own layers stay unused
        self._num_slots = num_slots
        self._max_len = max_len
        self._capacity = 0
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def aim(self, slots: list[int], positions_BT: Tensor, length: int) -> None:
        """``length``: attention reads positions below it, the largest one written plus one."""
        if length > self._capacity:
            self._grow(length)
        device = positions_BT.device
        self._length = length
        self._slots_B1 = torch.tensor(slots, device=device)[:, None]
        self._positions_BT = positions_BT
        is_run = slots == list(range(slots[0], slots[0] + len(slots)))
        self._read: slice | Tensor = (
            slice(slots[0], slots[0] + len(slots)) if is_run else self._slots_B1[:, 0]
        )

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Called by each attention layer with the new [B, heads, T, size]; returns all of them."""
        if layer_idx == len(self._keys):
            self._keys.append(self._allocate(key_states))
            self._values.append(self._allocate(value_states))
        keys, values = self._keys[layer_idx], self._values[layer_idx]
        keys[self._slots_B1, :, self._positions_BT] = key_states.transpose(1, 2)
        values[self._slots_B1, :, self._positions_BT] = value_states.transpose(1, 2)
        return keys[self._read, :, : self._length], values[self._read, :, : self._length]

    def copy(self, source: int, target: int, length: int) -> None:
        """Give ``target`` the first ``length`` positions of ``source``."""
        for layer in (*self._keys, *self._values):
            layer[target, :, :length] = layer[source, :, :length]

    def swap(self, a: int, b: int, length_a: int, length_b: int) -> None:
        """Exchange two slots of which that many positions are in use."""
        for layer in (*self._keys, *self._values):
            held = layer[a, :, :length_a].clone()
            layer[a, :, :length_b] = layer[b, :, :length_b]
            layer[b, :, :length_a] = held

    def drop(self) -> None:
        """Forget everything: the weights that made it are gone. Frees the memory too."""
        self._keys.clear()
        self._values.clear()
        self._capacity = 0

    def _allocate(self, like_BHTD: Tensor) -> Tensor:
        _, num_heads, _, size = like_BHTD.shape
        return like_BHTD.new_zeros(self._num_slots, num_heads, self._capacity, size)

    def _grow(self, length: int) -> None:
        old = self._capacity
        steps = math.ceil(max(length, _GROWTH * old) / _CAPACITY_STEP)
        self._capacity = min(steps * _CAPACITY_STEP, self._max_len)
        for layers in (self._keys, self._values):
            for index, layer in enumerate(layers):
                layers[index] = self._allocate(layer)
                layers[index][:, :, :old] = layer
