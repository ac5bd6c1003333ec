"""A metrics page, whole: is it one, is it well-formed, and does it say what the catalogue says?"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

from veloxquant_exporters.check.catalogue_rules import check_catalogue, is_ours
from veloxquant_exporters.check.histogram_rules import check_histograms
from veloxquant_exporters.check.page_text import Page, parse_page
from veloxquant_exporters.check.value_rules import check_values
from veloxquant_exporters.findings import Finding, printable

__all__ = ["ACCEPTS", "CheckedPage", "check_page"]

# What a scraper asks for to get the one format or the other.
ACCEPTS: Final = ("text/plain;version=0.0.4", "application/openmetrics-text;version=1.0.0")
_OPENMETRICS: Final = "application/openmetrics-text"
# A counter's family without the _total of its samples: what is left of a page without its EOF.
_CUT_OPENMETRICS: Final = re.compile(r"(?m)^# TYPE (\S+) counter\n(?:# [^\n]*\n)*\1_total[ {]")


@dataclass(frozen=True, slots=True)
class CheckedPage:
    """A page and what was found.

    Attributes:
        page: None if it is no metrics page at all.
        findings: Without any that say that all is well.
    """

    page: Page | None
    findings: list[Finding] = field(default_factory=list)

    @property
    def summary(self) -> str:
        """How much there is, in a few words."""
        if self.page is None:
            return "no metrics page"
        ours = sum(is_ours(sample.name) for sample in self.page.samples)
        others = len(self.page.samples) - ours
        form = "OpenMetrics" if self.page.openmetrics else "text format"
        more = f" and {others:,} of others" if others else ""
        return f"{form}, {ours:,} samples of block pools{more}"


def check_page(body: bytes, content_type: str = "") -> CheckedPage:
    """Check a page as it was sent or saved.

    Args:
        body: Its bytes.
        content_type: As sent; "" tells the format by what stands there.
    """
    fault = _no_page(body, content_type)
    if fault is not None:
        return CheckedPage(None, [fault])
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        fault = Finding("problem", f"the page is not UTF-8: {error}", "no scraper reads it")
        return CheckedPage(None, [fault])
    openmetrics = _is_openmetrics(text, content_type)
    page = parse_page(text, openmetrics=openmetrics)
    findings = list(page.findings) or _second_opinion(text, openmetrics=openmetrics)
    for check in (check_catalogue, check_values, check_histograms):
        findings += check(page)
    return CheckedPage(page, findings)


def _is_openmetrics(text: str, content_type: str) -> bool:
    if content_type:
        return content_type.lower().startswith(_OPENMETRICS)
    return text.rstrip("\n").endswith("# EOF") or _CUT_OPENMETRICS.search(text) is not None


def _no_page(body: bytes, content_type: str) -> Finding | None:
    """Why this is something else than a metrics page; None if it looks like one."""
    start = body[:4096].lstrip().lower()
    if not start:
        return Finding(
            "problem",
            "the page is empty",
            "nothing is exported, or the file was cut off",
            "fetch it anew: curl -s http://127.0.0.1:9464/metrics",
        )
    if start.startswith(b"<") or content_type.lower().startswith("text/html"):
        return Finding(
            "problem",
            "this is HTML, a page for people, and no metrics page",
            "a scraper that gets it reports a parse error",
            "give the address of the metrics, which ends in /metrics; behind a proxy, log in first",
        )
    if start.startswith((b"{", b"[")):
        return Finding(
            "problem",
            "this is JSON, and no metrics page",
            "",
            "give the address of the metrics, which ends in /metrics",
        )
    if start.startswith(b"\x1f\x8b"):
        return Finding(
            "problem", "the page is compressed", "", "unpack it first: gunzip, or curl --compressed"
        )
    if b"\0" in body:
        return Finding("problem", "this is no text, and no metrics page", "it holds zero bytes")
    return None


def _second_opinion(text: str, *, openmetrics: bool) -> list[Finding]:
    """What prometheus-client's own parser says, where it is installed."""
    parse: Callable[[str], Iterable[object]]
    try:
        if openmetrics:
            from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse
        else:
            from prometheus_client.parser import text_string_to_metric_families as parse
    except ImportError:
        return [
            Finding(
                "note",
                "prometheus-client is not installed, so its parser was not asked",
                "",
                "pip install 'veloxquant-mlx-monitor[prometheus]'",
            )
        ]
    try:
        for _ in parse(text):
            pass
    except Exception as error:  # noqa: BLE001 - a parser may raise anything over a stranger's page
        said = printable(str(error) or type(error).__name__, 200)
        return [Finding("problem", f"prometheus-client cannot parse the page: {said}")]
    return []
