"""A paged KV-cache block pool for MLX that can be watched.

Importing this package loads neither MLX nor an exporter nor an HTTP server: a sidecar that only
reads snapshots must start on a machine without a GPU. The parts live in ``veloxquant_mlx.core``
(errors, cache interface), ``veloxquant_mlx.memory`` (allocator, storage, caches) and
``veloxquant_mlx.telemetry`` (hooks, snapshots, the metric catalogue).
"""

from __future__ import annotations

__all__ = ["__version__"]

__version__ = "0.1.0"
