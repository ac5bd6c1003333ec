"""What every metrics page of the tests must pass, and how they fetch one."""

from __future__ import annotations

import gzip
import http.client
import re
import shutil
import ssl
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from prometheus_client import CollectorRegistry  # noqa: TC002 - loaded below anyway
from prometheus_client.metrics_core import Metric  # noqa: TC002
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as parse_openmetrics,
)
from prometheus_client.parser import text_string_to_metric_families as parse_text

from veloxquant_exporters.prometheus.page import OPENMETRICS, TEXT, Offer, render

__all__ = [
    "CONTRACT",
    "WAIVER",
    "Fetched",
    "P",
    "Series",
    "checked",
    "families_of",
    "fetch",
    "lint",
    "page_of",
    "series_of",
]

P = "veloxquant_block_pool_"
CONTRACT = tuple(
    P + name
    for name in (
        "blocks_in_use",
        "blocks_total",
        "fragmentation",
        "peak_blocks_in_use",
        "allocations_total",
        "frees_total",
        "reused_total",
        "exhausted_total",
        "grown_total",
        "retired_total",
    )
)
# The one name that the contract fixes against the guide.
WAIVER = f'{P}blocks_total non-counter metrics should not have "_total" suffix'

Series = dict[tuple[str, tuple[tuple[str, str], ...]], float]


@dataclass(frozen=True, slots=True)
class Fetched:
    """An HTTP answer, its body unpacked."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    raw: bytes = field(default=b"", repr=False)


def fetch(
    url: str,
    path: str = "/metrics",
    *,
    method: str = "GET",
    headers: Mapping[str, str] | None = None,
    context: ssl.SSLContext | None = None,
) -> Fetched:
    """Ask once, over a connection of its own."""
    parts = urlsplit(url)
    assert parts.hostname is not None
    connection: http.client.HTTPConnection
    if parts.scheme == "https":
        connection = http.client.HTTPSConnection(
            parts.hostname, parts.port, timeout=20, context=context
        )
    else:
        connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=20)
    try:
        connection.request(method, path, headers=dict(headers or {}))
        answer = connection.getresponse()
        raw = answer.read()
        got = {name.lower(): value for name, value in answer.getheaders()}
    finally:
        connection.close()
    body = gzip.decompress(raw) if got.get("content-encoding") == "gzip" and raw else raw
    return Fetched(answer.status, got, body, raw)


def page_of(registry: CollectorRegistry, offer: Offer = TEXT) -> str:
    """A page as the server renders it, checked."""
    return checked(render(registry, offer), offer.content_type)


def checked(body: bytes, content_type: str) -> str:
    """The page, after the checks that every page must pass.

    Raises:
        AssertionError: A parser or the linter refuses it, a value is NaN, a series stands twice,
            or there are samples that nobody asked for.
    """
    text = body.decode("utf-8")
    series = series_of(text, content_type)
    assert not [key for key, value in series.items() if value != value], "NaN"  # noqa: PLR0124
    assert not [name for name, _ in series if name.endswith("_created")]
    if content_type == TEXT.content_type:
        assert lint(text) in ([], [WAIVER])
    return text


def families_of(text: str, content_type: str) -> list[Metric]:
    """What prometheus-client's parser of that format makes of the page."""
    if content_type == OPENMETRICS.content_type:
        assert text.endswith("# EOF\n")
        return list(parse_openmetrics(text))  # type: ignore[no-untyped-call]
    assert content_type == TEXT.content_type
    return list(parse_text(text))


def series_of(text: str, content_type: str = TEXT.content_type) -> Series:
    """Every series with its value; each may stand once."""
    series: Series = {}
    for family in families_of(text, content_type):
        for sample in family.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            assert key not in series, f"twice on one page: {key}"
            series[key] = sample.value
    return series


def lint(text: str) -> list[str]:
    """What promtool says against a page in the text format; nothing where it is not installed."""
    promtool = shutil.which("promtool")
    if promtool is None:
        return []
    done = subprocess.run(
        [promtool, "check", "metrics"], input=text, capture_output=True, text=True, check=False
    )
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    assert lines or done.returncode == 0
    return [re.sub(r"\s+", " ", line) for line in lines]
