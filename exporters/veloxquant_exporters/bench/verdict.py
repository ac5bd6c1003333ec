"""Verdict: what counts and times say about one benchmark, by its budget."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any, Final

from veloxquant_exporters.bench.budgets import Budget
from veloxquant_exporters.bench.fit import doubling, growth, slope
from veloxquant_exporters.bench.timed import Samples

__all__ = ["Finding", "Verdict", "judge", "judge_counts", "judge_times"]

# Layers: exact counts, work within one hold of a lock, CPU time.
COUNTS, LOCK, TIME = "counts", "lock", "time"
_LAYER_OF: Final = {"steps": COUNTS, "moves": COUNTS, "longest_hold": LOCK}
_MOST_DOUBLING: Final = 2.7
_MOST_STEPS: Final = 1.25  # times the twin's


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing out of budget.

    Attributes:
        layer: "counts", "lock" or "time".
        fails: False for a warning.
        text: What, with the numbers.
    """

    layer: str
    fails: bool
    text: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """A benchmark's result.

    Attributes:
        name: Of the benchmark.
        findings: What is out of budget.
        figures: Fitted numbers by name; what was not measured is not there.
        samples: The times, or None.
        counts: The counts, or None.
    """

    name: str
    findings: tuple[Finding, ...] = ()
    figures: Mapping[str, float] = field(default_factory=dict)
    samples: Samples | None = None
    counts: Mapping[str, Any] | None = None

    @property
    def status(self) -> str:
        """One of "fail", "warn" and "pass"."""
        if any(finding.fails for finding in self.findings):
            return "fail"
        return "warn" if self.findings else "pass"

    @property
    def only_timed(self) -> bool:
        """True for a failure that rests on time alone, which a second run may acquit."""
        return self.status == "fail" and all(f.layer == TIME for f in self.findings if f.fails)

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "status": self.status,
            "findings": [asdict(finding) for finding in self.findings],
            "figures": dict(self.figures),
            "times": None if self.samples is None else asdict(self.samples),
            "counts": self.counts,
        }


def judge(
    name: str,
    budget: Budget,
    samples: Samples | None,
    counts: Mapping[str, Any] | None,
    twin_counts: Mapping[str, Any] | None = None,
) -> Verdict:
    """All layers that were measured."""
    findings: list[Finding] = []
    figures: dict[str, float] = {}
    if counts is not None:
        _add(findings, figures, judge_counts(budget, counts, twin_counts))
    if samples is not None:
        _add(findings, figures, judge_times(budget, samples))
    return Verdict(name, tuple(findings), figures, samples, counts)


def judge_counts(
    budget: Budget, counts: Mapping[str, Any], twin_counts: Mapping[str, Any] | None = None
) -> tuple[list[Finding], dict[str, float]]:
    """The exact layer."""
    if "unsupported" in counts:
        return [Finding(COUNTS, True, f"not counted: {counts['unsupported']}")], {}
    findings, figures = [], {}
    for series, layer in _LAYER_OF.items():
        found = growth(counts["sizes"], counts[series])
        figures[f"{series}_exponent"] = found
        if found > budget.most_growth:
            values = " ".join(map(str, counts[series]))
            findings.append(
                Finding(
                    layer,
                    True,
                    f"{series.replace('_', ' ')} grows with exponent {found:.2f}, allowed "
                    f"{budget.exponent:.2f}: {values} at {' '.join(map(str, counts['sizes']))}",
                )
            )
    figures["work_per_call"] = counts["steps"][-1] + counts["moves"][-1]
    if twin_counts and "unsupported" not in twin_counts:
        twin_work = twin_counts["steps"][-1] + twin_counts["moves"][-1]
        figures["work_level"] = figures["work_per_call"] / twin_work
        if figures["work_level"] > _MOST_STEPS:
            findings.append(
                Finding(
                    COUNTS, False, f"{figures['work_level']:.2f} times the work of the twin a call"
                )
            )
    return findings, figures


def judge_times(budget: Budget, samples: Samples) -> tuple[list[Finding], dict[str, float]]:
    """The timed layer."""
    if samples.unsupported is not None:
        return [Finding(TIME, True, f"not timed: {samples.unsupported}")], {}
    sizes, times = samples.sizes, samples.target_s
    figures = {"cpu_slope": slope(sizes, times), "doubling": doubling(sizes, times)}
    findings: list[Finding] = []
    if samples.stopped_at is not None:
        findings.append(Finding(TIME, True, _steep(samples, figures)))
    if samples.twin_s:
        ratios = [mine / twin for mine, twin in zip(times, samples.twin_s, strict=True)]
        figures["ratio_slope"] = slope(sizes, ratios)
        figures["level"] = median(ratios)
        if figures["level"] > budget.level:
            findings.append(
                Finding(TIME, False, f"{figures['level']:.2f} times the CPU time of the twin")
            )
    if samples.stopped_at is None and _bends(budget, figures):
        findings.append(Finding(TIME, True, _bent(budget, figures)))
    return findings, figures


def _bends(budget: Budget, figures: Mapping[str, float]) -> bool:
    steep = figures["cpu_slope"] > budget.cpu_slope
    if budget.ratio_slope is None:
        return steep
    steep = steep or figures["doubling"] > _MOST_DOUBLING
    return steep and figures.get("ratio_slope", float("inf")) > budget.ratio_slope


def _bent(budget: Budget, figures: Mapping[str, float]) -> str:
    text = f"CPU slope {figures['cpu_slope']:.2f}, allowed {budget.cpu_slope:.2f}"
    if budget.ratio_slope is None:
        return text
    beside = figures.get("ratio_slope", float("nan"))
    return (
        f"{text}; a doubling costs {figures['doubling']:.2f} times as much; beside the twin "
        f"{beside:+.2f}, allowed {budget.ratio_slope:.2f}"
    )


def _steep(samples: Samples, figures: Mapping[str, float]) -> str:
    return (
        f"stopped at {samples.stopped_at}: {samples.target_s[-1] * 1e3:.1f} ms a call, "
        f"CPU slope {figures['cpu_slope']:.2f}"
    )


def _add(
    findings: list[Finding],
    figures: dict[str, float],
    more: tuple[list[Finding], dict[str, float]],
) -> None:
    findings += more[0]
    figures.update(more[1])
