"""SidecarCollector: the catalogue over a folder, and the folder's own figures."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from veloxquant_exporters.prometheus.collector import PoolCollector
from veloxquant_exporters.prometheus.families import Family
from veloxquant_exporters.sidecar.directory_source import DirectorySource
from veloxquant_exporters.sidecar.state import STATES
from veloxquant_mlx.telemetry.catalogue import SIDECAR_ROWS

__all__ = ["SidecarCollector"]

# Of a dead process these gauges still say something true.
_KEPT: Final = ("veloxquant_exporter_up",)
_FILE_STATES: Final = (*STATES, "unreadable")


class SidecarCollector(PoolCollector):
    """A `PoolCollector` over a `DirectorySource`. Thread-safe.

    What a dead process counted stays until its retention ends, so that no count since the last
    scrape is lost; its gauges go at once.

    Args:
        source: The folder.
    """

    def __init__(self, source: DirectorySource) -> None:
        super().__init__(_WithDead(source))
        self._directory = source

    def describe(self) -> Iterable[Family]:
        """Every family, empty."""
        return [*super().describe(), *_families()]

    def collect(self) -> Iterator[Family]:
        """The families of this moment. Never raises."""
        families = list(super().collect())
        dead = self._directory.dead_processes
        if dead:
            for family in families:
                if family.type == "gauge" and family.name not in _KEPT:
                    family.samples = [
                        sample
                        for sample in family.samples
                        if sample.labels.get("process") not in dead
                    ]
        yield from families
        files, removed = _families()
        sizes = self._directory.sizes()
        for state in _FILE_STATES:
            files.add_metric((state,), sizes[state])
        removed.add_metric((), sizes["removed"])
        yield files
        yield removed


class _WithDead:
    """The folder as a source that gives dead processes too."""

    labels_processes = True

    def __init__(self, source: DirectorySource) -> None:
        self.read = source.read_with_dead


def _families() -> tuple[GaugeMetricFamily, CounterMetricFamily]:
    files, removed = SIDECAR_ROWS
    return (
        GaugeMetricFamily(files.name, files.help, labels=files.labels),
        CounterMetricFamily(removed.name, removed.help),
    )
