"""Memory of this process."""

from __future__ import annotations

import resource

from agent_rl.stats.system import system_metrics


def test_resident_memory_is_below_its_peak() -> None:
    metrics = system_metrics()
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    assert 1e6 < metrics["system/rss_bytes"] <= peak_bytes * 1.01
    assert all(key.startswith("system/") and key.endswith("_bytes") for key in metrics)
