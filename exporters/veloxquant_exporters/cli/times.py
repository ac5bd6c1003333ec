"""times: a duration on the command line, in seconds or with a unit."""

from __future__ import annotations

import re
from typing import Any, Final

import click

__all__ = ["Time"]

_UNITS: Final = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_MOST_S: Final = 30 * _UNITS["d"]


class Time(click.ParamType):  # type: ignore[type-arg]  # generic in newer ones
    """Seconds, from text as in 90, 1.5s, 15m, 1h or 2d.

    Args:
        least_s: The shortest allowed.
        most_s: The longest allowed.
    """

    name = "time"

    def __init__(self, least_s: float = 0.001, most_s: float = _MOST_S) -> None:
        self._least_s = least_s
        self._most_s = most_s

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """In seconds."""
        if isinstance(value, int | float):
            return float(value)
        found = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?|\.\d{1,9})\s*(ms|s|m|h|d|)", value, re.ASCII)
        seconds = float(found[1]) * _UNITS[found[2]] if found else -1.0
        if not self._least_s <= seconds <= self._most_s:
            self.fail(
                f"{value!r} is no time as in 90, 1.5s, 15m or 1h, from {_text(self._least_s)} "
                f"to {_text(self._most_s)}",
                param,
                ctx,
            )
        return seconds


def _text(seconds: float) -> str:
    """In the largest unit of which it is a whole number."""
    for unit in ("d", "h", "m", "s", "ms"):
        n = seconds / _UNITS[unit]
        if n >= 1 and n == int(n):
            return f"{n:g}{unit}"
    return f"{seconds:g}s"
