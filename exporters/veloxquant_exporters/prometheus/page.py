"""Page: a registry rendered in the format the client asked for."""

from __future__ import annotations

import gzip
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from prometheus_client import exposition
from prometheus_client.metrics_core import Metric  # noqa: TC002 - loaded with the registry anyway
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

from veloxquant_exporters.http.accept import Range, parse_accept
from veloxquant_exporters.prometheus.exposition import render_plain

__all__ = ["OPENMETRICS", "TEXT", "Offer", "choose", "compress", "render"]


@dataclass(frozen=True, slots=True)
class Offer:
    """A format: its media type and the version that is written."""

    media_type: str
    version: str

    @property
    def content_type(self) -> str:
        """The value of Content-Type."""
        return f"{self.media_type}; version={self.version}; charset=utf-8"


TEXT: Final = Offer("text/plain", "0.0.4")
OPENMETRICS: Final = Offer("application/openmetrics-text", "1.0.0")


def choose(accept: str) -> Offer:
    """The offer that an Accept header likes best.

    At the same q, the one it names goes before one that a wildcard covers; OpenMetrics, which says
    more, before the text format where both are named, and after it where neither is. Where nothing
    on offer is acceptable it is the text format: a scraper with odd headers still gets its page.
    """
    ranges = parse_accept(accept)
    text_q, text_named = _liking(TEXT, ranges)
    open_q, open_named = _liking(OPENMETRICS, ranges)
    if not open_q or (open_q, open_named) < (text_q, text_named):
        return TEXT
    return OPENMETRICS if open_named or open_q > text_q else TEXT


def _liking(offer: Offer, ranges: Iterable[Range]) -> tuple[float, bool]:
    """The q of the most specific range that covers the offer, and whether it names it."""
    best: tuple[int, float] | None = None
    kind = offer.media_type.split("/")[0]
    for item in ranges:
        if item.parameters.get("version", offer.version) != offer.version:
            continue
        names = ("*/*", f"{kind}/*", offer.media_type)
        if item.value in names:
            rank = names.index(item.value) + ("version" in item.parameters)
            best = max(best or (-1, 0.0), (rank, item.q))
    return (0.0, False) if best is None else (best[1], best[0] >= 2)


def render(registry: Collector, offer: Offer) -> bytes:
    """Everything that `registry` collects now, in UTF-8.

    Raises:
        Exception: What a collector of the registry raises; nothing is rendered then.
    """
    families = list(registry.collect())
    page = render_plain(families, openmetrics=offer is OPENMETRICS)
    if page is None:
        page = _render_anything(_Collected(families), offer)
    return page


def _render_anything(collected: Collector, offer: Offer) -> bytes:
    if offer is TEXT:
        return exposition.generate_latest(collected)
    page: bytes = openmetrics.generate_latest(collected)  # type: ignore[no-untyped-call]
    return page


def compress(body: bytes) -> bytes:
    """With gzip, quickly: series compress well at any level. The same bytes give the same bytes."""
    return gzip.compress(body, compresslevel=1, mtime=0)


class _Collected(Collector):
    """Families that are collected already."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        return iter(self._families)
