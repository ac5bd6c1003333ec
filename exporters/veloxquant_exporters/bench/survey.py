"""Survey: measure any allocator and name the shape of each call. Gates nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from veloxquant_exporters.bench.budgets import default_budget
from veloxquant_exporters.bench.report import unit
from veloxquant_exporters.bench.run import MeasureError, counts_of, judge_all, times_of
from veloxquant_exporters.bench.timed import ROUNDS
from veloxquant_exporters.bench.verdict import Verdict
from veloxquant_exporters.bench.workloads import WORKLOADS

__all__ = ["shape", "survey"]


def survey(
    target: str,
    *,
    twin: str | None = "reference",
    only: Sequence[str] = (),
    rounds: int = ROUNDS,
    quick: bool = False,
    counts: bool = False,
) -> tuple[list[Verdict], list[str]]:
    """Verdicts by the shapes this project expects, and notes on what the target cannot do.

    Args:
        target: `package.module:factory`, see `target.load`.
        twin: Another target to stand beside it; "reference" for a plain list pool; None for nothing.
        only: Workloads; all if empty.
        rounds: Timed rounds.
        quick: Leave out the largest sizes.
        counts: Count work exactly as well. Rewrites the target's source, so that has to be Python.

    Raises:
        MeasureError: The target cannot be loaded, or a workload found that it does not do its work.
    """
    names = list(only or WORKLOADS)
    unknown = [name for name in names if name not in WORKLOADS]
    if unknown:
        raise MeasureError(f"no benchmark {', '.join(unknown)}; there are {', '.join(WORKLOADS)}")
    times = times_of(target, names, twin=twin, rounds=rounds, quick=quick)
    notes = [f"{name}: left out: {s.unsupported}" for name, s in times.items() if s.unsupported]
    able = {name: s for name, s in times.items() if s.unsupported is None}
    if not able:
        raise MeasureError(f"{target} can do none of them: {'; '.join(notes)}")
    # A plain list checks nothing and is faster for it: beside that, a level means nothing.
    most = float("inf") if twin == "reference" else 1.5
    budgets = {name: replace(default_budget(WORKLOADS[name]), level=most) for name in able}
    counted = counts_of(target, list(able)) if counts else None
    return judge_all(budgets, able, counted), notes


def shape(verdict: Verdict) -> str:
    """One line: how a call's CPU time grows, in a word and in numbers."""
    samples = verdict.samples
    assert samples is not None
    slope = verdict.figures["cpu_slope"]
    # Caches bend a constant call to 0.3 and a linear one to 1.15; the words stand for what is between.
    word = next(
        (
            word
            for most, word in ((0.5, "constant"), (1.3, "linear"), (1.6, "superlinear"))
            if slope < most
        ),
        "quadratic" if slope < 2.5 else "worse than quadratic",
    )
    first, last = samples.sizes[0], samples.sizes[-1]
    stopped = ", stopped there" if samples.stopped_at else ""
    return (
        f"{verdict.name}: {word} in {WORKLOADS[verdict.name].axis} (exponent {slope:.2f}), "
        f"{unit(samples.target_s[0])} at {first:,}, {unit(samples.target_s[-1])} at {last:,}{stopped}"
    )
