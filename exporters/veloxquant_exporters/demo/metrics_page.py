"""The page for Prometheus, served on the loopback interface."""

from __future__ import annotations

import errno
from types import TracebackType
from typing import Self

from click import ClickException
from prometheus_client import CollectorRegistry, start_http_server

from veloxquant_exporters.demo.collector import PoolCollector
from veloxquant_exporters.sources import LiveSource

__all__ = ["MetricsPage"]

HOST = "127.0.0.1"


class MetricsPage:
    """Serves `/metrics` of this process's watched pools from a thread of its own, until it is left.

    Args:
        port: 0 takes a free one.

    Raises:
        ClickException: The port cannot be had.
    """

    def __init__(self, port: int) -> None:
        registry = CollectorRegistry(auto_describe=False)
        registry.register(PoolCollector(LiveSource()))
        try:
            self._server, self._thread = start_http_server(port, HOST, registry)
        except OSError as error:
            raise ClickException(_refusal(port, error)) from error
        self.url = f"http://{HOST}:{self._server.server_port}/metrics"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _refusal(port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} of {HOST} is taken; choose another with --port, or any with --port 0"
    if error.errno == errno.EACCES:
        return f"port {port} is not allowed for this user; choose one above 1023 with --port"
    return f"cannot serve on port {port} of {HOST}: {error}"
