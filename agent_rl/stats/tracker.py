"""Metrics of workers and of training ranks: recorded anywhere, reduced at export.

Rollout workers append scalars; training ranks record tensors under boolean denominators. Means are
weighted by what was counted, never means of means. The scope is a contextvar: concurrent episodes
and threads never see one another's. Used as a module: ``from agent_rl import stats_tracker``.

    with stats_tracker.scope("ppo_actor"):
        stats_tracker.denominator(n_valid_tokens=mask)              # bool [2, 3]
        stats_tracker.stat("n_valid_tokens", entropy=entropy)       # float32 [2, 3]
    stats_tracker.get("rollout").scalar(reward=1.0)
    stats_tracker.export_all()
    # ppo_actor/entropy/avg, /min, /max, ppo_actor/n_valid_tokens, rollout/reward (+ __count)
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, SupportsFloat, TypeVar

from agent_rl.stats.accumulators import (
    Denominator,
    ReduceType,
    Scalar,
    Stat,
    Sums,
    as_number,
    read_sums,
)
from agent_rl.stats.block import Block
from agent_rl.stats.ranks import Entry, gather, ranks_of_group, reduce_entries

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

logger = logging.getLogger(__name__)
Kind = TypeVar("Kind", Scalar, Denominator, Stat)


class DistributedStatsTracker:
    """One set of keys. A ``name`` is the first part of each: tracker "rollout" -> "rollout/x"."""

    def __init__(self, name: str = "") -> None:
        home = f"{name}/" if name else ""
        # One contextvar for each tracker: trackers are few and live as long as the process.
        self._prefix: ContextVar[str] = ContextVar(f"agent_rl_stats_{name}", default=home)
        self._lock = threading.Lock()
        self._records: dict[str, Scalar | Denominator | Stat] = {}
        self._skipped: set[str] = set()

    def scope(self, name: str) -> Block:
        """Inside, keys begin with ``name/``; scopes nest. Also a decorator, sync and async."""
        return Block(lambda: self._with_prefix(f"{self._prefix.get()}{name}/"))

    scope_func_wrapper = scope

    def disable_scope(self) -> Block:
        """Inside, keys are written without any scope, also without the tracker's name."""
        return Block(lambda: self._with_prefix(""))

    @contextmanager
    def _with_prefix(self, prefix: str) -> Iterator[None]:
        previous = self._prefix.get()
        self._prefix.set(prefix)
        try:
            yield
        finally:
            # not reset(token): that raises where a generator is closed in another context
            self._prefix.set(previous)

    def scalar(self, /, **values: SupportsFloat) -> None:
        """Add numbers to the mean of their keys.

        What is not a number is skipped with one warning for its key.
        """
        prefix = self._prefix.get()
        numbers: dict[str, float] = {}
        for name, value in values.items():
            number = as_number(value)
            if number is None:
                self._warn_skipped(prefix + name, value)
            else:
                numbers[prefix + name] = number
        with self._lock:
            for key, number in numbers.items():
                self._record(key, Scalar()).add(number)

    def record_timing(self, key: str) -> Block:
        """Seconds spent inside, as the scalar ``timeperf/<key>`` whatever the scope.

        Recorded also when the block raises. Also a decorator, sync and async.
        """
        return Block(lambda: self._timing(key))

    @contextmanager
    def _timing(self, key: str) -> Iterator[None]:
        start_s = time.perf_counter()
        try:
            yield
        finally:
            elapsed_s = time.perf_counter() - start_s
            with self._lock:
                self._record(f"timeperf/{key}", Scalar()).add(elapsed_s)

    def denominator(self, /, **masks: Tensor) -> None:
        """Register boolean tensors that stats refer to; exported as their number of True.

        Raises:
            ValueError: not a tensor, not boolean, or empty.
        """
        prefix = self._prefix.get()
        for name, mask in masks.items():
            _check_tensor(prefix + name, mask, "bool")
        with self._lock:
            for name, mask in masks.items():
                self._record(prefix + name, Denominator()).add(mask)

    def stat(
        self,
        /,
        denominator: str,
        reduce_type: ReduceType | None = None,
        reduce_group: ProcessGroup | None = None,
        **tensors: Tensor,
    ) -> None:
        """Record float32 tensors, reduced over the True positions of a denominator.

        The i-th record of a key goes with the i-th record of its denominator, which must be there.
        ``reduce_group`` is the group of ranks of these keys, in place of export's.

        Raises:
            ValueError: not a float32 tensor, empty, no such denominator, SCALAR, or a key that was
                recorded in another way before.
            AssertionError: the shapes of value and mask differ.
        """
        kind = ReduceType.AVG_MIN_MAX if reduce_type is None else ReduceType(reduce_type)
        prefix = self._prefix.get()
        if kind is ReduceType.SCALAR:
            raise ValueError(f"stat {prefix + next(iter(tensors), '')!r}: use scalar() for SCALAR")
        for name, values in tensors.items():
            _check_tensor(prefix + name, values, "float32")
        with self._lock:
            for name, values in tensors.items():
                self._add_stat(
                    prefix + name, Stat(prefix + denominator, kind, reduce_group), values
                )

    def _add_stat(self, key: str, new: Stat, values: Tensor) -> None:
        masks = self._records.get(new.denominator)
        if not isinstance(masks, Denominator):
            raise ValueError(
                f"stat {key!r}: {new.denominator!r} is not a denominator; call "
                "denominator() first, under the same scope"
            )
        stat = self._record(key, new)
        if (stat.denominator, stat.reduce_type, stat.group) != (
            new.denominator,
            new.reduce_type,
            new.group,
        ):
            raise ValueError(
                f"stat {key!r} was recorded as {stat.reduce_type.name} over "
                f"{stat.denominator!r} before, and now as {new.reduce_type.name} over "
                f"{new.denominator!r} or with another reduce_group; use another key"
            )
        mask = masks.mask(stat.num_records)
        if mask is None:
            raise ValueError(
                f"stat {key!r} has no mask for its record {stat.num_records}: call "
                f"denominator({new.denominator.rpartition('/')[2]}=...) before each record"
            )
        if mask.shape != values.shape:
            raise AssertionError(
                f"stat {key!r}: record {stat.num_records} has shape {tuple(values.shape)}, its "
                f"denominator {new.denominator!r} {tuple(mask.shape)}"
            )
        stat.add(values, mask)

    def _record(self, key: str, new: Kind) -> Kind:
        """What was recorded under the key so far, else ``new``."""
        record = self._records.get(key)
        if record is None:
            if key.endswith("__count"):
                raise ValueError(f"{key!r}: names ending in __count are kept for counts")
            self._records[key] = new
            return new
        if not isinstance(record, type(new)):
            raise ValueError(
                f"{key!r} was recorded as {type(record).__name__.lower()} before, and now as "
                f"{type(new).__name__.lower()}; use another key"
            )
        return record

    def _warn_skipped(self, key: str, value: object) -> None:
        with self._lock:
            is_new = key not in self._skipped
            self._skipped.add(key)
        if is_new:
            logger.warning("scalar %r skipped: %.80r is not a number", key, value)

    def export(
        self,
        key: str | None = None,
        reduce_group: ProcessGroup | None = None,
        key_sync_group: ProcessGroup | None = None,
        reset: bool = True,
    ) -> dict[str, float]:
        """The numbers of all keys, or of one ``key`` (named as when recorded, under this scope).

        With groups this is collective: every rank of the group calls it. ``key_sync_group`` is a
        wider group whose ranks tell one another their keys; values stay within ``reduce_group``.

        Raises:
            ValueError, RuntimeError: see ``ranks.reduce_entries``; on all ranks alike.
        """
        with self._lock:
            chosen = self._records
            if key is not None:
                full = self._prefix.get() + key
                chosen = {full: self._records[full]} if full in self._records else {}
            scalars = {
                name: Entry(reduce_type=ReduceType.SCALAR, total=record.total, count=record.count)
                for name, record in chosen.items()
                if isinstance(record, Scalar)
            }
            tensors = {
                name: (record, sums)
                for name, record in chosen.items()
                if not isinstance(record, Scalar) and (sums := record.sums()) is not None
            }
            if reset:
                self._forget(key is None, chosen)
        groups = {
            name: record.group
            for name, (record, _) in tensors.items()
            if isinstance(record, Stat) and record.group is not None
        }
        return reduce_entries(scalars | _entries(tensors), groups, reduce_group, key_sync_group)

    def _forget(self, everything: bool, chosen: dict[str, Scalar | Denominator | Stat]) -> None:
        if everything:
            self._records = {}
            return
        for name, record in chosen.items():
            if isinstance(record, Scalar):
                del self._records[name]
            else:  # keeps its place, so that the records of the other keys still match
                record.clear()


def _check_tensor(key: str, value: object, dtype: str) -> None:
    import torch

    if not isinstance(value, torch.Tensor):
        raise ValueError(f"{key!r} must be a tensor, not {type(value).__name__}")
    if value.dtype != getattr(torch, dtype):
        raise ValueError(f"{key!r} must be of dtype torch.{dtype}, not {value.dtype}")
    if value.numel() == 0:
        raise ValueError(f"{key!r} is empty; its shape is {tuple(value.shape)}")


def _entries(tensors: dict[str, tuple[Denominator | Stat, Sums]]) -> dict[str, Entry]:
    numbers = read_sums([sums for _, sums in tensors.values()])
    entries = {}
    for (name, (record, _)), (total, count, low, high) in zip(
        tensors.items(), numbers, strict=True
    ):
        kind, denominator, ranks = ReduceType.SUM, None, None
        if isinstance(record, Stat):
            kind, denominator = record.reduce_type, record.denominator
            ranks = None if record.group is None else ranks_of_group(record.group)
        entries[name] = Entry(
            reduce_type=kind,
            denominator=denominator,
            ranks=ranks,
            total=total,
            count=int(count),
            low=low,
            high=high,
        )
    return entries


# The module is a tracker: these are the methods of the one without a name.

_default = DistributedStatsTracker()
_trackers: dict[str, DistributedStatsTracker] = {"": _default}
_trackers_lock = threading.Lock()

scalar = _default.scalar
denominator = _default.denominator
stat = _default.stat
scope = _default.scope
scope_func_wrapper = _default.scope_func_wrapper
disable_scope = _default.disable_scope
record_timing = _default.record_timing
export = _default.export


def get(name: str = "") -> DistributedStatsTracker:
    """The tracker of this name; made at the first call."""
    with _trackers_lock:
        if name not in _trackers:
            _trackers[name] = DistributedStatsTracker(name)
        return _trackers[name]


def export_all(
    reduce_group: ProcessGroup | None = None,
    key_sync_group: ProcessGroup | None = None,
    reset: bool = True,
) -> dict[str, float]:
    """The exports of all trackers in one dict. A key of two trackers: a warning, the later wins.

    The ranks first agree on the names, because each export is collective.
    """
    with _trackers_lock:
        own_names = sorted(_trackers)
    by_rank = gather(own_names, reduce_group if key_sync_group is None else key_sync_group)
    result: dict[str, float] = {}
    for name in sorted({name for names in by_rank.values() for name in names}):
        update = get(name).export(
            reduce_group=reduce_group, key_sync_group=key_sync_group, reset=reset
        )
        for key in update.keys() & result.keys():
            logger.warning("metric %r stands in two trackers; that of %r is kept", key, name)
        result |= update
    return result
