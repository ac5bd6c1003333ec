"""Exporters of block-pool telemetry: Prometheus, OpenTelemetry, the sidecar, the ``vqmon`` command.

Importing this package loads none of them. Each module imports its own library and says which extra
brings it: ``prometheus``, ``otel`` or ``cli``.
"""

from __future__ import annotations

__all__ = ["__version__"]

# Of its own, not `veloxquant_mlx`'s: another distribution brings a package of that name, and
# `vqmon doctor` must run to say so.
__version__ = "0.1.0"
