"""What a client accepts: the headers Accept and Accept-Encoding, with their q values (RFC 9110)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

__all__ = ["Range", "accepts_gzip", "parse_accept"]


@dataclass(frozen=True, slots=True)
class Range:
    """One item of an Accept header.

    Attributes:
        value: In lower case: a media type such as "text/plain" or "text/*", or a coding.
        q: 0 to 1; 0 refuses.
        parameters: The others, with names in lower case.
    """

    value: str
    q: float = 1.0
    parameters: Mapping[str, str] = field(default_factory=dict)


def parse_accept(header: str) -> list[Range]:
    """The items of an Accept or Accept-Encoding header, in its order.

    A q that is no number counts as 0, one out of bounds as the nearest bound: a client that cannot
    write its wish gets what is plain.
    """
    return [_parse_item(item) for item in header.split(",") if item.strip()]


def _parse_item(item: str) -> Range:
    value, *rest = (part.strip() for part in item.split(";"))
    parameters = {}
    q = 1.0
    for part in rest:
        name, _, text = part.partition("=")
        name, text = name.strip().lower(), text.strip().strip('"')
        if name == "q":
            q = _quality(text)
        elif name:
            parameters[name] = text
    return Range(value.lower(), q, parameters)


def _quality(text: str) -> float:
    try:
        q = float(text)
    except ValueError:
        return 0.0
    return min(1.0, q) if q > 0 else 0.0  # NaN is not above 0


def accepts_gzip(header: str) -> bool:
    """Whether the client would rather have gzip than the plain bytes."""
    ranges = parse_accept(header)
    gzip = _coding_q(ranges, ("gzip", "x-gzip"))
    if gzip is None:
        gzip = _coding_q(ranges, ("*",))
    return bool(gzip) and gzip >= (_coding_q(ranges, ("identity",)) or 0.0)  # type: ignore[operator]


def _coding_q(ranges: Iterable[Range], names: tuple[str, ...]) -> float | None:
    return max((item.q for item in ranges if item.value in names), default=None)
