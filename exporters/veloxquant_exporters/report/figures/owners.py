"""Owners, drawn: a bar for each life."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bokeh.models import ColumnDataSource, HoverTool, Range1d

from veloxquant_exporters.report.figures.axes import PALETTE, limited, over_time, owner_text
from veloxquant_exporters.report.owners import MAX_OWNERS

if TYPE_CHECKING:
    from veloxquant_exporters.report.owners import Owners
    from veloxquant_mlx.telemetry.trace import Trace

__all__ = ["owner_figure"]


def owner_figure(trace: Trace, owners: Owners, at: Range1d) -> Any:
    """A bar for each owner's life, in the order of their beginning."""
    import numpy as np

    order = np.argsort(owners.since_ns, kind="stable")
    n = len(order)
    more = f" (the {n} that held most)" if n >= MAX_OWNERS else ""
    plot = over_time(
        f"Owner lifetimes{more}", 260, at, "owners, the first at the bottom",
        y_range=limited(0, max(1, n), min_interval=2),
    )  # fmt: skip
    numbers = owners.number[order].tolist()
    filled = owners.filled[order]
    source = ColumnDataSource(
        {
            "bottom": np.arange(n) + 0.1,
            "top": np.arange(n) + 0.9,
            "left": owners.since_ns[order] / 1e9,
            "right": owners.until_ns[order] / 1e9,
            "life": (owners.until_ns - owners.since_ns)[order] / 1e9,
            "owner": [owner_text(trace, number) for number in numbers],
            "colour": [PALETTE[number % len(PALETTE)] for number in numbers],
            "most": owners.most[order],
            "filled": ["not known" if np.isnan(f) else f"{f:.0%}" for f in filled.tolist()],
            "end": ["still held" if held else "given back" for held in owners.held[order].tolist()],
        }
    )
    bars = plot.quad(
        left="left", right="right", bottom="bottom", top="top", source=source,
        fill_color="colour", line_color="colour",
    )  # fmt: skip
    tips = [
        ("owner", "@owner"),
        ("held", "@left{0.000} to @right{0.000} s, @life{0.000} s"),
        ("blocks, at most", "@most{0,0}"),
        ("of its slots filled", "@filled"),
        ("at the end", "@end"),
    ]
    plot.add_tools(HoverTool(renderers=[bars], tooltips=tips, point_policy="follow_mouse"))
    plot.yaxis.visible = False
    plot.grid.grid_line_color = None
    return plot
