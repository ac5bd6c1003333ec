"""PageSource: the metrics page of a serving process or of a sidecar."""

from __future__ import annotations

import time

from veloxquant_exporters.top.fetch import Access, fetch, parse_url
from veloxquant_exporters.top.history import Moment
from veloxquant_exporters.top.page import read_page

__all__ = ["PageSource"]


class PageSource:
    """Reads a metrics page; a `Source`.

    Args:
        url: http or https; without a path, /metrics is meant.
        access: How to get in.

    Raises:
        SourceError: It is no such URL.
    """

    def __init__(self, url: str, access: Access | None = None) -> None:
        self._address = parse_url(url)
        self._access = Access() if access is None else access

    @property
    def title(self) -> str:
        """The URL without name and password."""
        return self._address.shown

    def read(self) -> Moment:
        """See `Source.read`."""
        content_type, text = fetch(self._address, self._access)
        wall_s = time.time()
        return Moment(time.monotonic(), wall_s, read_page(text, content_type, wall_s))
