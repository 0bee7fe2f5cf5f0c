"""Exports over 2 and 3 gloo processes. One start of processes runs all scenarios."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from agent_rl.stats.tracker import DistributedStatsTracker, ReduceType, export_all, get

VALUES = torch.arange(1.0, 13.0)
"""Rank r of w holds rows r, r + w, ... and counts those that 2 or 3 divide."""


def record(tracker: DistributedStatsTracker, values: torch.Tensor) -> None:
    mask = (values % 2 == 0) | (values % 3 == 0)
    with tracker.scope("actor"):
        tracker.denominator(n=mask, none=torch.zeros_like(mask))
        for kind in ("avg_min_max", "avg", "sum", "min", "max"):
            tracker.stat("n", reduce_type=ReduceType(kind), **{kind: values})
        tracker.stat("none", empty=values)
    for value in values.tolist():
        tracker.scalar(s=value / 3)


def all_keys(rank: int, world: int) -> dict[str, float]:
    tracker = DistributedStatsTracker("t")
    record(tracker, VALUES[rank::world])
    out = tracker.export(reduce_group=dist.group.WORLD)
    assert tracker.export(reduce_group=dist.group.WORLD) == {}
    return out


def own_numbers(rank: int, world: int) -> dict[str, float]:
    """Without a group the export is local, as for rollout workers."""
    tracker = DistributedStatsTracker()
    tracker.scalar(s=rank)
    return tracker.export()


def missing_keys(rank: int, world: int) -> dict[str, float]:
    """Case B164: rank 0 has a and b, the others a and c and a stat that counts nothing."""
    tracker = DistributedStatsTracker()
    tracker.scalar(a=rank)
    if rank == 0:
        tracker.scalar(b=10)
    else:
        tracker.scalar(c=rank)
        tracker.denominator(n=torch.tensor([False]))
        tracker.stat("n", x=torch.ones(1))
    return tracker.export(reduce_group=dist.group.WORLD)


def no_trainable_tokens(rank: int, world: int) -> dict[str, float]:
    """Case B102: rank 0 has adv [2,1,0,0] under mask [1,1,0,0], the others only padding."""
    tracker = DistributedStatsTracker()
    adv = torch.tensor([2.0, 1.0, 0.0, 0.0]) if rank == 0 else torch.zeros(4)
    tracker.denominator(n=adv > 0)
    tracker.stat("n", adv=adv)
    return tracker.export(reduce_group=dist.group.WORLD)


def token_weighted(rank: int, world: int) -> dict[str, float]:
    """Case B162: rank 0 has 1 token of KL 0.9, rank 1 nine of 0.1: 0.18, not 0.5."""
    tracker = DistributedStatsTracker()
    kl = [torch.full((1,), 0.9), torch.full((9,), 0.1), torch.zeros(5)][rank]
    tracker.denominator(n=kl > 0)
    tracker.stat("n", reduce_type=ReduceType.AVG, kl=kl)
    return tracker.export(reduce_group=dist.group.WORLD)


def per_key_group(rank: int, world: int) -> dict[str, float]:
    """``loss`` over all ranks, ``other`` over each rank alone, although the keys are synced."""
    alone = [dist.new_group([r]) for r in range(world)][rank]
    tracker = DistributedStatsTracker()
    tracker.denominator(n=torch.tensor([True]))
    x = torch.tensor([float(rank)])
    tracker.stat("n", reduce_type=ReduceType.SUM, reduce_group=dist.group.WORLD, loss=x)
    tracker.stat("n", reduce_type=ReduceType.SUM, other=x)
    out = tracker.export(reduce_group=alone, key_sync_group=dist.group.WORLD, reset=False)
    assert tracker.export(reduce_group=alone) == out
    return out


def missing_per_key_group(rank: int, world: int) -> dict[str, float]:
    """Only rank 0 has the key with its own group; the wider key_sync_group mends it."""
    alone = [dist.new_group([r]) for r in range(world)][rank]
    tracker = DistributedStatsTracker()
    tracker.denominator(n=torch.tensor([True]))
    x = torch.tensor([rank + 5.0])
    if rank == 0:
        tracker.stat("n", reduce_group=dist.group.WORLD, reduce_type=ReduceType.AVG, x=x)
    tracker.scalar(s=rank)
    return tracker.export(reduce_group=alone, key_sync_group=dist.group.WORLD)


def group_out_of_reach(rank: int, world: int) -> dict[str, float]:
    tracker = DistributedStatsTracker()
    tracker.denominator(n=torch.tensor([True]))
    if rank == 0:
        tracker.stat("n", reduce_group=dist.group.WORLD, x=torch.ones(1))
    return tracker.export(reduce_group=dist.group.WORLD)


def other_reduce_type(rank: int, world: int) -> dict[str, float]:
    tracker = DistributedStatsTracker()
    tracker.denominator(n=torch.tensor([True]))
    kind = ReduceType.SUM if rank == 0 else ReduceType.AVG
    tracker.stat("n", reduce_type=kind, x=torch.ones(1))
    return tracker.export(reduce_group=dist.group.WORLD)


def other_denominator(rank: int, world: int) -> dict[str, float]:
    tracker = DistributedStatsTracker()
    tracker.denominator(n=torch.tensor([True]), m=torch.tensor([True]))
    tracker.stat("n" if rank == 0 else "m", x=torch.ones(1))
    return tracker.export(reduce_group=dist.group.WORLD)


def other_tracker_names(rank: int, world: int) -> dict[str, float]:
    """Each rank made other trackers, in another order."""
    for name in ["b", "a"] if rank == 0 else ["c", "b"]:
        get(name).scalar(k=rank)
    return export_all(reduce_group=dist.group.WORLD)


SCENARIOS: list[Callable[[int, int], dict[str, float]]] = [
    all_keys,
    own_numbers,
    missing_keys,
    no_trainable_tokens,
    token_weighted,
    per_key_group,
    missing_per_key_group,
    group_out_of_reach,
    other_reduce_type,
    other_denominator,
    other_tracker_names,
]


def run_rank(rank: int, world: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=30),
    )
    results: dict[str, Any] = {}
    for scenario in SCENARIOS:
        try:
            results[scenario.__name__] = scenario(rank, world)
        except (ValueError, RuntimeError) as error:
            results[scenario.__name__] = f"{type(error).__name__}: {error}"
    dist.destroy_process_group()
    Path(folder, f"{rank}.pickle").write_bytes(pickle.dumps(results))


@pytest.fixture(scope="module", params=[2, 3])
def ranks(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    """What each rank got, by scenario."""
    folder = tmp_path_factory.mktemp("ranks")
    # One server imports torch; each rank is a fork of it, which saves seconds of CPU.
    mp.get_context("forkserver").set_forkserver_preload(["torch.distributed"])
    mp.start_processes(
        run_rank,
        args=(request.param, str(folder)),
        nprocs=request.param,
        start_method="forkserver",
    )
    return [
        pickle.loads(Path(folder, f"{rank}.pickle").read_bytes()) for rank in range(request.param)
    ]


def alike(ranks: list[dict[str, Any]], scenario: str) -> Any:
    """The one result that all ranks got."""
    first = ranks[0][scenario]
    assert all(rank[scenario] == first for rank in ranks)
    return first


def test_equals_one_process_on_all_data(ranks: list[dict[str, Any]]) -> None:
    alone = DistributedStatsTracker("t")
    record(alone, VALUES)
    got = alike(ranks, "all_keys")
    assert got == pytest.approx(alone.export(), rel=1e-12)
    assert all(list(rank["all_keys"]) == list(got) for rank in ranks)
    assert got["t/actor/avg"] == 54 / 8  # 2 + 3 + 4 + 6 + 8 + 9 + 10 + 12 over eight of them
    assert "t/actor/empty/avg" not in got


def test_without_a_group_nothing_is_shared(ranks: list[dict[str, Any]]) -> None:
    assert [rank["own_numbers"] for rank in ranks] == [
        {"s": float(index), "s__count": 1} for index in range(len(ranks))
    ]


def test_keys_missing_on_some_ranks(ranks: list[dict[str, Any]]) -> None:
    """Case B164: the values come from the ranks that have them, and the counts are right."""
    world = len(ranks)
    others = sum(range(world))
    assert alike(ranks, "missing_keys") == {
        "a": others / world,
        "a__count": world,
        "b": 10,
        "b__count": 1,
        "c": others / (world - 1),
        "c__count": world - 1,
        "n": 0,
    }


def test_a_rank_without_trainable_tokens(ranks: list[dict[str, Any]]) -> None:
    """Case B102: padding counts nowhere."""
    assert alike(ranks, "no_trainable_tokens") == {
        "adv/avg": 1.5,
        "adv/max": 2,
        "adv/min": 1,
        "n": 2,
    }


def test_means_weigh_tokens_not_ranks(ranks: list[dict[str, Any]]) -> None:
    """Case B162."""
    got = alike(ranks, "token_weighted")
    assert got == {"kl": pytest.approx(0.18), "n": 10}


def test_per_key_group_and_wider_key_sync_group(ranks: list[dict[str, Any]]) -> None:
    total = sum(range(len(ranks)))
    assert [rank["per_key_group"] for rank in ranks] == [
        {"loss": total, "n": 1, "other": index} for index in range(len(ranks))
    ]


def test_per_key_group_of_a_key_that_a_rank_lacks(ranks: list[dict[str, Any]]) -> None:
    assert [rank["missing_per_key_group"] for rank in ranks] == [
        {"n": 1, "s": index, "s__count": 1, "x": 5} for index in range(len(ranks))
    ]
    assert alike(ranks, "group_out_of_reach") == (
        "RuntimeError: stat 'x' has its own reduce_group on rank 0 and is missing on rank 1; "
        "pass a key_sync_group that holds all ranks of that group"
    )


def test_inconsistent_metadata_raises_on_all_ranks(ranks: list[dict[str, Any]]) -> None:
    assert alike(ranks, "other_reduce_type") == (
        "ValueError: Inconsistent stats metadata for 'x': rank 0 recorded SUM over 'n', rank 1 "
        "AVG over 'n'; record a key in the same way on every rank"
    )
    assert "rank 0 recorded AVG_MIN_MAX over 'n', rank 1 AVG_MIN_MAX over 'm'" in alike(
        ranks, "other_denominator"
    )


def test_trackers_are_exported_in_one_order(ranks: list[dict[str, Any]]) -> None:
    world = len(ranks)
    mean = sum(range(1, world)) / (world - 1)
    got = alike(ranks, "other_tracker_names")
    assert got == {
        "a/k": 0,
        "a/k__count": 1,
        "b/k": sum(range(world)) / world,
        "b/k__count": world,
        "c/k": mean,
        "c/k__count": world - 1,
    }
    assert not any(math.isnan(value) for value in got.values())
