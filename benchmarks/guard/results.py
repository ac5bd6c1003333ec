"""Results: the durations in a run's JSON, of the guard or of pytest-benchmark."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

__all__ = ["commit_time_s", "durations"]


def durations(found: Mapping[str, Any], stat: str = "min") -> dict[str, dict[int, float]]:
    """Seconds a call by benchmark and size; size 0 where a benchmark has none.

    Args:
        found: A document that `document.read` returned.
        stat: "min" or "median".
    """
    benchmarks = found["benchmarks"]
    if isinstance(benchmarks, Mapping):
        key = {"min": "target_s", "median": "median_s"}[stat]
        return {
            name: dict(zip(one["times"]["sizes"], one["times"][key], strict=True))
            for name, one in benchmarks.items()
            if one.get("times") and one["times"]["sizes"]
        }
    by_name: dict[str, dict[int, float]] = {}
    for one in benchmarks:
        size = one.get("extra_info", {}).get("n_blocks", 0)
        name = one["name"].partition("[")[0] if size else one["name"]
        calls = one.get("extra_info", {}).get("calls", 1)
        by_name.setdefault(name, {})[size] = one["stats"][stat] / calls
    return by_name


def commit_time_s(found: Mapping[str, Any]) -> float:
    """When the measured commit was made, in seconds since the epoch.

    Raises:
        ValueError: The run does not name its commit.
    """
    commit = found.get("commit")
    if isinstance(commit, Mapping):
        return float(commit["time_s"])
    told = (found.get("commit_info") or {}).get("time")
    if not told:
        raise ValueError("the run does not name its commit, so it has no place in a history")
    return datetime.fromisoformat(told).timestamp()
