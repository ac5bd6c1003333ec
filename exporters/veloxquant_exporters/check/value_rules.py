"""What the values of one page must be, by themselves and together: the pool's books on paper."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

from veloxquant_exporters.check.catalogue_rules import is_ours
from veloxquant_exporters.check.page_text import Page, Sample
from veloxquant_exporters.findings import Finding, Findings, printable

__all__ = ["check_values"]

_P: Final = "veloxquant_block_pool_"
# The one gauge that may be infinite: growth without a bound.
_MAY_BE_INFINITE: Final = f"{_P}blocks_limit"
_ZERO_OR_ONE: Final = ("veloxquant_exporter_up", f"{_P}config_info", "veloxquant_build_info")
_TOLERANCE: Final = 1e-6


def check_values(page: Page) -> list[Finding]:
    """What is wrong with the values of our series, and what they say is wrong with the pools."""
    found = Findings()
    for sample in page.samples:
        if is_ours(sample.name):
            _one(found, sample)
    for pool in _pools(page.samples):
        _books(found, pool)
    _alarms(found, page.samples)
    return list(found)


def _one(found: Findings, sample: Sample) -> None:
    value = sample.value
    wrong = ""
    if math.isnan(value):
        wrong = "is NaN"
    elif value < 0:
        wrong = f"is below zero ({value:g})"
    elif math.isinf(value) and sample.name != _MAY_BE_INFINITE:
        wrong = "is infinite"
    elif sample.name in _ZERO_OR_ONE and value not in (0, 1):
        wrong = f"is {value:g}, and can be 0 or 1 only"
    elif sample.name == f"{_P}fragmentation" and value > 1:
        wrong = f"is {value:g}, and is a ratio of at most 1"
    if wrong:
        found.add(
            "problem",
            f"line {sample.line}: {sample} {wrong}",
            kind="a value that the metric cannot have",
        )


# -- the books of one pool -----------------------------------------------------------------------


@dataclass(slots=True)
class _Pool:
    """The samples of one pool: sums by metric, and by metric and stream.

    Attributes:
        name: As a finding shall call it.
        sums: Value by metric without the prefix, over all of its series.
        streams: The same by stream.
    """

    name: str
    sums: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    streams: dict[str, dict[str, float]] = field(default_factory=lambda: defaultdict(dict))


def _pools(samples: Iterable[Sample]) -> Iterator[_Pool]:
    pools: dict[tuple[str, str], _Pool] = {}
    for sample in samples:
        if not sample.name.startswith(_P):
            continue
        labels = dict(sample.labels)
        key = labels.get("process", ""), labels.get("pool", "")
        if key not in pools:
            of = f" of process {key[0]!r}" if key[0] else ""
            pools[key] = _Pool(printable(f"pool {key[1]!r}{of}"))
        name = sample.name.removeprefix(_P)
        pools[key].sums[name] += sample.value
        if "stream" in labels:
            pools[key].streams[labels["stream"]][name] = sample.value
    yield from pools.values()


_SAME: Final[tuple[tuple[str, tuple[str, ...], str, tuple[str, ...]], ...]] = (
    ("free + in use", ("free_blocks", "stream_blocks_in_use"), "managed", ("blocks_managed",)),
    ("in use, summed over streams", ("stream_blocks_in_use",), "in use", ("blocks_in_use",)),
    ("in use, summed over formats", ("format_blocks_in_use",), "in use", ("blocks_in_use",)),
    ("blocks_total", ("blocks_total",), "blocks_managed", ("blocks_managed",)),
    ("handed out", ("allocations_total",), "given back + in use", ("frees_total", "blocks_in_use")),
    ("failed, summed over reasons", ("exhaustions_total",), "failed", ("exhausted_total",)),
)
_AT_MOST: Final = (
    ("in use", "blocks_in_use", "the peak", "peak_blocks_in_use"),
    ("managed", "blocks_managed", "the limit", "blocks_limit"),
    ("partly filled", "partial_blocks", "in use", "blocks_in_use"),
    ("cached", "cached_blocks", "in use", "blocks_in_use"),
    ("reused", "reused_total", "handed out", "allocations_total"),
    ("double frees", "double_frees_total", "refused", "rejected_blocks_total"),
)


def _books(found: Findings, pool: _Pool) -> None:
    sums = pool.sums
    for left, left_names, right, right_names in _SAME:
        if all(name in sums for name in (*left_names, *right_names)):
            one = sum(sums[name] for name in left_names)
            other = sum(sums[name] for name in right_names)
            if not _same(one, other):
                _unbalanced(found, f"{pool.name}: {left} is {one:g}, and {right} is {other:g}")
    for left, small, right, large in _AT_MOST:
        if small in sums and large in sums and sums[small] > sums[large]:
            _unbalanced(
                found, f"{pool.name}: {left} is {sums[small]:g}, above {right}, {sums[large]:g}"
            )
    for stream, values in pool.streams.items():
        used, allocated = values.get("token_slots_used"), values.get("token_slots_allocated")
        if used is not None and allocated is not None and used > allocated:
            _unbalanced(
                found,
                printable(
                    f"{pool.name}: stream {stream} fills {used:g} token slots of {allocated:g}"
                ),
            )


def _same(one: float, other: float) -> bool:
    return one == other or math.isclose(one, other, rel_tol=_TOLERANCE, abs_tol=0.5)


def _unbalanced(found: Findings, what: str) -> None:
    found.add(
        "problem",
        what,
        "the values of a page are of one moment and always add up: the page was put together from "
        "several, or the exporter has a fault",
        kind="values that do not add up",
    )


# -- what the values say -------------------------------------------------------------------------

_Alarm = tuple[str, Callable[[float], bool], str, str]
_ALARMS: Final[tuple[_Alarm, ...]] = (
    (
        f"{_P}invariant_violations_total",
        lambda value: value > 0,
        "the self-check found the pool's books broken",
        "restart the worker and report it: docs/runbooks/double-free-and-invariants.md",
    ),
    (
        "veloxquant_exporter_collect_errors_total",
        lambda value: value > 0,
        "the telemetry itself failed that often; the reason is in its log",
        "docs/runbooks/exporter-down-and-stale.md",
    ),
    (
        "veloxquant_exporter_up",
        lambda value: value == 0,
        "the process died, or its snapshot cannot be read",
        "ask the sidecar for its last state: /debug/last/PROCESS",
    ),
)


def _alarms(found: Findings, samples: Iterable[Sample]) -> None:
    for sample in samples:
        for name, rings, why, fix in _ALARMS:
            if sample.name == name and rings(sample.value):
                what = f"{sample} is {sample.value:g}"
                found.add("warning", what, why, fix, kind=name)
