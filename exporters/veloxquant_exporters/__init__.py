"""Exporters of block-pool telemetry: Prometheus, OpenTelemetry, the sidecar, the ``vqmon`` command.

Importing this package loads none of them. Each module imports its own library and says which extra
brings it: ``prometheus``, ``otel`` or ``cli``.
"""

from __future__ import annotations

from veloxquant_mlx import __version__

__all__ = ["__version__"]
