"""Check: one run of the guard, from budgets to verdicts."""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from veloxquant_exporters.bench.budgets import Budget
from veloxquant_exporters.bench.run import counts_of, judge_all, times_of
from veloxquant_exporters.bench.timed import Samples
from veloxquant_exporters.bench.verdict import Verdict
from veloxquant_exporters.bench.workloads import WORKLOADS

__all__ = ["OURS", "TWIN", "GuardError", "count", "guard", "hear"]

OURS: Final = "veloxquant_mlx.memory.block_pool:BlockPoolAllocator"
TWIN: Final = "benchmarks.guard.twin.block_pool:BlockPoolAllocator"


class GuardError(RuntimeError):
    """The guard cannot run here."""


def guard(
    budgets: Mapping[str, Budget], *, target: str = OURS, twin: str = TWIN, timed: bool = True
) -> tuple[list[Verdict], list[str]]:
    """Verdicts on every budget, and notes on what was repeated.

    Raises:
        GuardError: Under pytest-xdist, whose workers share the cores that are to be timed.
        MeasureError: A counter is blind, or a benchmark has no result.
    """
    if "PYTEST_XDIST_WORKER" in os.environ:
        raise GuardError("under pytest-xdist nothing can be timed; run it alone")
    counts, twin_counts = count(budgets, target, twin)
    if not timed:
        return judge_all(budgets, None, counts, twin_counts), []
    return hear(budgets, target, twin, counts, twin_counts)


def hear(
    budgets: Mapping[str, Budget],
    target: str,
    twin: str,
    counts: Mapping[str, Any] | None,
    twin_counts: Mapping[str, Any] | None,
) -> tuple[list[Verdict], list[str]]:
    """Time everything, and what fails by time alone once more; the counts are given.

    Raises:
        MeasureError: A benchmark has no result.
    """
    times = times_of(target, list(budgets), twin=twin)
    verdicts = judge_all(budgets, times, counts, twin_counts)
    doubtful = [verdict.name for verdict in verdicts if verdict.only_timed]
    if not doubtful:
        return verdicts, []
    # Time is the one witness against these, and a witness that noise can bribe: hear it again.
    again = {**times, **times_of(target, doubtful, twin=twin)}
    verdicts = judge_all(budgets, again, counts, twin_counts)
    return verdicts, [_note(name, times, verdicts) for name in doubtful]


def count(
    budgets: Mapping[str, Budget], target: str, twin: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Counts of both, side by side: load cannot change them."""
    beside = [name for name in budgets if not WORKLOADS[name].needs_ours]
    with ThreadPoolExecutor(2) as both:
        first = both.submit(counts_of, target, list(budgets))
        second = both.submit(counts_of, twin, beside) if beside else None
        return first.result(), second.result() if second else {}


def _note(name: str, times: Mapping[str, Samples], verdicts: list[Verdict]) -> str:
    now = next(verdict.status for verdict in verdicts if verdict.name == name)
    stopped = times[name].stopped_at
    first = f"stopped at {stopped}" if stopped else "out of budget by time alone"
    return f"{name}: {first}, repeated in a fresh process: {now}"
