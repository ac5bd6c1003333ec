"""Prometheus: `PoolCollector` for any registry, and `start_http_server` for a page of its own.

Needs prometheus-client and, for the server, h11; the extra `prometheus` brings both.
"""

from __future__ import annotations

try:
    import prometheus_client  # noqa: F401 - said here once, better than by whoever imports it first
except ImportError as error:
    raise ImportError(
        "veloxquant_exporters.prometheus needs prometheus-client. "
        "Try: pip install 'veloxquant-mlx-monitor[prometheus]'",
        name=error.name,
    ) from error

from veloxquant_exporters.http import HttpServer, Limits, StartError
from veloxquant_exporters.prometheus.collector import PoolCollector
from veloxquant_exporters.prometheus.serve import DEFAULT_PORT, start_http_server

__all__ = [
    "DEFAULT_PORT",
    "HttpServer",
    "Limits",
    "PoolCollector",
    "StartError",
    "start_http_server",
]
