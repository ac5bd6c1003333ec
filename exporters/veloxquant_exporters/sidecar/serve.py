"""What `vqmon serve` does: the metrics of a folder over HTTP, and over OTLP if asked for."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Final

from prometheus_client import CollectorRegistry

from veloxquant_exporters.fetch import without_password
from veloxquant_exporters.http import HttpServer, Route, Tls
from veloxquant_exporters.prometheus.pages import Pages
from veloxquant_exporters.sidecar.collector import SidecarCollector
from veloxquant_exporters.sidecar.debug_pages import DebugPages, SidecarServer, debug_routes
from veloxquant_exporters.sidecar.directory_source import RETENTION_S, DirectorySource
from veloxquant_exporters.sidecar.log_setup import set_up_logging
from veloxquant_mlx.telemetry import stop_publishing

__all__ = ["DEFAULT_PORT", "Settings", "run", "start_sidecar_server"]

_log = logging.getLogger("veloxquant_exporters.sidecar")

DEFAULT_PORT: Final = 9465


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What to serve, and where.

    Attributes:
        directory: The folder of snapshot files; need not exist yet.
        port: 0 takes a free one.
        addr: The default is this machine only.
        retention_s: Seconds that an ended process is remembered.
        certfile, keyfile, client_cafile: PEM; see `start_http_server`.
        otlp_endpoint: URL of a collector to push to as well.
        otlp_interval_s: Seconds between pushes; None follows the environment.
        log_level, log_format: See `set_up_logging`.
    """

    directory: str
    port: int = DEFAULT_PORT
    addr: str = "127.0.0.1"
    retention_s: float = RETENTION_S
    certfile: str | None = None
    keyfile: str | None = None
    client_cafile: str | None = None
    otlp_endpoint: str | None = None
    otlp_interval_s: float | None = None
    log_level: str = "info"
    log_format: str = "text"


def run(settings: Settings) -> int:
    """Serve until SIGTERM or SIGINT; for the main thread of a program.

    Returns:
        The exit code: 0 when it was told to stop, 1 when it could not start, as the log says.
    """
    set_up_logging(settings.log_level, settings.log_format)
    stop_publishing()  # the variable that names the folder is meant for those who have pools
    stopping = threading.Event()
    before = {
        number: signal.signal(number, lambda *_: stopping.set())
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        with ExitStack() as stack:
            source = stack.enter_context(
                DirectorySource(settings.directory, retention_s=settings.retention_s)
            )
            if settings.otlp_endpoint is not None:
                _push(stack, source, settings)
            server = stack.enter_context(start_sidecar_server(source, settings))
            _log.info("serving %s at %s/metrics", settings.directory, server.url)
            stopping.wait()
            _log.info("stopping")
    except (OSError, ValueError, ImportError) as error:
        _log.error("%s", error)
        return 1
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return 0


def start_sidecar_server(
    source: DirectorySource,
    settings: Settings,
    *,
    clock: Callable[[], float] = time.monotonic,
) -> HttpServer:
    """Serve `source` on `/metrics` and `/debug/last`, until `stop()` of what is returned.

    Raises:
        StartError: The port is taken, the address is not this machine's, or the certificate cannot
            be used.
        ValueError: The port is out of range, or a file needs a `certfile`.
    """
    if settings.certfile is None and (settings.keyfile or settings.client_cafile):
        raise ValueError("a key or client CA needs a certificate (--tls-cert)")
    tls = None
    if settings.certfile is not None:
        tls = Tls(settings.certfile, settings.keyfile, settings.client_cafile)
    registry = CollectorRegistry()
    registry.register(SidecarCollector(source))
    pages = Pages(registry, source, gzip=True, tls=tls)
    routes = {"/": Route(pages.landing), "/metrics": Route(pages.metrics)}
    routes |= debug_routes(DebugPages(source, clock))
    return SidecarServer(routes, addr=settings.addr, port=settings.port, tls=tls)


def _push(stack: ExitStack, source: DirectorySource, settings: Settings) -> None:
    from veloxquant_exporters.opentelemetry import OtlpPipeline

    pipeline = OtlpPipeline(
        settings.otlp_endpoint, source=source, interval_s=settings.otlp_interval_s
    )
    stack.callback(pipeline.close)
    _log.info("pushing to %s", without_password(settings.otlp_endpoint or ""))
