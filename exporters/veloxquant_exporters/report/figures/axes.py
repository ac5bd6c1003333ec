"""Axes: the one axis of time that the figures share, and what they look like."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from bokeh.models import BoxZoomTool, CustomJSTickFormatter, NumeralTickFormatter, Range1d
from bokeh.palettes import Category20
from bokeh.plotting import figure

from veloxquant_exporters.findings import printable

if TYPE_CHECKING:
    from veloxquant_mlx.telemetry.trace import Trace

__all__ = ["LEFT", "PALETTE", "legend_above", "limited", "over_time", "owner_text", "time_range"]

LEFT: Final = 76  # for the axis' numbers, alike in all figures so that their times line up
PALETTE: Final = Category20[20]
# As one reads a clock, whatever the zoom. `tick` is in seconds.
CLOCK: Final = """
    const span = ticks.length > 1 ? Math.abs(ticks[1] - ticks[0]) : 1
    const places = span >= 1 ? 0 : Math.min(9, Math.ceil(-Math.log10(span)))
    const sign = tick < 0 ? "-" : ""
    const seconds = Math.abs(tick)
    if (seconds < 120 && ticks[ticks.length - 1] < 600) return sign + seconds.toFixed(places) + " s"
    const h = Math.floor(seconds / 3600), m = Math.floor(seconds / 60) % 60
    const rest = (seconds % 60).toFixed(places).padStart(places ? places + 3 : 2, "0")
    return sign + (h ? h + ":" + String(m).padStart(2, "0") : m) + ":" + rest
"""


def time_range(trace: Trace) -> Range1d:
    """The axis of time that the figures share, in seconds, which cannot leave the trace."""
    end = max(trace.duration_ns / 1e9, 1e-6)
    margin = end * 0.01
    bounds = (-margin, end + margin)
    return limited(*bounds, min_interval=1e-6)


def limited(start: float, end: float, min_interval: float) -> Range1d:
    """A range that cannot be left."""
    return Range1d(start=start, end=end, bounds=(start, end), min_interval=min_interval)


def owner_text(trace: Trace, number: int) -> str:
    """An owner's id where it was recorded, else its number in the trace."""
    return printable(str(trace.owners[number])) if number < len(trace.owners) else f"#{number}"


def over_time(title: str, height: int, at: Range1d, label: str, **more: Any) -> Any:
    """An empty figure over the axis of time; as wide as the page, `height` pixels within its axes."""
    plot = figure(
        title=title,
        sizing_mode="stretch_width",
        frame_height=height,
        min_border_left=LEFT,
        x_range=at,
        tools="xpan,xwheel_zoom,reset,save",
        active_scroll=None,
        output_backend="canvas",
        **more,
    )
    zoom = BoxZoomTool(dimensions="width")
    plot.add_tools(zoom)
    plot.toolbar.active_drag = zoom
    plot.toolbar.logo = None
    plot.xaxis.formatter = CustomJSTickFormatter(code=CLOCK)
    plot.xaxis.axis_label = "since the beginning of the trace"
    plot.yaxis.axis_label = label
    if label:
        # Short, so that no figure needs more room on the left than another.
        plot.yaxis.formatter = NumeralTickFormatter(format="0.[000]a")
    plot.grid.grid_line_alpha = 0.4
    return plot


def legend_above(plot: Any) -> None:
    """Move the legend out of the picture; a click on an entry hides it."""
    for legend in list(plot.legend):
        plot.add_layout(legend, "above")
    plot.legend.orientation = "horizontal"
    plot.legend.click_policy = "hide"
    plot.legend.label_text_font_size = "9pt"
    plot.legend.border_line_color = None
    plot.legend.padding = 2
