"""A paged KV-cache block pool for MLX that can be watched.

Importing this package loads neither MLX nor an exporter nor an HTTP server: a sidecar that only
reads snapshots must start on a machine without a GPU. The parts live in ``veloxquant_mlx.core``
(errors, cache interface), ``veloxquant_mlx.memory`` (allocator, storage, caches) and
``veloxquant_mlx.telemetry`` (hooks, snapshots, the metric catalogue).

With ``VELOXQUANT_INSTRUMENT=1`` in the environment every pool of the process is watched from the
start, as by ``veloxquant_mlx.telemetry.instrument_all()``; that loads the telemetry, still no MLX.
"""

from __future__ import annotations

import os

__all__ = ["__version__"]

__version__ = "0.1.0"


def _instrument_if_asked() -> None:
    """Do what ``VELOXQUANT_INSTRUMENT`` says; whatever goes wrong, the program runs unwatched."""
    asked = os.environ.get("VELOXQUANT_INSTRUMENT", "").strip().lower()
    if asked in ("", "0", "false", "no", "off"):
        return
    try:
        from veloxquant_mlx.telemetry import instrument_all

        instrument_all()
    except Exception:
        # Serving must not fail for want of telemetry.
        import logging

        logging.getLogger("veloxquant_mlx.telemetry").exception("pools are not instrumented")


_instrument_if_asked()
