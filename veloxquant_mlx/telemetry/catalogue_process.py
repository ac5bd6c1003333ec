"""Rows of the catalogue that are read off a process."""

from __future__ import annotations

from typing import Final

from veloxquant_mlx.telemetry.catalogue_row import Metric, of_process

__all__ = ["PROCESS_ROWS"]

_MLX: Final = "veloxquant.mlx.memory."

PROCESS_ROWS: Final = (
    Metric(
        name="veloxquant_mlx_memory_active_bytes",
        kind="gauge",
        help="Bytes of live MLX arrays.",
        otel=_MLX + "usage",
        instrument="updowncounter",
        ucum="By",
        attributes={"veloxquant.mlx.memory.state": "active"},
        read_process=of_process(lambda p: p.mlx_active_bytes),
    ),
    Metric(
        name="veloxquant_mlx_memory_cache_bytes",
        kind="gauge",
        help="Bytes that MLX keeps for reuse; given back under pressure or by clear_cache().",
        otel=_MLX + "usage",
        instrument="updowncounter",
        ucum="By",
        attributes={"veloxquant.mlx.memory.state": "cached"},
        read_process=of_process(lambda p: p.mlx_cache_bytes),
    ),
    Metric(
        name="veloxquant_mlx_memory_peak_bytes",
        kind="gauge",
        help="High-water mark of active bytes only, without the cache.",
        otel=_MLX + "usage_peak",
        instrument="gauge",
        ucum="By",
        read_process=of_process(lambda p: p.mlx_peak_bytes),
    ),
    Metric(
        name="veloxquant_mlx_memory_limit_bytes",
        kind="gauge",
        help="Bytes that MLX should stay within: the device's recommended working set, or its "
        "memory. Absent where the device does not tell.",
        otel=_MLX + "limit",
        instrument="updowncounter",
        ucum="By",
        read_process=of_process(lambda p: p.mlx_limit_bytes),
    ),
    Metric(
        name="veloxquant_process_resident_memory_bytes",
        kind="gauge",
        help="Resident memory of the serving process.",
        otel="process.memory.usage",
        instrument="updowncounter",
        ucum="By",
        read_process=of_process(lambda p: p.resident_bytes),
    ),
    Metric(
        name="veloxquant_process_phys_footprint_bytes",
        kind="gauge",
        help="Physical footprint as Activity Monitor shows it; macOS only.",
        otel="veloxquant.process.phys_footprint",
        instrument="updowncounter",
        ucum="By",
        read_process=of_process(lambda p: p.footprint_bytes),
    ),
    Metric(
        name="veloxquant_exporter_snapshot_timestamp_seconds",
        kind="gauge",
        help="When the process' snapshot was taken, in seconds since the epoch.",
        read_process=of_process(lambda p: p.wall_s),
    ),
    Metric(
        name="veloxquant_exporter_collect_errors_total",
        kind="counter",
        help="Failures of the telemetry itself, by reason; the serving code never sees them.",
        labels=("reason",),
        otel="veloxquant.exporter.collect_errors",
        instrument="counter",
        ucum="{error}",
        read_process=lambda p: [((reason,), n) for reason, n in p.errors.items()],
    ),
    Metric(
        name="veloxquant_exporter_dropped_events_total",
        kind="counter",
        help="Events and pools that telemetry left out to stay within its bounds, by reason.",
        labels=("reason",),
        otel="veloxquant.exporter.dropped_events",
        instrument="counter",
        ucum="{event}",
        read_process=lambda p: [((reason,), n) for reason, n in p.dropped.items()],
    ),
    Metric(
        name="veloxquant_telemetry_overhead_seconds_total",
        kind="counter",
        help="Seconds of CPU spent on telemetry: samples and snapshots as timed, plain calls "
        "estimated. Its rate is the fraction of a core.",
        otel="veloxquant.telemetry.overhead",
        instrument="counter",
        ucum="s",
        read_process=of_process(lambda p: p.overhead_s),
    ),
    Metric(
        name="veloxquant_build_info",
        kind="gauge",
        help="1, with versions as labels.",
        labels=("version", "python", "mlx"),
        read_process=lambda p: [((p.version, p.python, p.mlx), 1)],
    ),
)
