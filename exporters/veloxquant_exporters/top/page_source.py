"""PageSource: the metrics page of a serving process or of a sidecar."""

from __future__ import annotations

import http
import time
from typing import Final
from urllib.parse import urlsplit, urlunsplit

from veloxquant_exporters.access import Access
from veloxquant_exporters.fetch import Answer, FetchError, fetch
from veloxquant_exporters.top.history import Moment
from veloxquant_exporters.top.page import read_page
from veloxquant_exporters.top.source import SourceError

__all__ = ["PageSource"]

TIMEOUT_S: Final = 5.0
_ACCEPT: Final = "text/plain;version=0.0.4, application/openmetrics-text;version=1.0.0;q=0.5"
_ADVICE: Final = {
    401: "give a password in the URL, or a token with --token-file",
    403: "this client may not; a certificate is given with --tls-cert",
    404: "the page is usually /metrics",
}


class PageSource:
    """Reads a metrics page; a `Source`.

    Args:
        url: http or https; without a path, /metrics is meant.
        access: How to get in.
        timeout_s: For a whole answer.
    """

    def __init__(
        self, url: str, access: Access | None = None, timeout_s: float = TIMEOUT_S
    ) -> None:
        self._url, self._title = _completed(url)
        self._access = Access() if access is None else access
        self._timeout_s = timeout_s

    @property
    def title(self) -> str:
        """The URL without name and password."""
        return self._title

    def read(self) -> Moment:
        """See `Source.read`."""
        answer = self._fetched()
        if answer.status != http.HTTPStatus.OK:
            advice = _ADVICE.get(answer.status, "is it the right address?")
            raise SourceError(f"{self._title} answers {answer.status}: {advice}")
        wall_s = time.time()
        content_type = answer.content_type.partition(";")[0].strip().lower()
        try:
            reading = read_page(answer.body.decode("utf-8"), content_type, wall_s)
        except UnicodeDecodeError as error:
            raise SourceError(f"{self._title} is no metrics page: not text in UTF-8") from error
        except SourceError as error:
            raise SourceError(f"{self._title} {error}") from error
        return Moment(time.monotonic(), wall_s, reading)

    def _fetched(self) -> Answer:
        try:
            return fetch(
                self._url,
                accept=_ACCEPT,
                timeout_s=self._timeout_s,
                authorization=self._access.authorization(),
                context=self._access.context(),
            )
        except FetchError as error:
            raise SourceError(str(error)) from error


def _completed(url: str) -> tuple[str, str]:
    """The URL with /metrics for an empty path, and the same without name and password."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return url, url  # fetching it says what is wrong
    if parts.path in ("", "/"):
        parts = parts._replace(path="/metrics")
    shown = parts._replace(netloc=parts.netloc.rpartition("@")[2])
    return urlunsplit(parts), urlunsplit(shown)
