"""The catalogue against a page: metrics that nobody knows, that are missing, of another kind."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from veloxquant_exporters.check.page_text import Page, Sample
from veloxquant_exporters.findings import Finding, Findings, printable
from veloxquant_mlx.memory.incidents import EXHAUSTION_REASONS, GROW_OUTCOMES, REJECTION_REASONS
from veloxquant_mlx.telemetry import CATALOGUE, Metric
from veloxquant_mlx.telemetry.catalogue import SIDECAR_ROWS
from veloxquant_mlx.telemetry.meters import CHECKS
from veloxquant_mlx.telemetry.snapshot import FORMATS, OPERATIONS

__all__ = ["OURS", "check_catalogue", "is_ours", "of_sidecar"]

OURS: Final = "veloxquant_"
_BENCH: Final = "veloxquant_bench_"
_P: Final = "veloxquant_block_pool_"

_ROWS: Final[Mapping[str, Metric]] = {row.name: row for row in CATALOGUE}
_SIDECAR: Final = frozenset(row.name for row in SIDECAR_ROWS)
# On every page of an exporter; the benchmarks write pages of their own.
_ALWAYS: Final = tuple(
    row.name for row in CATALOGUE if not row.name.startswith(_BENCH) and row.name not in _SIDECAR
)
# A pool has them in every case; the rest depends on the platform, a storage, or other pools.
_EVERY_POOL: Final = tuple(
    row.name
    for row in CATALOGUE
    if row.read_pool is not None
    and not row.name.startswith(f"{_P}storage_")
    and row.name not in (f"{_P}block_size_tokens", f"{_P}config_info")
)
# Values that are known for a label, whatever the metric; and those that depend on it.
_VALUES: Final[Mapping[str, tuple[str, ...]]] = {
    "stream": ("k", "v", "kv"),
    "format": FORMATS,
    "operation": OPERATIONS,
    "outcome": GROW_OUTCOMES,
    "check": CHECKS,
}
_REASONS: Final[Mapping[str, tuple[str, ...]]] = {
    f"{_P}exhaustions_total": EXHAUSTION_REASONS,
    f"{_P}rejected_blocks_total": REJECTION_REASONS,
}
_SUFFIXES: Final = ("_bucket", "_sum", "_count")


def is_ours(name: str) -> bool:
    """Whether a sample's name is of this project's making."""
    return name.startswith(OURS)


def of_sidecar(samples: Iterable[Sample]) -> bool:
    """Whether series of several processes meet on the page, as on a sidecar's."""
    return any(is_ours(s.name) and any(name == "process" for name, _ in s.labels) for s in samples)


def check_catalogue(page: Page) -> list[Finding]:
    """What of the page is not as the catalogue has it; series of others are passed over."""
    return _Rules(page).check()


@dataclass(slots=True)
class _Rules:
    page: Page

    def check(self) -> list[Finding]:
        found = Findings()
        if not any(map(is_ours, self._announced())):
            found.add(
                "problem",
                "not one metric of block pools is on this page",
                "names of ours begin with veloxquant_",
                "call instrument(pool) in the server, and give the address that start_http_server "
                "or `vqmon serve` printed, with /metrics",
            )
            return list(found)
        self._kinds(found)
        self._names_and_labels(found)
        self._missing(found)
        return list(found)

    def _announced(self) -> set[str]:
        return {*self.page.sample_kinds(), *(sample.name for sample in self.page.samples)}

    def _kinds(self, found: Findings) -> None:
        for name, kind in self.page.sample_kinds().items():
            row = _ROWS.get(name)
            if row is None and is_ours(name):
                _unknown(found, name)
            elif row is not None and row.kind != kind:
                found.add(
                    "problem",
                    f"{name} is announced as a {kind}, and is a {row.kind}",
                    "rates and quantiles of it are wrong then",
                    kind="of another type than the catalogue says",
                )

    def _names_and_labels(self, found: Findings) -> None:
        by_process = of_sidecar(self.page.samples)
        known = self.page.sample_kinds()
        for sample in self.page.samples:
            if not is_ours(sample.name):
                continue
            row = _row_of(sample.name)
            if row is None:
                if known.keys().isdisjoint((sample.name, sample.name.rpartition("_")[0])):
                    _unknown(found, sample.name)
                continue
            if row.name not in known:
                found.add("problem", f"{row.name} has samples and no TYPE", kind="without a TYPE")
            _labels(found, sample, row, by_process=by_process)

    def _missing(self, found: Findings) -> None:
        # A metric may be announced and have no series: nothing to tell at present.
        there = set(self.page.sample_kinds()) & set(_ROWS)
        there |= {row.name for s in self.page.samples if (row := _row_of(s.name)) is not None}
        if there.isdisjoint(_ALWAYS):
            return  # a page of the benchmarks
        if gone := [name for name in _ALWAYS if name not in there]:
            found.add(
                "warning",
                f"{len(gone)} of {len(_ALWAYS)} metrics are missing: {_some(gone)}",
                "boards and rules that read them stay empty; a page asked for with name[]=, or of "
                "an older version, is like that",
                "scrape the page without name[]=, or: pip install -U veloxquant-mlx-monitor",
            )
        self._missing_by_pool(found, there)

    def _missing_by_pool(self, found: Findings, there: set[str]) -> None:
        """A pool that lacks what others have; the dead keep their counters only."""
        pools: dict[tuple[str, str], set[str]] = defaultdict(set)
        for sample in self.page.samples:
            row = _row_of(sample.name)
            if row is not None and row.read_pool is not None:
                labels = dict(sample.labels)
                pools[labels.get("process", ""), labels.get("pool", "")].add(row.name)
        for (process, pool), names in pools.items():
            dead = f"{_P}blocks_managed" not in names
            wanted = [
                n for n in _EVERY_POOL if n in there and (not dead or _ROWS[n].kind != "gauge")
            ]
            if gone := [name for name in wanted if name not in names]:
                whose = f"pool {pool!r}" + (f" of process {process!r}" if process else "")
                found.add(
                    "problem",
                    printable(f"{whose} lacks {_some(gone)}"),
                    "the exporter could not read them; its log says why",
                    kind="a pool without a metric that every pool has",
                )


def _row_of(name: str) -> Metric | None:
    """The row that a sample's name belongs to."""
    row = _ROWS.get(name)
    if row is not None:
        return row if row.kind != "histogram" else None
    for suffix in _SUFFIXES:
        row = _ROWS.get(name.removesuffix(suffix))
        if row is not None and name.endswith(suffix) and row.kind == "histogram":
            return row
    return None


def _unknown(found: Findings, name: str) -> None:
    found.add(
        "problem",
        f"{printable(name)} is no metric of the catalogue",
        "neither boards nor rules read it; a newer exporter may have it",
        "compare the versions: docs/metrics.md lists every name",
        kind="a name that the catalogue does not have",
    )


def _labels(found: Findings, sample: Sample, row: Metric, *, by_process: bool) -> None:
    wanted = set(row.all_labels)
    if sample.name.endswith("_bucket"):
        wanted.add("le")
    if by_process and row.name not in _SIDECAR:
        wanted.add("process")
    have = {name for name, _ in sample.labels}
    if have != wanted:
        found.add(
            "problem",
            f"line {sample.line}: {row.name} has the labels {_set(have)}, and should have "
            f"{_set(wanted)}",
            "queries that join by labels find nothing",
            kind="labels that are not those of the catalogue",
        )
        return
    for name, value in sample.labels:
        allowed = _REASONS.get(row.name) if name == "reason" else _VALUES.get(name)
        if allowed is not None and value not in allowed:
            found.add(
                "warning",
                printable(f"line {sample.line}: {row.name} has {name}={value!r}")
                + f", known are {', '.join(allowed)}",
                "a newer exporter may have it; rules and boards do not",
                kind="a label's value that the catalogue does not have",
            )


def _set(names: set[str]) -> str:
    return "{" + ", ".join(sorted(names)) + "}"


def _some(names: list[str], most: int = 4) -> str:
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")
