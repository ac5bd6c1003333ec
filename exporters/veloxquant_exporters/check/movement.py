"""Two pages of one address, one after the other: what only rises has not fallen."""

from __future__ import annotations

from collections.abc import Iterator

from veloxquant_exporters.check.page_text import Page, Sample
from veloxquant_exporters.findings import Finding, Findings

__all__ = ["check_movement"]


def check_movement(before: Page, after: Page) -> list[Finding]:
    """Counters and histograms that fell between two pages, whichever formats they are in."""
    found = Findings()
    earlier = {sample.series: sample.value for sample in _rising(before)}
    for sample in _rising(after):
        was = earlier.get(sample.series)
        if was is not None and sample.value < was:
            found.add(
                "problem",
                f"{sample} fell from {was:g} to {sample.value:g} between two fetches",
                "rate() and increase() take that for a restart; if the process was not restarted "
                "just now, two exporters answer at this address in turn",
                "give each process an address of its own, or publish them into one folder: "
                "docs/sidecar.md",
                kind="a counter that falls",
            )
    return list(found)


def _rising(page: Page) -> Iterator[Sample]:
    counters = {name for name, kind in page.sample_kinds().items() if kind == "counter"}
    histograms = {name for name, kind in page.kinds.items() if kind == "histogram"}
    for sample in page.samples:
        stem = sample.name.rpartition("_")[0]
        whole = sample.name.endswith(("_bucket", "_count")) and stem in histograms
        if sample.name in counters or whole:
            yield sample
