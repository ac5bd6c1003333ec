"""OtlpPipeline: a pipeline of our own, from the source to an OTLP endpoint.

For the sidecar, for `vqmon run`, and for programs without OpenTelemetry of their own. It has its
own provider, which is global only if asked. Its reader outlives every failed export, ends within a
bound whatever the endpoint does, and does not run on in a forked child.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, Self
from urllib.parse import urlsplit, urlunsplit

from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.instrumentation.utils import suppress_instrumentation
from opentelemetry.metrics import set_meter_provider
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import (
    MetricExporter,
    MetricExportResult,
    MetricReader,
    MetricsData,
    ResourceMetrics,
    ScopeMetrics,
)
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from veloxquant_exporters import __version__
from veloxquant_exporters.opentelemetry.feed import Feed
from veloxquant_exporters.opentelemetry.maker import MetricMaker
from veloxquant_exporters.opentelemetry.naming import (
    HISTOGRAMS,
    OBSERVABLES,
    SCOPE,
    Style,
    style_of,
)
from veloxquant_exporters.opentelemetry.resource import make_resource
from veloxquant_exporters.opentelemetry.spans import dropped_span_events
from veloxquant_exporters.sources import LiveSource, SnapshotSource

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource

__all__ = ["CLOSE_S", "OtlpPipeline"]

_log = logging.getLogger("veloxquant_exporters.opentelemetry")

CLOSE_S: Final = 3.5  # with what it takes to get there, 5 s are kept
# A last export to an endpoint that did not answer the one before gets no more than this.
LAST_TRY_S: Final = 1.0
DEFAULT_INTERVAL_S: Final = 60.0
METRICS_PATH: Final = "/v1/metrics"


class _Reader(MetricReader):
    """Collects and exports on a thread of its own, every interval and on demand.

    Args:
        exporter: Sends.
        feed: Gives our readings; what others put on the provider is collected as ever.
        style: Names of our attributes.
        resource: Who speaks.
        interval_s: Seconds between exports.
    """

    def __init__(
        self,
        exporter: MetricExporter,
        feed: Feed,
        style: Style,
        resource: Resource,
        interval_s: float,
    ) -> None:
        preferred = exporter._preferred_temporality  # noqa: SLF001 - as the SDK's readers do
        super().__init__(
            preferred_temporality=preferred,
            preferred_aggregation=exporter._preferred_aggregation,  # noqa: SLF001
        )
        self._exporter = exporter
        self._feed = feed
        self._style: Style = style
        self._resource = resource
        self._scope = InstrumentationScope(SCOPE, __version__)
        self._maker = MetricMaker(
            {**OBSERVABLES, **{row.otel or row.name: (row,) for row in HISTOGRAMS}},
            preferred,
            lambda: {"span_events": dropped_span_events()},
        )
        self._interval_s = interval_s
        self._timeout_s = _env_ms("OTEL_METRIC_EXPORT_TIMEOUT", 30.0)
        self._pid = os.getpid()
        self._changed = threading.Condition()
        self._wanted = 0  # rounds asked for; the thread is done with `_done` of them
        self._done = 0
        self._stopping = False
        self._closed = False
        self._others: list[ResourceMetrics] = []
        self.last_ok = True
        self.n_failed = 0
        self._thread = threading.Thread(target=self._run, name="veloxquant-otlp", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def flush(self, timeout_s: float) -> bool:
        """Export now; True if that went well within the time."""
        if os.getpid() != self._pid or self._stopping:
            return False
        with self._changed:
            # A round that has begun may have missed what the caller wants to see.
            self._wanted = mark = self._wanted + 1
            self._changed.notify_all()
            done = self._changed.wait_for(lambda: self._done >= mark, timeout_s)
            return done and self.last_ok

    def force_flush(self, timeout_millis: float = 10_000) -> bool:
        return self.flush(timeout_millis / 1e3)

    def shutdown(self, timeout_millis: float = 30_000, **kwargs: Any) -> None:
        """Export once more and end; see `CLOSE_S`. In a forked child, nothing."""
        if os.getpid() != self._pid or self._closed:
            return
        deadline = time.monotonic() + timeout_millis / 1e3
        self._closed = True
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        grace_s = timeout_millis / 1e3 if self.last_ok else LAST_TRY_S
        self._thread.join(max(0.0, min(grace_s, deadline - time.monotonic() - 0.5)))
        # Ends the waits between the tries of an export that is still at it.
        self._exporter.shutdown()
        self._thread.join(max(0.0, min(0.5, deadline - time.monotonic())))

    def _receive_metrics(
        self, metrics_data: MetricsData, timeout_millis: float = 10_000, **kwargs: Any
    ) -> None:
        self._others = list(metrics_data.resource_metrics)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._stopping or self._wanted > self._done, self._interval_s
                )
                mark, last = self._wanted, self._stopping
            self._round()
            with self._changed:
                self._done = mark
                self._changed.notify_all()
            if last:
                return

    def _round(self) -> None:
        try:
            with suppress_instrumentation():  # an instrumented HTTP client must not trace this
                result = self._exporter.export(
                    self._gathered(), timeout_millis=self._timeout_s * 1e3
                )
            self.last_ok = result is MetricExportResult.SUCCESS
        except Exception:  # noqa: BLE001 - the next round may do better; a dead thread never would
            self.last_ok = False
            _log.warning("exporting metrics failed; will go on", exc_info=True)
        if not self.last_ok:
            self.n_failed += 1
            self._feed.count("otel_export")

    def _gathered(self) -> MetricsData:
        """Ours, and what others put on the provider."""
        self._others = []
        try:
            self.collect(timeout_millis=self._timeout_s * 1e3)
        except Exception:  # noqa: BLE001 - theirs failing leaves ours alone
            _log.warning("collecting the metrics of others failed", exc_info=True)
        made = self._maker.make(self._feed.reading(self), self._feed, self._style)
        ours = ScopeMetrics(self._scope, made, "")
        # One entry for the one resource: the encoder keeps the last of several.
        theirs = [scope for entry in self._others for scope in entry.scope_metrics]
        return MetricsData([ResourceMetrics(self._resource, [ours, *theirs], "")])


class OtlpPipeline:
    """Exports what `source` has over OTLP until it is closed.

    Histograms go out as the buckets that the hooks filled, and no SDK remembers a series that is
    gone. What others put on `provider` is exported as well. Everything that is None follows the
    environment, as the OpenTelemetry specification has it: `OTEL_EXPORTER_OTLP_ENDPOINT`,
    `OTEL_EXPORTER_OTLP_HEADERS`, `OTEL_METRIC_EXPORT_INTERVAL`, `OTEL_RESOURCE_ATTRIBUTES`, ...

    Args:
        endpoint: URL of the collector; without a path, `/v1/metrics` is added.
        source: None takes the watched pools of this process.
        headers: Sent with every request.
        interval_s: Seconds between exports.
        resource: Who speaks; None takes `make_resource(service_instance_id)`.
        service_instance_id: Tells this process from its like.
        attributes: As in `instrument_meter`.
        exporter: Used in place of an OTLP/HTTP one.
        set_global: Make the provider the global one as well.

    Raises:
        ValueError: A bad endpoint, interval or `attributes`.
    """

    def __init__(
        self,
        endpoint: str | None = None,
        *,
        source: SnapshotSource | None = None,
        headers: Mapping[str, str] | None = None,
        interval_s: float | None = None,
        resource: Resource | None = None,
        service_instance_id: str | None = None,
        attributes: str | None = None,
        exporter: MetricExporter | None = None,
        set_global: bool = False,
    ) -> None:
        interval_s = _interval_s(interval_s)
        style = style_of(attributes)
        if exporter is None:
            exporter = OTLPMetricExporter(
                endpoint=None if endpoint is None else _metrics_url(endpoint),
                headers=headers,
            )
        self.resource = make_resource(service_instance_id) if resource is None else resource
        self._feed = Feed(source if source is not None else LiveSource())
        self._reader = _Reader(exporter, self._feed, style, self.resource, interval_s)
        self.provider = MeterProvider(
            metric_readers=[self._reader], resource=self.resource, shutdown_on_exit=False
        )
        self._reader.start()
        atexit.register(self.close)
        if set_global:
            set_meter_provider(self.provider)

    @property
    def n_failed(self) -> int:
        """Exports that failed so far."""
        return self._reader.n_failed

    def flush(self, timeout_s: float = CLOSE_S) -> bool:
        """Export now. True if the endpoint took it within the time."""
        return self._reader.flush(timeout_s)

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Export once more and stop, within `timeout_s` whatever the endpoint does.

        May be called twice. In a forked child it does nothing: the pipeline is the parent's.
        """
        atexit.unregister(self.close)
        self._reader.shutdown(timeout_s * 1e3)
        if os.getpid() == self._reader._pid:  # noqa: SLF001 - one file
            self._feed.close()
            self._feed.join(0.1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _metrics_url(endpoint: str) -> str:
    url = urlsplit(endpoint)
    if url.scheme not in {"http", "https"} or not url.netloc:
        raise ValueError(f"endpoint must be a URL such as http://localhost:4318, got {endpoint!r}")
    return urlunsplit(url._replace(path=METRICS_PATH)) if url.path in {"", "/"} else endpoint


def _interval_s(given: float | None) -> float:
    if given is not None:
        if not given > 0:
            raise ValueError(f"interval_s must be above 0, got {given!r}")
        return given
    return _env_ms("OTEL_METRIC_EXPORT_INTERVAL", DEFAULT_INTERVAL_S)


def _env_ms(name: str, default_s: float) -> float:
    """Seconds from a variable in milliseconds; a bad one is told and not used."""
    text = os.environ.get(name, "").strip()
    if not text:
        return default_s
    try:
        value = float(text) / 1e3
    except ValueError:
        value = 0.0
    if not value > 0:
        _log.warning("%s must be a number of milliseconds above 0, got %r", name, text)
        return default_s
    return value
