"""Numbers as short text: counts, bytes, seconds, shares."""

from __future__ import annotations

from typing import Final

__all__ = ["amount", "count", "duration", "gigabytes", "percent", "rate"]

NONE: Final = "-"
_THOUSANDS: Final = ((1e9, "G"), (1e6, "M"), (1e3, "k"))
_SECONDS: Final = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))


def amount(value: float | None) -> str:
    """At most five characters, as in 950, 1.2k, 35k, 4.1M."""
    if value is None:
        return NONE
    for unit, letter in _THOUSANDS:
        if value >= unit * 0.9995:
            return f"{_digits(value / unit)}{letter}"
    return _digits(value)


def count(value: int | None) -> str:
    """All digits, as in 12,345."""
    return NONE if value is None else f"{value:,}"


def rate(value: float | None) -> str:
    """Of events a second, as in 0, 0.03, 7.5, 1.2k."""
    if value is not None and 0 < value < 1:
        return f"{value:.2f}" if value >= 0.01 else "<0.01"
    return amount(value)


def duration(seconds: float | None) -> str:
    """As in 2.5us, 340ms, 12s, 3m 20s, 2h 5m, 4d 3h."""
    if seconds is None:
        return NONE
    if seconds >= 59.95:
        return _long(round(seconds))
    for unit, name in _SECONDS:
        if seconds >= unit * 0.9995:
            return f"{_digits(seconds / unit)}{name}"
    return "0s"


def gigabytes(n_bytes: int | None) -> str:
    """In units of a thousand, as in 512 B, 34.1 MB, 1.25 GB."""
    if n_bytes is None:
        return NONE
    for unit, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if n_bytes >= unit * 0.9995:
            return (
                f"{n_bytes / unit:.3g} {letter}B"
                if n_bytes < unit * 999.5
                else f"{n_bytes / unit:.0f} {letter}B"
            )
    return f"{n_bytes} B"


def percent(share: float | None) -> str:
    """As in 0%, 0.4%, 37%, 100%; 100% only when it is all."""
    if share is None:
        return NONE
    if 0 < share < 0.0095:
        return f"{max(share, 0.001):.1%}"
    return "99.9%" if 0.995 <= share < 1 else f"{share:.0%}"


def _digits(value: float) -> str:
    """Two digits, or all before the point."""
    return f"{value:.0f}" if value >= 9.95 or value == int(value) else f"{value:.1f}"


def _long(seconds: int) -> str:
    minutes, s = divmod(seconds, 60)
    hours, m = divmod(minutes, 60)
    days, h = divmod(hours, 24)
    if days:
        return f"{days}d {h}h" if h else f"{days}d"
    if hours:
        return f"{hours}h {m}m" if m else f"{hours}h"
    return f"{m}m {s}s" if s else f"{m}m"
