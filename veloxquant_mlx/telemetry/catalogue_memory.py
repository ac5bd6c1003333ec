"""Rows of the catalogue that account for the memory of a process that uses MLX."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from veloxquant_mlx.telemetry.catalogue_row import Metric, Sample, of_process
from veloxquant_mlx.telemetry.process import ProcessSnapshot

__all__ = ["MEMORY_ROWS"]

MLX: Final = "veloxquant.mlx.memory."


def _account(process: ProcessSnapshot) -> Iterable[Sample]:
    """Parts that add up to the active bytes; none without a program, or without MLX."""
    program, active = process.program, process.mlx_active_bytes
    if program is None or active is None:
        return []
    told = {"weights": program.weights_bytes, "kv_cache": program.kv_bytes}
    parts = {kind: n for kind, n in told.items() if n is not None}
    parts["rest"] = active - sum(parts.values())
    return [((kind,), n) for kind, n in parts.items()]


def _beside_mlx(process: ProcessSnapshot) -> int | None:
    """Of the process' memory, what MLX does not know; None where MLX's is not the process'."""
    if process.mlx_active_bytes is None or process.mlx_device_total_bytes is not None:
        return None
    whole = process.footprint_bytes or process.resident_bytes
    return (
        None if whole is None else whole - process.mlx_active_bytes - (process.mlx_cache_bytes or 0)
    )


MEMORY_ROWS: Final = (
    Metric(
        name="veloxquant_mlx_memory_account_bytes",
        kind="gauge",
        help="MLX's active bytes by what they are: weights, kv_cache (all live caches), rest "
        "(activations, and whatever else is unaccounted). They add up to the active bytes. rest is "
        "negative where copies of caches share buffers, or caches and weights are not evaluated.",
        labels=("kind",),
        otel=MLX + "account.usage",
        instrument="updowncounter",
        ucum="By",
        attribute_names={"kind": MLX + "kind"},
        read_process=_account,
    ),
    Metric(
        name="veloxquant_mlx_memory_device_total_bytes",
        kind="gauge",
        help="Memory of the device that MLX uses, where it is not the machine's (CUDA).",
        otel=MLX + "device.limit",
        instrument="updowncounter",
        ucum="By",
        read_process=of_process(lambda p: p.mlx_device_total_bytes),
    ),
    Metric(
        name="veloxquant_mlx_memory_device_free_bytes",
        kind="gauge",
        help="Memory of that device that no process has taken (CUDA).",
        otel=MLX + "device.free",
        instrument="updowncounter",
        ucum="By",
        read_process=of_process(lambda p: p.mlx_device_free_bytes),
    ),
    Metric(
        name="veloxquant_process_unaccounted_bytes",
        kind="gauge",
        help="The process' memory (footprint, or resident) less what MLX has active and cached: "
        "Python, libraries, buffers of the runtime. Negative where MLX counts memory that was never "
        "touched or was swapped out. Absent where MLX's memory is a device's own.",
        otel="veloxquant.process.unaccounted",
        instrument="updowncounter",
        ucum="By",
        read_process=of_process(_beside_mlx),
    ),
)
