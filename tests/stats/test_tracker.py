"""The tracker on one process: every rule of recording, scopes and export, by worked numbers."""

from __future__ import annotations

import asyncio
import logging
import math
import subprocess
import sys
import threading

import pytest
import torch

from agent_rl import stats_tracker
from agent_rl.stats.tracker import DistributedStatsTracker, ReduceType, export_all, get

F, T = False, True


@pytest.fixture
def tracker() -> DistributedStatsTracker:
    return DistributedStatsTracker()


def mask(*bits: bool) -> torch.Tensor:
    return torch.tensor(bits)


def test_scalar_is_mean_and_count(tracker: DistributedStatsTracker) -> None:
    tracker.scalar(reward=1, turns=True)
    tracker.scalar(reward=torch.tensor(0.0))
    tracker.scalar(reward=0.5)
    assert tracker.export() == {
        "reward": 0.5,
        "reward__count": 3,
        "turns": 1.0,
        "turns__count": 1,
    }
    assert tracker.export() == {}


def test_avg_min_max_is_weighted_by_elements(tracker: DistributedStatsTracker) -> None:
    """x=[1,2,3] mask TTF and x=[5] mask T: the mean is 8/3, not (1.5 + 5) / 2."""
    tracker.denominator(n=mask(T, T, F))
    tracker.stat("n", x=torch.tensor([1.0, 2.0, 3.0]))
    tracker.denominator(n=mask(T))
    tracker.stat("n", x=torch.tensor([5.0]))
    assert tracker.export() == {"n": 3, "x/avg": pytest.approx(8 / 3), "x/min": 1, "x/max": 5}


def test_each_reduce_type_over_two_records(tracker: DistributedStatsTracker) -> None:
    """Case B165: values [1,2,3,4], mask [1,0,0,1], and the same keys recorded twice.

    What stands off the mask is no extremum, and an export begins anew.
    """
    for _ in range(2):
        tracker.denominator(n=mask(T, F, F, T))
        x = torch.tensor([1.0, 2.0, 3.0, 4.0])
        for kind in ("avg", "sum", "min", "max", "avg_min_max"):
            tracker.stat("n", reduce_type=ReduceType(kind), **{kind: x})
        tracker.stat("n", inside=torch.tensor([2.0, -9.0, 9.0, 3.0]))
    assert tracker.export() == {
        "n": 4,
        "avg": 2.5,
        "sum": 10,
        "min": 1,
        "max": 4,
        "avg_min_max/avg": 2.5,
        "avg_min_max/min": 1,
        "avg_min_max/max": 4,
        "inside/avg": 2.5,
        "inside/min": 2,
        "inside/max": 3,
    }
    assert tracker.export() == {}


def test_an_empty_mask_leaves_the_key_out(tracker: DistributedStatsTracker) -> None:
    """Case B165: a mean of nothing is absent, a sum of nothing is 0, and nothing is warned."""
    tracker.denominator(n=mask(F, F))
    for kind in (ReduceType.AVG, ReduceType.MIN, ReduceType.MAX, ReduceType.SUM):
        tracker.stat("n", reduce_type=kind, **{kind.value: torch.ones(2)})
    tracker.stat("n", x=torch.ones(2))
    assert tracker.export() == {"n": 0, "sum": 0}


def test_what_the_mask_hides_may_be_anything(tracker: DistributedStatsTracker) -> None:
    tracker.denominator(n=mask(T, F, F, F))
    tracker.stat("n", x=torch.tensor([2.0, math.nan, math.inf, -math.inf]))
    assert tracker.export() == {"n": 1, "x/avg": 2, "x/min": 2, "x/max": 2}


def test_failed_episodes_are_no_zeros(tracker: DistributedStatsTracker) -> None:
    """Case B165: rewards 1, 0, 1 and one failure: success 2/3 over 3, error rate 1/4 over 4."""
    for reward in (1.0, 0.0, None, 1.0):
        tracker.scalar(error=reward is None)
        if reward is not None:
            tracker.scalar(success=reward)
    assert tracker.export() == {
        "error": 0.25,
        "error__count": 4,
        "success": pytest.approx(2 / 3),
        "success__count": 3,
    }


def test_values_are_taken_when_recorded(tracker: DistributedStatsTracker) -> None:
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    m = mask(T, T)
    tracker.denominator(n=m)
    m[0] = False
    tracker.stat("n", x=x)
    with torch.no_grad():
        x.zero_()
    assert tracker.export() == {"n": 2, "x/avg": 1.5, "x/min": 1, "x/max": 2}


def test_large_counts_are_exact(tracker: DistributedStatsTracker) -> None:
    """A float32 sum stops growing at 2**24; ours does not."""
    ones = torch.ones(2**24 + 1)
    tracker.denominator(n=torch.cat([ones.bool()]))
    tracker.stat("n", reduce_type=ReduceType.SUM, x=ones)
    assert tracker.export() == {"n": 2**24 + 1, "x": 2**24 + 1}


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ([True], "'a/n' must be a tensor, not list"),
        (torch.ones(2), "'a/n' must be of dtype torch.bool, not torch.float32"),
        (torch.ones(0, dtype=torch.bool), "'a/n' is empty"),
    ],
)
def test_bad_denominators(tracker: DistributedStatsTracker, value: object, words: str) -> None:
    with tracker.scope("a"), pytest.raises(ValueError, match=words):
        tracker.denominator(n=value)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (1.0, "'x' must be a tensor, not float"),
        (torch.ones(2, dtype=torch.bfloat16), "'x' must be of dtype torch.float32"),
        (torch.ones(2, dtype=torch.float64), "'x' must be of dtype torch.float32"),
        (torch.ones(0), "'x' is empty"),
    ],
)
def test_bad_stats(tracker: DistributedStatsTracker, value: object, words: str) -> None:
    tracker.denominator(n=mask(T, T))
    with pytest.raises(ValueError, match=words):
        tracker.stat("n", x=value)  # type: ignore[arg-type]


def test_stat_needs_its_denominator_first_in_the_same_scope(
    tracker: DistributedStatsTracker,
) -> None:
    tracker.denominator(n=mask(T))
    with tracker.scope("a"), pytest.raises(ValueError, match=r"'a/x': 'a/n' is not a denominator"):
        tracker.stat("n", x=torch.ones(1))
    tracker.scalar(s=1)
    with pytest.raises(ValueError, match="'s' is not a denominator"):
        tracker.stat("s", x=torch.ones(1))


def test_stat_is_never_a_scalar(tracker: DistributedStatsTracker) -> None:
    tracker.denominator(n=mask(T))
    with pytest.raises(ValueError, match=r"'x': use scalar\(\)"):
        tracker.stat("n", reduce_type=ReduceType.SCALAR, x=torch.ones(1))


def test_ith_record_goes_with_ith_denominator(tracker: DistributedStatsTracker) -> None:
    tracker.denominator(n=mask(T, T))
    tracker.denominator(n=mask(T, F, F))
    tracker.stat("n", x=torch.ones(2))
    with pytest.raises(AssertionError, match=r"'x': record 1 has shape \(2,\).*\(3,\)"):
        tracker.stat("n", x=torch.ones(2))
    tracker.stat("n", x=torch.tensor([7.0, 0.0, 0.0]))
    with pytest.raises(ValueError, match="'x' has no mask for its record 2"):
        tracker.stat("n", x=torch.ones(2))
    assert tracker.export() == {"n": 3, "x/avg": 3, "x/min": 1, "x/max": 7}


def test_a_key_keeps_its_kind(tracker: DistributedStatsTracker) -> None:
    tracker.denominator(n=mask(T), m=mask(T))
    tracker.scalar(s=1)
    tracker.stat("n", x=torch.ones(1))
    with pytest.raises(ValueError, match="'s' was recorded as scalar before, and now as denom"):
        tracker.denominator(s=mask(T))
    with pytest.raises(ValueError, match="'x' was recorded as stat before, and now as scalar"):
        tracker.scalar(x=1)
    with pytest.raises(ValueError, match="'x' was recorded as AVG_MIN_MAX over 'n' before"):
        tracker.stat("m", x=torch.ones(1))
    with pytest.raises(ValueError, match="__count"):
        tracker.scalar(a__count=1)


def test_what_is_no_number_is_skipped_with_one_warning(
    tracker: DistributedStatsTracker, caplog: pytest.LogCaptureFixture
) -> None:
    """Case B164: strings do not break the mean."""
    with caplog.at_level(logging.WARNING):
        for value in (1.0, "3", None, [1, "x"], torch.ones(2), 2.0):
            tracker.scalar(a=value)  # type: ignore[arg-type]
    assert tracker.export() == {"a": 1.5, "a__count": 2}
    assert [record.getMessage() for record in caplog.records] == [
        "scalar 'a' skipped: '3' is not a number"
    ]


def test_nan_is_not_hidden(tracker: DistributedStatsTracker) -> None:
    tracker.scalar(a=1.0)
    tracker.scalar(a=math.nan)
    tracker.denominator(n=mask(T, T))
    tracker.stat("n", x=torch.tensor([math.nan, 1.0]))
    out = tracker.export()
    assert all(math.isnan(out[key]) for key in ("a", "x/avg", "x/min", "x/max"))


def test_export_without_reset_keeps_everything(tracker: DistributedStatsTracker) -> None:
    tracker.scalar(a=1)
    tracker.denominator(n=mask(T))
    tracker.stat("n", x=torch.ones(1))
    first = tracker.export(reset=False)
    assert tracker.export(reset=False) == first
    tracker.scalar(a=2)
    assert tracker.export()["a"] == 1.5


def test_export_of_one_key_clears_that_key_only(tracker: DistributedStatsTracker) -> None:
    tracker.scalar(a=1, b=2)
    tracker.denominator(n=mask(T, F))
    tracker.stat("n", x=torch.tensor([3.0, 9.0]), y=torch.tensor([4.0, 9.0]))
    assert tracker.export(key="a") == {"a": 1, "a__count": 1}
    assert tracker.export(key="x") == {"x/avg": 3, "x/min": 3, "x/max": 3}
    assert tracker.export(key="nothing") == {}
    assert tracker.export(reset=False) == {
        "b": 2,
        "b__count": 1,
        "n": 1,
        "y/avg": 4,
        "y/min": 4,
        "y/max": 4,
    }
    tracker.denominator(n=mask(F, T))
    tracker.stat("n", x=torch.tensor([1.0, 5.0]))  # with the second mask, not the first again
    assert tracker.export(key="x")["x/avg"] == 5
    assert tracker.export(key="n") == {"n": 2}
    tracker.denominator(n=mask(T, T))
    tracker.stat("n", x=torch.tensor([6.0, 8.0]))
    assert tracker.export()["x/avg"] == 7


def test_scopes_nest_and_end(tracker: DistributedStatsTracker) -> None:
    with tracker.scope("a"):
        tracker.scalar(k=1)
        with tracker.scope("b"):
            tracker.scalar(k=2)
            with tracker.disable_scope():
                tracker.scalar(k=3)
                with tracker.scope("c"):
                    tracker.scalar(k=4)
            tracker.scalar(k=6)
    with pytest.raises(KeyError), tracker.scope("a"):
        raise KeyError
    tracker.scalar(end=0)
    out = {k: v for k, v in tracker.export().items() if not k.endswith("__count")}
    assert out == {"a/k": 1, "a/b/k": 4, "k": 3, "c/k": 4, "end": 0}


def test_tracker_name_is_the_first_scope() -> None:
    tracker = DistributedStatsTracker("rollout")
    with tracker.scope("a"):
        tracker.scalar(k=1)
        with tracker.disable_scope():
            tracker.scalar(k=2)
    tracker.scalar(reward=3)
    assert tracker.export(key="reward") == {"rollout/reward": 3, "rollout/reward__count": 1}
    assert tracker.export() == {"k": 2, "k__count": 1, "rollout/a/k": 1, "rollout/a/k__count": 1}


async def test_scope_func_wrapper(tracker: DistributedStatsTracker) -> None:
    @tracker.scope_func_wrapper("sync")
    def record(value: float) -> float:
        """Doc."""
        tracker.scalar(k=value)
        return value + 1

    @tracker.scope_func_wrapper("async")
    async def record_async(value: float) -> float:
        await asyncio.sleep(0)
        tracker.scalar(k=value)
        return value + 2

    assert (record(1), await record_async(2)) == (2, 4)
    assert (record.__name__, record.__doc__) == ("record", "Doc.")
    tracker.scalar(k=0)
    out = tracker.export()
    assert (out["sync/k"], out["async/k"], out["k"]) == (1, 2, 0)

    def generate() -> object:
        yield 1

    with pytest.raises(TypeError, match="is a generator"):
        tracker.scope_func_wrapper("x")(generate)


async def test_record_timing(
    tracker: DistributedStatsTracker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Always timeperf/<key>, once for each block, also where the block raises."""
    clock = iter(range(100))
    monkeypatch.setattr("time.perf_counter", lambda: float(next(clock)))

    @tracker.record_timing("f")
    def f() -> int:
        return 1

    @tracker.record_timing("g")
    async def g() -> int:
        await asyncio.sleep(0)
        return 2

    with tracker.scope("a"):
        with pytest.raises(ValueError), tracker.record_timing("step"):
            raise ValueError
        async with tracker.record_timing("step"):
            pass
        assert (f(), await g(), f()) == (1, 2, 1)
    assert tracker.export() == {
        "timeperf/f": 1,
        "timeperf/f__count": 2,
        "timeperf/g": 1,
        "timeperf/g__count": 1,
        "timeperf/step": 1,
        "timeperf/step__count": 2,
    }
    assert DistributedStatsTracker("rollout").export() == {}


async def test_concurrent_episodes_have_their_own_scopes(tracker: DistributedStatsTracker) -> None:
    turn = asyncio.Barrier(2)

    async def episode(name: str) -> None:
        with tracker.scope(name):
            await turn.wait()
            with tracker.scope("inner"):
                await turn.wait()
                tracker.scalar(k=1)
                await turn.wait()
            tracker.scalar(k=1)

    await asyncio.gather(episode("one"), episode("two"))
    keys = {key for key in tracker.export() if not key.endswith("__count")}
    assert keys == {"one/inner/k", "one/k", "two/inner/k", "two/k"}


def test_threads_share_numbers_but_no_scope(tracker: DistributedStatsTracker) -> None:
    def work(index: int) -> None:
        with tracker.scope(f"t{index}"):
            for _ in range(1000):
                tracker.scalar(k=index)
                with tracker.disable_scope():
                    tracker.scalar(total=1)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    with tracker.scope("main"):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    out = tracker.export()
    assert out["total__count"] == 4000
    assert [out[f"t{i}/k__count"] for i in range(4)] == [1000] * 4
    assert not any(key.startswith("main") for key in out)


def test_nothing_is_lost_while_another_thread_exports(tracker: DistributedStatsTracker) -> None:
    worker = threading.Thread(target=lambda: [tracker.scalar(k=1) for _ in range(20_000)])
    worker.start()
    total = 0.0
    while worker.is_alive():
        total += tracker.export().get("k__count", 0)
    assert total + tracker.export().get("k__count", 0) == 20_000


def test_module_functions_and_named_trackers(caplog: pytest.LogCaptureFixture) -> None:
    """The module is the tracker without a name; export_all joins all of them."""
    export_all()
    assert get() is get("") and get("rollout") is get("rollout")
    with stats_tracker.scope("ppo_actor"):
        stats_tracker.denominator(n=mask(T, F))
        stats_tracker.stat("n", loss=torch.tensor([2.0, 5.0]))
        with stats_tracker.disable_scope():
            stats_tracker.scalar(lr=0.5)
    with stats_tracker.record_timing("rollout"):
        pass
    stats_tracker.scope_func_wrapper("w")(stats_tracker.scalar)(x=1)
    get("rollout").scalar(reward=1)
    get("eval-rollout").scalar(reward=0)
    out = export_all(reset=False)
    assert out.pop("timeperf/rollout") >= 0
    assert {key: value for key, value in out.items() if not key.endswith("__count")} == {
        "eval-rollout/reward": 0,
        "lr": 0.5,
        "ppo_actor/loss/avg": 2,
        "ppo_actor/loss/max": 2,
        "ppo_actor/loss/min": 2,
        "ppo_actor/n": 1,
        "rollout/reward": 1,
        "w/x": 1,
    }
    with stats_tracker.scope("rollout"):
        stats_tracker.scalar(reward=9)
    with caplog.at_level(logging.WARNING):
        assert export_all()["rollout/reward"] == 1
    assert "'rollout/reward' stands in two trackers; that of 'rollout' is kept" in caplog.text
    assert stats_tracker.export() == {}


def test_recording_scalars_loads_no_torch() -> None:
    code = (
        "import sys; from agent_rl import stats_tracker as s; s.get('rollout').scalar(a=1); "
        "assert s.export_all() == {'rollout/a': 1.0, 'rollout/a__count': 1}; "
        "print('torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.strip() == "False", result.stderr
