"""PoolCollector: the catalogue as Prometheus metrics, read anew at each scrape."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar  # noqa: TC002 - loaded with the registry anyway

from veloxquant_exporters.prometheus.exemplars import EXEMPLARS
from veloxquant_exporters.prometheus.families import PAGE_ROWS, Families, Family
from veloxquant_exporters.prometheus.labels import label_value
from veloxquant_exporters.sources import LiveSource, Reading, SnapshotSource
from veloxquant_mlx.telemetry import Metric, ProcessSnapshot
from veloxquant_mlx.telemetry.catalogue import Sample

__all__ = ["COLLECT_REASONS", "PoolCollector"]

_log = logging.getLogger("veloxquant_exporters.prometheus")

# Why the collector itself left something out: a reader of the catalogue raised or gave a value that
# cannot be exported; two snapshots had the same labels; the source raised, against its contract.
COLLECT_REASONS: Final = ("reading", "duplicate", "source")

# Faults that are logged, each one once; the rest are only counted.
MAX_LOGGED: Final = 64

_ROWS: Final = {row.name: row for row in PAGE_ROWS}
_UP: Final = _ROWS["veloxquant_exporter_up"]
_DURATION: Final = _ROWS["veloxquant_exporter_collect_duration_seconds"]
_ERRORS: Final = _ROWS["veloxquant_exporter_collect_errors_total"]
_POOL_ROWS: Final = tuple(row for row in PAGE_ROWS if row.read_pool is not None)
# The errors come last, as they count what goes wrong with this page too.
_PROCESS_ROWS: Final = tuple(
    row for row in PAGE_ROWS if row.read_process is not None and row is not _ERRORS
)


class PoolCollector(Collector):
    """Collects the metrics of block pools, for any `CollectorRegistry`. Thread-safe.

    Each scrape reads the source once and builds its families from what it read; nothing is kept but
    the count of the collector's own failures. What cannot be read costs its own series: the page
    goes on without them, `veloxquant_exporter_collect_errors_total` counts it, and
    `veloxquant_exporter_up` is 0.

    Args:
        source: Where snapshots come from; None is the watched pools of this process.
        clock: Seconds, for the duration of a scrape.
    """

    def __init__(
        self,
        source: SnapshotSource | None = None,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.source = LiveSource() if source is None else source
        self._clock = clock
        self._lock = threading.Lock()
        self._failures: Counter[tuple[str, str]] = Counter()  # by process and reason
        self._logged: set[str] = set()

    def describe(self) -> Iterable[Family]:
        """Every family, empty: registering reads no pool, and clashing names show at once."""
        return Families(labels_processes=self.source.labels_processes)

    def collect(self) -> Iterator[Family]:
        """The families of this moment. Never raises."""
        began = self._clock()
        families = Families(labels_processes=self.source.labels_processes)
        for process, up in self._add_processes(families, self._read()).items():
            self._add(families, _UP, process, (), _one, up)
        self._add(families, _DURATION, "", (), _one, self._clock() - began)
        return iter(families)

    # -- inside ---------------------------------------------------------------------------------

    def _read(self) -> Reading:
        try:
            return self.source.read()
        except Exception:  # noqa: BLE001 - a source that breaks its promise must not end the page
            self._count("", "source", "the source")
            return Reading(processes=(), up={"": 0})

    def _add_processes(self, families: Families, reading: Reading) -> dict[str, int]:
        """Add all processes, and tell which are up."""
        # The exporter's own state carries no process; in process, the two are the same.
        up = {"": 1} | {label_value(process): value for process, value in reading.up.items()}
        errors: dict[str, Mapping[str, int]] = {"": {}}
        seen: set[str] = set()
        for process in reading.processes:
            name = label_value(process.process)
            if name in seen:
                self._count(name, "duplicate", f"process {name!r}")
                up[name] = 0
                continue
            seen.add(name)
            errors[name] = process.errors
            if not self._add_process(families, name, process):
                up[name] = 0
        for name, counts in errors.items():
            self._add(families, _ERRORS, name, (), _by_reason, self._errors(name, counts, reading))
        self._forget_all_but(errors)
        return up

    def _add_process(self, families: Families, name: str, process: ProcessSnapshot) -> bool:
        """Add a process with its pools; False if something could not be had."""
        whole = process.n_unread_pools == 0
        for row in _PROCESS_ROWS:
            whole &= self._add(families, row, name, (), row.read_process, process)
        names: set[str] = set()
        for pool in process.pools:
            pool_name = label_value(pool.name)
            if pool_name in names:
                self._count(name, "duplicate", f"pool {pool_name!r}")
                whole = False
                continue
            names.add(pool_name)
            for row in _POOL_ROWS:
                whole &= self._add(families, row, name, (pool_name,), row.read_pool, pool)
        return whole

    def _add(
        self,
        families: Families,
        row: Metric,
        process: str,
        scope: tuple[str, ...],
        read: Callable[[Any], Iterable[Sample]] | None,
        subject: Any,
    ) -> bool:
        """Add one row of one scope; False if it could not be had."""
        try:
            assert read is not None
            families.add(row, process, scope, read(subject), self._exemplar(row, subject))
        except Exception:  # noqa: BLE001 - one bad number costs its own series
            self._count(process, "reading", f"{row.name} of {scope[0] if scope else 'the process'}")
            return False
        return True

    def _exemplar(self, row: Metric, subject: Any) -> Exemplar | None:
        # Of several processes' traces, none would be the reader's own.
        if row.name not in EXEMPLARS or self.source.labels_processes:
            return None
        return EXEMPLARS[row.name](subject)

    def _errors(self, name: str, errors: Mapping[str, int], reading: Reading) -> dict[str, int]:
        """What went wrong by reason: in the process, in the source, and here."""
        with self._lock:
            sums = Counter({reason: self._failures[name, reason] for reason in COLLECT_REASONS})
        for counted in (errors, reading.errors if not name else {}):
            for reason, n in counted.items():
                sums[reason] += n
        return sums

    def _count(self, process: str, reason: str, what: str) -> None:
        with self._lock:
            self._failures[process, reason] += 1
            known = what in self._logged or len(self._logged) >= MAX_LOGGED
            self._logged.add(what)
        if not known:
            _log.error("left out of the metrics page (%s): %s", reason, what, exc_info=True)

    def _forget_all_but(self, processes: Iterable[str]) -> None:
        """Let go of the failures of processes that are gone, so that they do not pile up."""
        with self._lock:
            for key in [key for key in self._failures if key[0] not in processes]:
                del self._failures[key]


def _one(value: float) -> list[Sample]:
    return [((), value)]


def _by_reason(errors: Mapping[str, int]) -> list[Sample]:
    return [((reason,), n) for reason, n in errors.items()]
