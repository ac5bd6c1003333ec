"""Histograms on a page: buckets that only rise, the last one holding all, as many bounds in each."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

from veloxquant_exporters.check.page_text import Labels, Page
from veloxquant_exporters.findings import Finding, Findings, printable

__all__ = ["check_histograms"]


def check_histograms(page: Page) -> list[Finding]:
    """What is wrong with the histograms of a page, ours and others'."""
    found = Findings()
    for (name, labels), histogram in _histograms(page).items():
        for fault in _faults(histogram.buckets, histogram.values):
            shown = ",".join(f'{key}="{value}"' for key, value in labels)
            found.add(
                "problem",
                printable(f"histogram {name}{{{shown}}}: {fault}"),
                "quantiles of it are wrong",
                kind="a histogram that contradicts itself",
            )
    return list(found)


@dataclass(slots=True)
class _Histogram:
    """One histogram: its buckets as they stand, and its `_count` and `_sum`."""

    buckets: list[tuple[float, float]] = field(default_factory=list)
    values: dict[str, float] = field(default_factory=dict)


def _histograms(page: Page) -> dict[tuple[str, Labels], _Histogram]:
    found: dict[tuple[str, Labels], _Histogram] = defaultdict(_Histogram)
    for sample in page.samples:
        name, _, suffix = sample.name.rpartition("_")
        if page.kinds.get(name) != "histogram":
            continue
        if suffix == "bucket":
            labels = tuple(pair for pair in sample.labels if pair[0] != "le")
            bound = _bound(dict(sample.labels).get("le", ""))
            found[name, labels].buckets.append((bound, sample.value))
        elif suffix in ("count", "sum"):
            found[name, sample.labels].values[suffix] = sample.value
    return found


def _bound(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _faults(buckets: list[tuple[float, float]], values: dict[str, float]) -> Iterator[str]:
    if not buckets:
        yield "it has no buckets"
        return
    bounds = [bound for bound, _ in buckets]
    if any(map(math.isnan, bounds)):
        yield "a bucket has no number as its le"
        return
    if any(not low < high for low, high in pairwise(bounds)):
        yield "the bounds of its buckets do not ascend"
    for (low, below), (high, upto) in pairwise(buckets):
        if upto < below:
            yield f"its buckets fall from {below:g} at le={low:g} to {upto:g} at le={high:g}"
            break
    if bounds[-1] != math.inf:
        yield "it has no bucket le=+Inf"
    elif "count" not in values or "sum" not in values:
        yield "it has no _count or no _sum"
    elif buckets[-1][1] != values["count"]:
        yield f"its +Inf bucket is {buckets[-1][1]:g}, and its count {values['count']:g}"
