"""A loopback OTLP/HTTP receiver, and what its tests ask of a batch of metrics."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

Attributes = frozenset[tuple[str, str]]


class OtlpReceiver:
    """Takes OTLP over HTTP on a free port of 127.0.0.1 and keeps what came.

    Args:
        reply: Called before each answer; returns the status. It may block.
    """

    def __init__(self, reply: Callable[[], int] = lambda: 200) -> None:
        self.changed = threading.Condition()
        self.metrics: list[ExportMetricsServiceRequest] = []
        self.traces: list[ExportTraceServiceRequest] = []
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                status = reply()
                if status == 200:
                    receiver.keep(self.path, body)  # before the client may go on
                try:
                    self.send_response(status)
                    self.send_header("Content-Type", "application/x-protobuf")
                    self.send_header("Content-Length", "0")
                    self.end_headers()
                except OSError:
                    pass  # the client gave up waiting

            def log_message(self, *_: Any) -> None:
                """Quiet."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        )
        self._thread.start()

    def keep(self, path: str, body: bytes) -> None:
        """Decode and keep one request."""
        with self.changed:
            if path.endswith("/v1/metrics"):
                self.metrics.append(ExportMetricsServiceRequest.FromString(body))
            elif path.endswith("/v1/traces"):
                self.traces.append(ExportTraceServiceRequest.FromString(body))
            self.changed.notify_all()

    def wait(self, condition: Callable[[OtlpReceiver], Any], timeout_s: float = 20.0) -> Any:
        """What `condition` says once it says something true."""
        with self.changed:
            met = self.changed.wait_for(lambda: condition(self), timeout_s)
            assert met, f"not in {timeout_s} s; {len(self.metrics)} batches came"
            return met

    def close(self) -> None:
        """Stop."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def flat(attributes: Any) -> Attributes:
    """Attributes of a decoded message as a set of pairs of text."""
    return frozenset((a.key, a.value.string_value or str(a.value.int_value)) for a in attributes)


def resource_of(batch: ExportMetricsServiceRequest) -> Mapping[str, str]:
    """The resource of a batch."""
    return dict(flat(batch.resource_metrics[0].resource.attributes))


def decoded(batch: ExportMetricsServiceRequest) -> Iterator[Any]:
    """Every metric of a batch."""
    for resource in batch.resource_metrics:
        for scope in resource.scope_metrics:
            yield from scope.metrics


def values(batch: ExportMetricsServiceRequest) -> dict[tuple[str, Attributes], Any]:
    """By name and attributes: a number, or (bounds, counts, sum) of a histogram.

    Of several exports that a collector put into one batch, those of the last; no export has a
    point twice.
    """
    found: dict[tuple[str, Attributes], Any] = {}
    for resource in batch.resource_metrics:
        export: dict[tuple[str, Attributes], Any] = {}
        for metric in (metric for scope in resource.scope_metrics for metric in scope.metrics):
            kind = metric.WhichOneof("data")
            for point in getattr(metric, kind).data_points:
                key = (metric.name, flat(point.attributes))
                assert key not in export, f"twice in one export: {key}"
                export[key] = _value(kind, point)
        found |= export
    return found


def _value(kind: str | None, point: Any) -> Any:
    if kind == "histogram":
        return tuple(point.explicit_bounds), tuple(point.bucket_counts), point.sum
    return getattr(point, point.WhichOneof("value"))
