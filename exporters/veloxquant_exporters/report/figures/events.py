"""Events, drawn: a mark for each, a row for each kind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from bokeh.models import ColumnDataSource, FactorRange, HoverTool, Range1d

from veloxquant_exporters.report.figures.axes import over_time, owner_text

if TYPE_CHECKING:
    from veloxquant_mlx.telemetry.trace import Event, Trace

__all__ = ["event_figure"]

# Events that are drawn; of more of one kind, the first ones.
MAX_EVENTS: Final = 2_000
EVENT_COLOURS: Final = {
    "exhausted": "#d62728",
    "grown": "#2ca02c",
    "shrunk": "#17becf",
    "slow": "#9467bd",
    "lost": "#7f7f7f",
}


def event_figure(trace: Trace, at: Range1d) -> Any | None:
    """A mark for each event, a row for each kind; None where nothing happened."""
    drawn, kinds = _drawn(trace.events)
    if not drawn:
        return None
    plot = over_time("Events", 12 + 26 * len(kinds), at, "", y_range=FactorRange(factors=kinds))
    source = ColumnDataSource(
        {
            "at": [event.at_ns / 1e9 for event in drawn],
            "kind": [event.kind for event in drawn],
            "colour": [EVENT_COLOURS[event.kind] for event in drawn],
            "text": [_event_text(trace, event) for event in drawn],
        }
    )
    marks = plot.scatter("at", "kind", source=source, size=9, color="colour", alpha=0.7)
    tips = [("at", "@at{0.000} s"), ("", "@text")]
    plot.add_tools(HoverTool(renderers=[marks], tooltips=tips))
    return plot


def _drawn(events: Sequence[Event]) -> tuple[list[Event], list[str]]:
    n_of: Counter[str] = Counter()
    drawn = []
    for event in events:
        n_of[event.kind] += 1
        if n_of[event.kind] <= MAX_EVENTS:
            drawn.append(event)
    return drawn, sorted(n_of)


def _event_text(trace: Trace, event: Event) -> str:
    who = "" if event.owner < 0 else f", owner {owner_text(trace, event.owner)}"
    took = "" if event.took_ns is None else f", {event.took_ns / 1e6:.1f} ms"
    if event.kind == "lost":
        return f"{event.blocks} calls were lost in recording"
    what = {"exhausted": "asked for", "grown": "more", "shrunk": "retired", "slow": "moved"}
    where = f" {event.stream}" if event.stream else ""
    return f"{event.operation}: {event.blocks}{where} blocks {what[event.kind]}{took}{who}"
