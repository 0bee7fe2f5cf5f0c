"""What metrics cost: one scalar, 100,000 scalars with their export, and memory over many exports.

python benchmarks/stats.py
"""

from __future__ import annotations

import time
import tracemalloc

import torch

from agent_rl.stats.tracker import DistributedStatsTracker

SCALARS = 100_000
EXPORTS = 2_000


def seconds_for_scalars(tracker: DistributedStatsTracker) -> tuple[float, float]:
    """Recording ``SCALARS`` numbers under a scope, and exporting them."""
    start_s = time.perf_counter()
    with tracker.scope("actor"):
        for number in range(SCALARS):
            tracker.scalar(reward=number)
    recorded_s = time.perf_counter()
    tracker.export()
    return recorded_s - start_s, time.perf_counter() - recorded_s


def record_step(tracker: DistributedStatsTracker) -> None:
    tracker.scalar(reward=1.0)
    tracker.denominator(n=torch.ones(1024, dtype=torch.bool))
    tracker.stat("n", entropy=torch.ones(1024))


def bytes_kept_after(tracker: DistributedStatsTracker, exports: int) -> int:
    for _ in range(exports):
        record_step(tracker)
        tracker.export()
    return tracemalloc.get_traced_memory()[0]


def main() -> None:
    torch.set_num_threads(1)
    tracker = DistributedStatsTracker("rollout")
    seconds_for_scalars(tracker)
    recording_s, export_s = min(seconds_for_scalars(tracker) for _ in range(3))
    tracemalloc.start()
    early, late = bytes_kept_after(tracker, 100), bytes_kept_after(tracker, EXPORTS)
    rows = [
        ("one scalar", f"{recording_s / SCALARS * 1e6:.2f} us", "< 5 us"),
        (f"{SCALARS} scalars + export", f"{recording_s + export_s:.3f} s", "< 1 s"),
        (f"memory kept by {EXPORTS} exports", f"{late - early} bytes", "< 10 kB"),
    ]
    for name, figure, target in rows:
        print(f"{name:32} {figure:>14}   target {target}")


if __name__ == "__main__":
    main()
