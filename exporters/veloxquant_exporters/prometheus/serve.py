"""start_http_server: the metrics page, served from inside the program."""

from __future__ import annotations

from typing import Final

from prometheus_client import CollectorRegistry

from veloxquant_exporters.http import HttpServer, Limits, Route, Tls
from veloxquant_exporters.prometheus.collector import PoolCollector
from veloxquant_exporters.prometheus.pages import Pages
from veloxquant_exporters.sources import LiveSource, SnapshotSource

__all__ = ["DEFAULT_PORT", "start_http_server"]

DEFAULT_PORT: Final = 9464


def start_http_server(
    port: int = DEFAULT_PORT,
    addr: str = "127.0.0.1",
    *,
    registry: CollectorRegistry | None = None,
    source: SnapshotSource | None = None,
    certfile: str | None = None,
    keyfile: str | None = None,
    client_cafile: str | None = None,
    gzip: bool = True,
    limits: Limits | None = None,
) -> HttpServer:
    """Serve `/metrics` from two threads of this program, until `stop()` of what is returned.

    Args:
        port: 0 takes a free one; the handle's `port` and `url` tell which.
        addr: What to listen on. The default is this machine only; "::" is every interface, without
            any authentication: see docs/prometheus.md for a proxy that asks for one.
        registry: What to serve; None is the pools of `source` alone. A registry of the program's
            own shows the pools when a `PoolCollector` is registered with it.
        source: Where snapshots come from; None is the watched pools of this process.
        certfile: PEM; serves HTTPS. Renewed files are taken up without a restart.
        keyfile: PEM without a passphrase; None if the key is in `certfile`.
        client_cafile: PEM; only clients with a certificate of these authorities get in.
        gzip: Compress for clients that accept it.
        limits: How long, and how many, clients may be.

    Returns:
        The running server; a context manager too.

    Raises:
        StartError: (an OSError) The port is taken, the address is not this machine's, or the
            certificate cannot be used; in one line. Nothing is left running.
        ValueError: The port is out of range, or `keyfile` or `client_cafile` has no `certfile`.
    """
    if certfile is None and (keyfile is not None or client_cafile is not None):
        raise ValueError("keyfile and client_cafile need a certfile")
    tls = None if certfile is None else Tls(certfile, keyfile, client_cafile)
    source = LiveSource() if source is None else source
    if registry is None:
        registry = CollectorRegistry()
        registry.register(PoolCollector(source))
    pages = Pages(registry, source, gzip=gzip, tls=tls)
    routes = {"/": Route(pages.landing), "/metrics": Route(pages.metrics)}
    return HttpServer(routes, addr=addr, port=port, tls=tls, limits=limits)
