"""FaultLog: counts faults by reason and logs each one once."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Mapping
from typing import Final

__all__ = ["FaultLog"]

_log = logging.getLogger("veloxquant_exporters.sidecar")
MAX_LOGGED: Final = 1000


class FaultLog:
    """Thread-safe.

    Args:
        reasons: All that may come; each is there from the start, with 0.
    """

    def __init__(self, reasons: Iterable[str]) -> None:
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(reasons, 0)
        self._logged: set[str] = set()

    def count(self, reason: str, what: str, text: object) -> None:
        """Count a fault of `what`; log it unless the same was logged before."""
        key = f"{reason} {what}"
        with self._lock:
            self._counts[reason] += 1
            known = key in self._logged
            if not known and len(self._logged) < MAX_LOGGED:
                self._logged.add(key)
        if not known:
            _log.warning("%s: %s (%s)", what, text, reason)

    def mended(self, reason: str, what: str) -> None:
        """Let the next fault of `what` be logged again."""
        with self._lock:
            self._logged.discard(f"{reason} {what}")

    def counts(self) -> Mapping[str, int]:
        """Faults so far, by reason."""
        with self._lock:
            return dict(self._counts)
