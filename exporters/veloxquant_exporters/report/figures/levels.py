"""Levels, drawn: blocks in use by stream, and slots held beside slots filled."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from bokeh.models import ColumnDataSource, HoverTool, Range1d

from veloxquant_exporters.report.figures.axes import legend_above, over_time
from veloxquant_exporters.report.levels import find_fill, find_hindsight, find_levels

if TYPE_CHECKING:
    from veloxquant_exporters.report.holdings import Holdings
    from veloxquant_mlx.telemetry.trace import Trace

__all__ = ["level_figure", "waste_figure"]

STREAM_COLOURS: Final = {"k": "#1f77b4", "v": "#ff7f0e", "kv": "#1f77b4"}


def level_figure(trace: Trace, at: Range1d) -> Any:
    """Blocks in use and managed by stream, and how many of them tokens fill, where that is known."""
    plot = over_time("Blocks in use", 230, at, "blocks of a stream")
    levels = find_levels(trace)
    seconds = levels.at_ns / 1e9
    # Keys and values mostly move alike: the second is drawn thin, over the first.
    for name, width in zip(trace.header.streams, (3.5, 1.2), strict=False):
        colour = STREAM_COLOURS[name]
        source = ColumnDataSource(
            {
                "at": seconds,
                "most": levels.most[name],
                "managed": levels.managed[name],
                "stream": [name] * len(seconds),
            }
        )
        line = plot.step(
            "at", "most", source=source, mode="before", color=colour, line_width=width,
            legend_label=f"{name} in use",
        )  # fmt: skip
        plot.step(
            "at", "managed", source=source, mode="before", color=colour, line_dash="dashed",
            line_width=width / 2, legend_label=f"{name} managed",
        )  # fmt: skip
        tips = [
            ("stream", "@stream"),
            ("at", "@at{0.000} s"),
            ("in use, at most", "@most{0,0}"),
            ("managed", "@managed{0,0}"),
        ]
        plot.add_tools(HoverTool(renderers=[line], mode="vline", line_policy="prev", tooltips=tips))
    plot.y_range.start = 0
    legend_above(plot)
    return plot


def waste_figure(trace: Trace, holdings: Holdings | None, at: Range1d) -> Any | None:
    """Slots held beside those that tokens filled; None where the trace tells neither."""
    plot = over_time("Token slots of all streams: held, and filled", 190, at, "token slots")
    known = holdings is not None and _add_hindsight(plot, trace, holdings)
    known |= _add_fill(plot, trace)
    plot.y_range.start = 0
    if not known:
        return None
    legend_above(plot)
    return plot


def _add_hindsight(plot: Any, trace: Trace, holdings: Holdings) -> bool:
    """What each owner is known to have filled when it gave its blocks back, over its life."""
    at_ns, held, filled = find_hindsight(trace, holdings)
    if not len(at_ns):
        return False
    source = ColumnDataSource({"at": at_ns / 1e9, "held": held, "filled": filled})
    plot.varea_step(
        "at", "filled", "held", source=source, step_mode="before", color="#d62728", alpha=0.18,
        legend_label="never filled",
    )  # fmt: skip
    line = plot.step(
        "at", "held", source=source, mode="before", color="#444444", legend_label="held"
    )
    plot.varea_step(
        "at", 0, "filled", source=source, step_mode="before", color="#2ca02c", alpha=0.3,
        legend_label="filled by the end of its owner",
    )  # fmt: skip
    tips = [("at", "@at{0.000} s"), ("held", "@held{0,0}"), ("filled in the end", "@filled{0,0}")]
    plot.add_tools(HoverTool(renderers=[line], mode="vline", line_policy="prev", tooltips=tips))
    return True


def _add_fill(plot: Any, trace: Trace) -> bool:
    """What the snapshots in the trace say was filled at their time."""
    at_ns, held, filled = find_fill(trace)
    if not len(at_ns):
        return False
    source = ColumnDataSource({"at": at_ns / 1e9, "held": held, "filled": filled})
    label = "filled by then (snapshots)"
    plot.line("at", "filled", source=source, color="#111111", legend_label=label)
    dots = plot.scatter("at", "filled", source=source, color="#111111", size=4, legend_label=label)
    tips = [("at", "@at{0.000} s"), ("slots held", "@held{0,0}"), ("slots filled", "@filled{0,0}")]
    plot.add_tools(HoverTool(renderers=[dots], tooltips=tips))
    return True
