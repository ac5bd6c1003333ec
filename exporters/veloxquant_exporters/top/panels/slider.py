"""The time slider of a trace: its whole course, the place in it, and what to mark."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from rich.text import Text

from veloxquant_exporters.top.panels.paint import sparkline
from veloxquant_exporters.top.units import duration

__all__ = ["SliderView", "column_of", "slider"]


@dataclass(frozen=True, slots=True)
class SliderView:
    """A place in a trace.

    Attributes:
        at_s, begin_s, end_s: Seconds since the trace began: the place, and the ends.
        playing: Whether it moves by itself.
        speed: Seconds of the trace a second.
        event: The newest event up to the place, in words; "" without one.
    """

    at_s: float
    begin_s: float
    end_s: float
    playing: bool
    speed: float
    event: str


def slider(place: SliderView, curve: Sequence[float], failed: Collection[int]) -> list[Text]:
    """Two lines: the curve with the place marked, and the place in words.

    Args:
        place: The place.
        curve: Share of the blocks in use, a value for each column.
        failed: The columns in which allocations failed; they are red.
    """
    width = len(curve)
    line = Text(sparkline(curve, width), style="green", no_wrap=True)
    for column in failed:
        line.stylize("red", column, column + 1)
    here = column_of(place.at_s, place.begin_s, place.end_s, width)
    line.stylize("reverse bold", here, here + 1)
    text = Text(" ")
    text.append("playing" if place.playing else "held", style="bold")
    text.append(f" at {_exact(place.at_s)} of {_exact(place.end_s)}")
    if place.speed != 1:
        text.append(f", {place.speed:g} times as fast")
    text.append(f"  {place.event}", style="dim")
    return [line, text]


def column_of(at: float, begin: float, end: float, width: int) -> int:
    """The column of a time, of `width` between the ends."""
    share = (at - begin) / (end - begin) if end > begin else 1.0
    return min(max(int(share * width), 0), width - 1)


def _exact(seconds: float) -> str:
    return f"{seconds:.3f}s" if seconds < 60 else duration(seconds)
