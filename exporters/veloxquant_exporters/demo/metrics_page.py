"""The page for Prometheus, on the loopback interface."""

from __future__ import annotations

from click import ClickException

from veloxquant_exporters.prometheus import HttpServer, StartError, start_http_server

__all__ = ["metrics_page"]


def metrics_page(port: int) -> HttpServer:
    """Serve `/metrics` of this process's watched pools on 127.0.0.1 until the server is left.

    Args:
        port: 0 takes a free one.

    Raises:
        ClickException: The port cannot be had; in one line.
    """
    try:
        return start_http_server(port)
    except StartError as error:
        raise ClickException(f"{error}; see --port") from error
