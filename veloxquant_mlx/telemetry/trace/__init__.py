"""Traces: what a recorder wrote, read back as NumPy columns. docs/traces.md."""

from __future__ import annotations

from veloxquant_mlx.telemetry.trace.positions import Picks
from veloxquant_mlx.telemetry.trace.reader import load_trace
from veloxquant_mlx.telemetry.trace.schema import (
    OPERATIONS,
    OUTCOMES,
    Header,
    Holding,
    Level,
    Opening,
    TraceError,
)
from veloxquant_mlx.telemetry.trace.trace import Event, Gap, Samples, Snapshot, Trace

__all__ = [
    "OPERATIONS",
    "OUTCOMES",
    "Event",
    "Gap",
    "Header",
    "Holding",
    "Level",
    "Opening",
    "Picks",
    "Samples",
    "Snapshot",
    "Trace",
    "TraceError",
    "load_trace",
]
