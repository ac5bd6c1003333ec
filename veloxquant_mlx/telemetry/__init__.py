"""Telemetry: hooks on the pool, snapshots of it, and the catalogue of metrics read off them."""

from __future__ import annotations

from veloxquant_mlx.telemetry.catalogue import CATALOGUE, Metric
from veloxquant_mlx.telemetry.probe import Probe
from veloxquant_mlx.telemetry.process import ProcessSnapshot
from veloxquant_mlx.telemetry.publisher import publish, publish_from_environment, stop_publishing
from veloxquant_mlx.telemetry.recorder import Recorder, record
from veloxquant_mlx.telemetry.registry import (
    instrument,
    instrument_all,
    stop_instrumenting_all,
    take_snapshot,
    uninstrument,
)
from veloxquant_mlx.telemetry.self_check import check_pool
from veloxquant_mlx.telemetry.snapshot import PoolSnapshot, StreamSnapshot

__all__ = [
    "CATALOGUE",
    "Metric",
    "PoolSnapshot",
    "Probe",
    "ProcessSnapshot",
    "Recorder",
    "StreamSnapshot",
    "check_pool",
    "instrument",
    "instrument_all",
    "publish",
    "record",
    "stop_instrumenting_all",
    "stop_publishing",
    "take_snapshot",
    "uninstrument",
]

publish_from_environment()
