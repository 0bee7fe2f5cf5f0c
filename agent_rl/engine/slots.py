"""Who sits in which slot: running sequences in slots 0..n-1, behind them what finished ones left.

Invariant: ``cache`` holds, in slot i, keys and values of the first ``num_cached`` tokens of
sequence i, or of all tokens of the remains there. Remains are kept until the slot is needed, so a
prompt that begins like an earlier or a running sequence computes only the rest.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from agent_rl.engine.kv_cache import SlotCache
from agent_rl.engine.sequence import Sequence

# A sequence waits for a prefix that is being computed if it saves at least so many tokens.
_WORTH_WAITING = 8


@dataclass(slots=True, kw_only=True)
class Remains:
    """What a finished sequence left in a slot; ``left_at`` orders them by age, 0 is empty."""

    ids: list[int] = field(default_factory=list)
    left_at: int = 0


class SlotTable:
    def __init__(self, cache: SlotCache, num_slots: int) -> None:
        self.running: list[Sequence] = []
        self._cache = cache
        self._remains = [Remains() for _ in range(num_slots)]
        self._clock = itertools.count(1)

    @property
    def num_free(self) -> int:
        return len(self._remains) - len(self.running)

    def admit(self, sequence: Sequence) -> bool:
        """Seat the sequence and give it the longest prefix that some slot holds.

        False: it should wait, because a running sequence is about to compute a longer one.
        """
        wanted = sequence.ids[:-1]
        source, length = self._longest_prefix(wanted)
        for other in self.running:
            coming = common_prefix_length(wanted, other.ids[:-1]) if other.num_missing else 0
            if coming >= length + _WORTH_WAITING:
                return False
        seat = len(self.running)
        victim = self._victim(source, length)
        source = {victim: seat, seat: victim}.get(source, source)
        self._swap(victim, seat)
        if source != seat and length:
            self._cache.copy(source, seat, length)
            self._remains[source].left_at = next(self._clock)
        self._remains[seat] = Remains()
        sequence.num_cached = length
        self.running.append(sequence)
        return True

    def release(self, finished: list[Sequence]) -> None:
        """Free their slots; the running ones move together, the finished leave their remains."""
        if not finished:
            return
        for slot, sequence in enumerate(self.running):
            if sequence in finished:
                ids = sequence.ids[: sequence.num_cached]
                self._remains[slot] = Remains(ids=ids, left_at=next(self._clock))
        is_kept = [sequence not in finished for sequence in self.running]
        num_kept = sum(is_kept)
        holes = [slot for slot in range(num_kept) if not is_kept[slot]]
        movers = [slot for slot in range(num_kept, len(self.running)) if is_kept[slot]]
        for hole, mover in zip(holes, movers, strict=True):
            in_use = self.running[mover].num_cached
            self._cache.swap(hole, mover, len(self._remains[hole].ids), in_use)
            self._remains[mover], self._remains[hole] = self._remains[hole], Remains()
            self.running[hole] = self.running[mover]
        del self.running[num_kept:]

    def drop(self) -> list[Sequence]:
        """Forget all keys and values; returns the running sequences, which must start over."""
        evicted, self.running = self.running, []
        self._remains = [Remains() for _ in self._remains]
        self._cache.drop()
        for sequence in evicted:
            sequence.num_cached = 0
        return evicted

    def _longest_prefix(self, wanted: list[int]) -> tuple[int, int]:
        best = (0, 0)
        for slot, remains in enumerate(self._remains):
            ids = remains.ids
            if slot < len(self.running):
                ids = self.running[slot].ids[: self.running[slot].num_cached]
            length = common_prefix_length(wanted, ids)
            if length > best[1]:
                best = (slot, length)
        return best

    def _victim(self, source: int, length: int) -> int:
        """The free slot to give up: the source itself if it is used whole, else the oldest."""
        free = range(len(self.running), len(self._remains))
        if source in free and length == len(self._remains[source].ids) and length:
            return source
        oldest_first = sorted(free, key=lambda slot: self._remains[slot].left_at)
        is_only_source = len(oldest_first) > 1 and oldest_first[0] == source
        return oldest_first[1] if is_only_source else oldest_first[0]

    def _swap(self, a: int, b: int) -> None:
        """Exchange two free slots."""
        if a != b:
            remains = self._remains
            self._cache.swap(a, b, len(remains[a].ids), len(remains[b].ids))
            remains[a], remains[b] = remains[b], remains[a]


def common_prefix_length(a: list[int], b: list[int]) -> int:
    """[5, 6, 7] and [5, 6, 9] -> 2. Bisection, because comparing whole slices runs in C."""
    low, high = 0, min(len(a), len(b))
    if not high or a[0] != b[0]:
        return 0
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
