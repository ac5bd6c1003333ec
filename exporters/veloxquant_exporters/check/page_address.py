"""A metrics page by its address: fetched in both formats, and once more to see counters move."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from itertools import pairwise

from veloxquant_exporters.access import Access
from veloxquant_exporters.check.movement import check_movement
from veloxquant_exporters.check.page import ACCEPTS, CheckedPage, check_page
from veloxquant_exporters.fetch import Answer, FetchError, fetch
from veloxquant_exporters.findings import Finding, printable

__all__ = ["check_address"]

_STATUS_FIXES = {
    401: "send a user and password, http://USER:PASSWORD@HOST/metrics, or a token, --token-file",
    403: "this client may not; a certificate is given with --tls-cert",
    404: "metrics are at /metrics",
    405: "this is no address of a metrics page; metrics are at /metrics",
    500: "its log says what failed",
    503: "the server is not ready; its log says why",
}


def check_address(url: str, *, watch_s: float = 0.0, access: Access | None = None) -> CheckedPage:
    """Check what is served at `url`.

    Args:
        url: Of the metrics page.
        watch_s: Seconds to wait before the last fetch, which shows whether a counter falls.
        access: How to get in.
    """
    text, openmetrics = ACCEPTS
    access = access or Access()
    first = _fetched(url, text, access)
    findings = [*first.findings]
    if first.page is None:
        return first
    pages = [first.page]
    other = _fetched(url, openmetrics, access)
    findings += _new(other.findings, findings)
    pages += [other.page] if other.page else []
    if watch_s:
        threading.Event().wait(watch_s)
        last = _fetched(url, text, access)
        findings += _new(last.findings, findings)
        pages += [last.page] if last.page else []
    for before, after in pairwise(pages):
        findings += _new(check_movement(before, after), findings)
    return CheckedPage(first.page, findings)


def _fetched(url: str, accept: str, access: Access) -> CheckedPage:
    try:
        answer = fetch(
            url,
            accept=accept,
            authorization=access.authorization(),
            context=access.context(),
        )
    except FetchError as error:
        return CheckedPage(None, [Finding("problem", printable(error.what), "", error.fix)])
    if answer.status != 200:
        return CheckedPage(None, [_refused(answer)])
    return check_page(answer.body, answer.content_type)


def _refused(answer: Answer) -> Finding:
    what = f"{answer.url} answers with status {answer.status}"
    said = answer.body[:200].decode("utf-8", "replace").strip()
    if said and not said.startswith("<"):
        what += f": {said.splitlines()[0]}"
    return Finding("problem", printable(what), "", _STATUS_FIXES.get(answer.status, ""))


def _new(findings: Iterable[Finding], known: list[Finding]) -> Iterator[Finding]:
    """Those that were not made of an earlier page, which is much the same."""
    told = {_key(finding) for finding in known}
    return (finding for finding in findings if _key(finding) not in told)


def _key(finding: Finding) -> tuple[str, str]:
    """What a finding says, without the line it says it of."""
    start, colon, rest = finding.what.partition(": ")
    return finding.level, rest if colon and start.startswith("line ") else finding.what
