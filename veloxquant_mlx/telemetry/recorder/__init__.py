"""The flight recorder: the newest calls on a pool, dumped as traces. docs/traces.md."""

from __future__ import annotations

from veloxquant_mlx.telemetry.recorder.keeper import TICK_S, record
from veloxquant_mlx.telemetry.recorder.recorder import Recorder

__all__ = ["TICK_S", "Recorder", "record"]
