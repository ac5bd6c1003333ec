"""The catalogue: one table of every metric, from which all else is made.

The Prometheus collector, the OpenTelemetry instruments, docs/metrics.md, and the checks of boards
and rules iterate `CATALOGUE`. A metric is added here and nowhere else.

Names: Prometheus names follow its naming guide; the ten of `AllocationStats.to_prometheus` are
fixed by contract, of which `veloxquant_block_pool_blocks_total` is a gauge against the guide (a
documented waiver; boards use `veloxquant_block_pool_blocks_managed`). OpenTelemetry names are such
that the standard translation of a counter or histogram gives its Prometheus name.
"""

from __future__ import annotations

from typing import Final

from veloxquant_mlx.telemetry.catalogue_exporter import BENCH_ROWS, EXPORTER_ROWS, SIDECAR_ROWS
from veloxquant_mlx.telemetry.catalogue_memory import MEMORY_ROWS
from veloxquant_mlx.telemetry.catalogue_pool import POOL_ROWS
from veloxquant_mlx.telemetry.catalogue_process import PROCESS_ROWS
from veloxquant_mlx.telemetry.catalogue_program import PROGRAM_ROWS
from veloxquant_mlx.telemetry.catalogue_row import Instrument, Kind, Metric, Sample, Value

__all__ = ["CATALOGUE", "SIDECAR_ROWS", "Instrument", "Kind", "Metric", "Sample", "Value"]

CATALOGUE: Final[tuple[Metric, ...]] = (
    *POOL_ROWS,
    *PROCESS_ROWS,
    *MEMORY_ROWS,
    *PROGRAM_ROWS,
    *EXPORTER_ROWS,
    *SIDECAR_ROWS,
    *BENCH_ROWS,
)
