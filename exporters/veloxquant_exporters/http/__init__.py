"""A small HTTP server for use inside another program: a few paths, GET and HEAD, TLS if wanted.

It knows nothing of metrics. Needs h11, which the extra `prometheus` brings.
"""

from __future__ import annotations

try:
    import h11  # noqa: F401 - the message below is better than the one of the module that uses it
except ImportError as error:
    raise ImportError(
        "veloxquant_exporters.http needs h11. "
        "Try: pip install 'veloxquant-mlx-monitor[prometheus]'",
        name=error.name,
    ) from error

from veloxquant_exporters.http.accept import Range, accepts_gzip, parse_accept
from veloxquant_exporters.http.address import StartError
from veloxquant_exporters.http.connection import Limits
from veloxquant_exporters.http.message import Handler, Request, Response, text_response
from veloxquant_exporters.http.server import HttpServer, Route
from veloxquant_exporters.http.tls import Tls

__all__ = [
    "Handler",
    "HttpServer",
    "Limits",
    "Range",
    "Request",
    "Response",
    "Route",
    "StartError",
    "Tls",
    "accepts_gzip",
    "parse_accept",
    "text_response",
]
