"""Latency, drawn: what timed calls took, by operation and blocks moved."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from bokeh.models import ColumnDataSource, FactorRange, HoverTool
from bokeh.plotting import figure

from veloxquant_exporters.report.figures.axes import LEFT, legend_above

if TYPE_CHECKING:
    from veloxquant_exporters.report.latency import Timed

__all__ = ["latency_figure"]


def latency_figure(timed: Sequence[Timed]) -> Any:
    """p50, p99 and the most of timed calls, by operation and blocks moved."""
    labels = [(timing.operation, _blocks_text(timing)) for timing in timed]
    plot = figure(
        title="Time in the pool of timed calls",
        sizing_mode="stretch_width",
        frame_height=190,
        min_border_left=LEFT,
        x_range=FactorRange(factors=labels),
        y_axis_type="log",
        tools="pan,ywheel_zoom,reset,save",
        active_scroll=None,
    )
    plot.toolbar.logo = None
    source = ColumnDataSource(
        {
            "call": labels,
            "p50": [timing.p50_s * 1e6 for timing in timed],
            "p99": [timing.p99_s * 1e6 for timing in timed],
            "most": [timing.most_s * 1e6 for timing in timed],
            "n": [timing.n for timing in timed],
        }
    )
    plot.segment("call", "p50", "call", "most", source=source, color="#bbbbbb", line_width=2)
    marks: list[Any] = [
        plot.scatter("call", name, source=source, size=9, color=colour, legend_label=label)
        for name, colour, label in (
            ("p50", "#1f77b4", "p50"),
            ("p99", "#ff7f0e", "p99"),
            ("most", "#d62728", "longest"),
        )
    ]
    tips = [
        ("call", "@call"),
        ("timed", "@n{0,0}"),
        ("p50", "@p50{0.0} us"),
        ("p99", "@p99{0.0} us"),
        ("longest", "@most{0.0} us"),
    ]
    plot.add_tools(HoverTool(renderers=marks, tooltips=tips))
    plot.yaxis.axis_label = "microseconds"
    plot.xaxis.axis_label = "blocks that moved"
    plot.xaxis.major_label_orientation = 0.7
    legend_above(plot)
    return plot


def _blocks_text(timing: Timed) -> str:
    return str(timing.low) if timing.low == timing.high else f"{timing.low} to {timing.high}"
