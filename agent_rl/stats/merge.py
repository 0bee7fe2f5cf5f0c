"""The controller's merge: exports of many workers become one, weighted by their counts.

Each worker has reduced its own keys, so only keys whose count is known can be joined. A
distribution without a count is dropped, never averaged by guess.

    {"r": 0.5, "r__count": 1} + {"r": 1.0, "r__count": 3} -> {"r": 0.875}, not 0.75
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

_COUNT = "__count"
_ADDED = ("count", "sum", "observed_count")


def merge_exports(exports: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """One dict from the workers' exports, keys sorted, without the ``__count`` keys.

    A worker that lacks a key, or counted 0, contributes nothing to it.
    """
    merged = {}
    for key in sorted({key for export in exports for key in export}):
        holders = [export for export in exports if key in export]
        value = None if key.endswith(_COUNT) else _merge_key(key, holders)
        if value is not None:
            merged[key] = value
    return merged


def _merge_key(key: str, exports: Sequence[Mapping[str, float]]) -> float | None:
    base, _, last = key.rpartition("/")
    if last in _ADDED and "prm_metric" in key.split("/"):
        return sum(export[key] for export in exports)
    extremum = {"min": min, "max": max}.get(last)
    if extremum is not None and not any(key + _COUNT in export for export in exports):
        return _extremum(extremum, key, base, exports)
    weights = [_weight(key, base, last, export) for export in exports]
    total = sum(weights)
    if total == 0:
        return None
    # a worker that counted nothing may hold NaN: it must not reach the sum
    pairs = zip(exports, weights, strict=True)
    return sum(export[key] * weight for export, weight in pairs if weight) / total


def _weight(key: str, base: str, last: str, export: Mapping[str, float]) -> float:
    """The worker's count of a scalar, of a distribution's base, or of a judge's observations."""
    if key + _COUNT in export:
        return export[key + _COUNT]
    if last == "avg":
        return export.get(base + _COUNT, 0)
    if last == "rate" and "prm_metric" in key.split("/"):
        return export.get(f"{base}/observed_count", 0)
    return 0


def _extremum(
    choose: Callable[[Sequence[float]], float],
    key: str,
    base: str,
    exports: Sequence[Mapping[str, float]],
) -> float | None:
    values = [export[key] for export in exports if export.get(base + _COUNT, 0) > 0]
    return choose(values) if values else None
