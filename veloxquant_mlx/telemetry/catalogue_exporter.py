"""Rows of the catalogue that an exporter, the sidecar or a benchmark fills itself."""

from __future__ import annotations

from typing import Final

from veloxquant_mlx.telemetry.catalogue_row import Metric

__all__ = ["BENCH_ROWS", "EXPORTER_ROWS", "SIDECAR_ROWS"]

EXPORTER_ROWS: Final = (
    Metric(
        name="veloxquant_exporter_up",
        kind="gauge",
        help="1 if the process' snapshot could be read, else 0.",
    ),
    Metric(
        name="veloxquant_exporter_collect_duration_seconds",
        kind="gauge",
        help="Seconds that making this page took.",
    ),
)

# What a sidecar alone knows: the files of its folder.
SIDECAR_ROWS: Final = (
    Metric(
        name="veloxquant_exporter_snapshot_files",
        kind="gauge",
        help="Files in the snapshot folder by the state of their process; unreadable ones apart.",
        labels=("state",),
    ),
    Metric(
        name="veloxquant_exporter_removed_files_total",
        kind="counter",
        help="Files of ended processes that the sidecar removed from the snapshot folder.",
    ),
)

BENCH_ROWS: Final = (
    Metric(
        name="veloxquant_bench_duration_seconds",
        kind="gauge",
        help="Seconds a call, by benchmark, size and statistic.",
        labels=("benchmark", "n_blocks", "stat"),
    ),
    Metric(
        name="veloxquant_bench_regression_ratio",
        kind="gauge",
        help="Time over that of the base it was compared with; above 1 is slower.",
        labels=("benchmark",),
    ),
    Metric(
        name="veloxquant_bench_scaling_exponent",
        kind="gauge",
        help="Slope of log time over log size.",
        labels=("benchmark",),
    ),
    Metric(
        name="veloxquant_bench_guard_ok",
        kind="gauge",
        help="1 if the scaling guard passed.",
        labels=("benchmark",),
    ),
    Metric(
        name="veloxquant_bench_last_success_timestamp_seconds",
        kind="gauge",
        help="When the benchmark last ran to its end, in seconds since the epoch.",
        labels=("benchmark",),
    ),
)
