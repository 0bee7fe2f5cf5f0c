"""How ranks join their metrics: they gather each other's sums, and each adds them up alike.

One gather of small objects takes the place of a collective for each key, so ranks with different
keys cannot wait for one another for ever, and CPU tensors work under every backend. Sums are added
in rank order: all ranks of a group get identical numbers, equal to those of one process that saw
all the data.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from agent_rl.stats.accumulators import ReduceType

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What one rank tells the others about one key. ``ranks``: the key's own group, if it has one.

    ``denominator`` is None for scalars and for denominators, which are sums of themselves.
    """

    reduce_type: ReduceType
    denominator: str | None = None
    ranks: tuple[int, ...] | None = None
    total: float
    count: int
    low: float = math.inf
    high: float = -math.inf

    @property
    def kind(self) -> tuple[str, str | None, bool]:
        """What must be the same on all ranks that have the key."""
        return self.reduce_type.value, self.denominator, self.ranks is not None


Entries: TypeAlias = Mapping[str, Entry]


def reduce_entries(
    local: Entries,
    groups: Mapping[str, ProcessGroup],
    reduce_group: ProcessGroup | None,
    key_sync_group: ProcessGroup | None,
) -> dict[str, float]:
    """The exported numbers, in one order on all ranks. ``groups``: own groups of local keys.

    A key is reduced over its own group, else over ``reduce_group``, else not at all.

    Raises:
        ValueError: ranks recorded one key in different ways ("Inconsistent stats metadata").
        RuntimeError: a key has a group of its own, and a rank that lacks the key is out of reach.
    """
    sync_group = reduce_group if key_sync_group is None else key_sync_group
    by_rank = gather(local, sync_group)
    _check_kinds(by_rank)
    _check_reach(by_rank, has_key_sync=key_sync_group is not None)
    for group in _groups_beyond(by_rank, groups):
        by_rank = {**gather(local, group), **by_rank}
    _check_kinds(by_rank)
    default_ranks = _ranks(reduce_group)
    result: dict[str, float] = {}
    for key in sorted({key for entries in by_rank.values() for key in entries}):
        ranks = _ranks_of_key(key, by_rank, default_ranks)
        found = [by_rank[rank][key] for rank in ranks if key in by_rank.get(rank, {})]
        if found:
            result |= exported(key, found)
    return result


def exported(key: str, entries: list[Entry]) -> dict[str, float]:
    """The numbers of one key over all its entries. A mean of nothing is left out, never 0.

    scalar 0.5 (count 1) and 1.0 (count 3) -> {k: 0.875, k__count: 4}
    """
    kind = entries[0].reduce_type
    total = sum(entry.total for entry in entries)
    count = sum(entry.count for entry in entries)
    if kind is ReduceType.SUM:
        return {key: total}
    if count == 0:
        return {}
    if kind is ReduceType.SCALAR:
        return {key: total / count, f"{key}__count": count}
    numbers = {
        "avg": total / count,
        "min": _extremum(min, [entry.low for entry in entries]),
        "max": _extremum(max, [entry.high for entry in entries]),
    }
    if kind is ReduceType.AVG_MIN_MAX:
        return {f"{key}/{name}": number for name, number in numbers.items()}
    return {key: numbers[kind.value]}


def _extremum(choose: Callable[[list[float]], float], values: list[float]) -> float:
    """NaN anywhere gives NaN; Python's own min and max depend on where it stands."""
    return math.nan if any(map(math.isnan, values)) else choose(values)


def gather(value: T, group: ProcessGroup | None) -> dict[int, T]:
    """The value of every rank of the group, by global rank; without a group only our own."""
    if group is None:
        return {own_rank(): value}
    import torch.distributed as dist

    ranks = dist.get_process_group_ranks(group)
    values: list[T] = [value] * len(ranks)
    dist.all_gather_object(values, value, group=group)
    return dict(zip(ranks, values, strict=True))


def own_rank() -> int:
    """The global rank; 0 without torch.distributed. Does not load torch."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return 0
    rank: int = dist.get_rank()
    return rank


def ranks_of_group(group: ProcessGroup) -> tuple[int, ...]:
    import torch.distributed as dist

    return tuple(dist.get_process_group_ranks(group))


def _ranks(group: ProcessGroup | None) -> tuple[int, ...]:
    return (own_rank(),) if group is None else ranks_of_group(group)


def _ranks_of_key(
    key: str, by_rank: Mapping[int, Entries], default: tuple[int, ...]
) -> tuple[int, ...]:
    """The key's own group that we are in, also where only another rank recorded the key."""
    holders = [entries[key] for entries in by_rank.values() if key in entries]
    own = [entry.ranks for entry in holders if entry.ranks is not None]
    if not own:
        return default
    return next((ranks for ranks in own if own_rank() in ranks), ())


def _groups_beyond(
    by_rank: Mapping[int, Entries], groups: Mapping[str, ProcessGroup]
) -> Iterable[ProcessGroup]:
    """Own groups of keys that reach past the ranks gathered so far, in an order all ranks share."""
    beyond = {ranks_of_group(group): group for group in groups.values()}
    return [beyond[ranks] for ranks in sorted(beyond) if not set(ranks) <= set(by_rank)]


def _check_kinds(by_rank: Mapping[int, Entries]) -> None:
    first: dict[str, tuple[int, Entry]] = {}
    for rank, entries in sorted(by_rank.items()):
        for key, entry in entries.items():
            other_rank, other = first.setdefault(key, (rank, entry))
            same_group = rank not in (other.ranks or ()) or entry.ranks == other.ranks
            if entry.kind != other.kind or not same_group:
                raise ValueError(
                    f"Inconsistent stats metadata for {key!r}: rank {other_rank} recorded "
                    f"{_describe(other)}, rank {rank} {_describe(entry)}; record a key in the "
                    "same way on every rank"
                )


def _describe(entry: Entry) -> str:
    over = "" if entry.denominator is None else f" over {entry.denominator!r}"
    group = "" if entry.ranks is None else f" with its own group of ranks {list(entry.ranks)}"
    return f"{entry.reduce_type.name}{over}{group}"


def _check_reach(by_rank: Mapping[int, Entries], *, has_key_sync: bool) -> None:
    """Raised on all ranks alike: one that raised alone would leave the others waiting."""
    for holder, entries in sorted(by_rank.items()):
        for key, entry in entries.items():
            lacking = [rank for rank, others in by_rank.items() if key not in others]
            if entry.ranks is None or not lacking:
                continue
            if not has_key_sync or not set(entry.ranks) <= set(by_rank):
                raise RuntimeError(
                    f"stat {key!r} has its own reduce_group on rank {holder} and is missing on "
                    f"rank {lacking[0]}; pass a key_sync_group that holds all ranks of that group"
                )
