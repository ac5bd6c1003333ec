"""Columns: whole numbers as the smallest array that holds them, and back. The standard library only."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence

__all__ = ["CODES", "pack_column", "pack_columns"]

# Signed little-endian numbers of 1, 2, 4 and 8 bytes, as `array` and NumPy call them.
CODES = {"b": 1, "h": 2, "i": 4, "q": 8}
_LIMITS = tuple((code, 1 << (8 * width - 1)) for code, width in CODES.items())


def pack_column(values: Sequence[int]) -> list[object]:
    """[type code, little-endian bytes]; numbers beyond 64 bits raise OverflowError."""
    low, high = (min(values), max(values)) if values else (0, 0)
    code = next((code for code, limit in _LIMITS if -limit <= low and high < limit), "q")
    packed = array(code, values)
    if sys.byteorder == "big":
        packed.byteswap()
    return [code, packed.tobytes()]


def pack_columns(names: Iterable[str], columns: Mapping[str, Sequence[int]]) -> dict[str, object]:
    """Each of `names` with its column packed."""
    return {name: pack_column(columns[name]) for name in names}
