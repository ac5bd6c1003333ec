"""SliderPanel: the place in a trace, moved by keys and the mouse."""

from __future__ import annotations

from typing import TYPE_CHECKING

from veloxquant_exporters.top.panels.slider import SliderView, column_of, slider
from veloxquant_exporters.top.screens.panel import Panel
from veloxquant_exporters.top.units import duration

if TYPE_CHECKING:
    from rich.text import Text
    from textual import events

    from veloxquant_exporters.top.trace_place import TracePlace

__all__ = ["SliderPanel"]


class SliderPanel(Panel):
    """Shows where in its trace the board is.

    Args:
        place: The place.
    """

    def __init__(self, place: TracePlace) -> None:
        super().__init__(self._lines, id="slider")
        self._place = place
        self._failed: tuple[int, frozenset[int]] = (0, frozenset())

    def _lines(self, width: int, _height: int | None) -> list[Text]:
        at_ns = self._place.at_ns
        width = max(width, 1)
        shown = SliderView(
            at_s=at_ns / 1e9,
            begin_s=self._place.begin_ns / 1e9,
            end_s=self._place.end_ns / 1e9,
            playing=self._place.playing,
            speed=self._place.speed,
            event=self._event(at_ns),
        )
        return slider(shown, self._place.curve(width), self._failures(width))

    def _failures(self, width: int) -> frozenset[int]:
        """The columns in which allocations failed."""
        if self._failed[0] != width:
            place = self._place
            times = [event.at_ns for event in place.events if event.kind == "exhausted"]
            columns = (column_of(at, place.begin_ns, place.end_ns, width) for at in times)
            self._failed = width, frozenset(columns)
        return self._failed[1]

    def _event(self, at_ns: int) -> str:
        """The newest event up to the place."""
        events = self._place.events
        n = self._place.n_events_until(at_ns)
        if not n:
            return f"{len(events):,} events" if events else "no event"
        event = events[n - 1]
        ago = duration((at_ns - event.at_ns) / 1e9)
        about = f" of {event.blocks} blocks" if event.blocks else ""
        where = f" in {event.stream}" if event.stream else ""
        return f"event {n:,} of {len(events):,}: {event.kind}{about}{where}, {ago} ago"

    def on_click(self, event: events.Click) -> None:
        """Go to where was clicked."""
        place = self._place
        share = event.x / max(self.size.width - 1, 1)
        place.seek(place.begin_ns + share * (place.end_ns - place.begin_ns))
        self.app.action_moved()  # type: ignore[attr-defined]
