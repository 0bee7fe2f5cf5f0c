"""What the process uses: resident memory, and GPU memory where torch runs on one."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def system_metrics() -> dict[str, float]:
    """Bytes, under ``system/``; GPU keys only where CUDA is in use. Loads no torch."""
    metrics = {"system/rss_bytes": float(_rss_bytes())}
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        metrics["system/gpu_allocated_bytes"] = float(torch.cuda.memory_allocated())
        metrics["system/gpu_reserved_bytes"] = float(torch.cuda.memory_reserved())
        metrics["system/gpu_peak_bytes"] = float(torch.cuda.max_memory_allocated())
    return metrics


def _rss_bytes() -> int:
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    import resource  # Unix only

    # Without /proc only the peak is known; macOS states it in bytes.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
