"""Pages: the handlers of the metrics page and of the landing page."""

from __future__ import annotations

from urllib.parse import parse_qs

from prometheus_client import CollectorRegistry  # noqa: TC002 - loaded by the page anyway

from veloxquant_exporters.http import Request, Response, Tls, accepts_gzip
from veloxquant_exporters.prometheus.landing import LANDING_HEADERS, landing_page
from veloxquant_exporters.prometheus.page import choose, compress, render
from veloxquant_exporters.sources import SnapshotSource

__all__ = ["Pages"]


class Pages:
    """The handlers of `/metrics` and `/`. Any thread may call them.

    Args:
        registry: What the metrics page shows.
        source: Where the landing page has its table from.
        gzip: Compress for clients that accept it.
        tls: Renewed when a scrape comes after its files changed.
    """

    def __init__(
        self, registry: CollectorRegistry, source: SnapshotSource, *, gzip: bool, tls: Tls | None
    ) -> None:
        self._registry = registry
        self._source = source
        self._gzip = gzip
        self._tls = tls

    def metrics(self, request: Request) -> Response:
        """The metrics; `name[]=` restricts them to samples of these names."""
        if self._tls is not None:
            self._tls.renew()
        names = parse_qs(request.query).get("name[]")
        registry = self._registry.restricted_registry(names) if names else self._registry
        offer = choose(request.header("accept"))
        body = render(registry, offer)
        headers: tuple[tuple[str, str], ...] = (("vary", "Accept, Accept-Encoding"),)
        if self._gzip and accepts_gzip(request.header("accept-encoding")):
            body, headers = compress(body), (*headers, ("content-encoding", "gzip"))
        return Response(200, body, offer.content_type, headers)

    def landing(self, request: Request) -> Response:
        """Links, and a table of the pools."""
        return Response(
            200, landing_page(self._source), "text/html; charset=utf-8", LANDING_HEADERS
        )
