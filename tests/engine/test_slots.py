"""Prefix matching and the seats of sequences, over a cache of one layer."""

from __future__ import annotations

import random

import torch

from agent_rl.engine.kv_cache import SlotCache
from agent_rl.engine.mailbox import Mailbox
from agent_rl.engine.sequence import Sequence
from agent_rl.engine.slots import SlotTable, common_prefix_length
from agent_rl.types import ModelRequest


def sequence(ids: list[int]) -> Sequence:
    """Made inside an event loop, which its mailbox belongs to."""
    return Sequence(
        request=ModelRequest(rid="r", input_ids=ids),
        mailbox=Mailbox(wants_deltas=False),
        end_ids=(),
        budget=9,
        ids=ids,
        num_prompt=len(ids),
        noise=random.Random(0),
    )


def compute(cache: SlotCache, table: SlotTable) -> None:
    """What a prefill does, with each token's own id as its key and value."""
    for slot, running in enumerate(table.running):
        for position in range(running.num_cached, len(running.ids) - 1):
            cache.aim([slot], torch.tensor([[position]]), position + 1)
            state = torch.full((1, 1, 1, 1), float(running.ids[position]))
            cache.update(state, state, 0)
        running.num_cached = len(running.ids) - 1


def keys(cache: SlotCache, slot: int, length: int) -> list[float]:
    return [float(value) for value in cache._keys[0][slot, 0, :length, 0]]


def test_common_prefix_length() -> None:
    assert common_prefix_length([5, 6, 7], [5, 6, 9]) == 2
    assert common_prefix_length([5, 6], [5, 6, 9]) == 2
    assert common_prefix_length([1], [2]) == 0
    assert common_prefix_length([], [2]) == 0
    same = list(range(1000))
    assert common_prefix_length(same, [*same[:777], 0, *same[778:]]) == 777


async def test_released_slots_are_reused_and_running_ones_move_together() -> None:
    cache = SlotCache(num_slots=3, max_len=64)
    table = SlotTable(cache, 3)
    a, b, c = (sequence([first, 11, 12, 13]) for first in (1, 2, 3))
    assert all(table.admit(s) for s in (a, b, c))
    compute(cache, table)
    table.release([a])
    assert table.running == [c, b]
    assert keys(cache, 0, 3) == [3, 11, 12]
    # What a left lies in slot 2; the next turn of a takes it over whole.
    next_a = sequence([1, 11, 12, 99, 5])
    assert table.admit(next_a)
    assert next_a.num_cached == 3
    assert keys(cache, 2, 3) == [1, 11, 12]


async def test_a_sequence_waits_for_a_prefix_that_is_being_computed() -> None:
    cache = SlotCache(num_slots=3, max_len=64)
    table = SlotTable(cache, 3)
    shared = list(range(20))
    assert table.admit(sequence([*shared, 50, 51]))
    second = sequence([*shared, 60, 61])
    assert not table.admit(second)
    compute(cache, table)
    assert table.admit(second)
    assert second.num_cached == 20
    assert keys(cache, 1, 20) == shared


async def test_drop_forgets_everything() -> None:
    cache = SlotCache(num_slots=2, max_len=64)
    table = SlotTable(cache, 2)
    first = sequence([1, 2, 3])
    table.admit(first)
    compute(cache, table)
    assert table.drop() == [first]
    assert first.num_cached == 0
    assert table.num_free == 2
    again = sequence([1, 2, 3])
    assert table.admit(again)
    assert again.num_cached == 0
