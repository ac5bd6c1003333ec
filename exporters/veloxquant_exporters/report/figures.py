"""Figures: what the page draws, on one axis of time that zooms for all of them together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from bokeh.models import (
    BoxZoomTool,
    ColumnDataSource,
    CustomJSTickFormatter,
    FactorRange,
    HoverTool,
    Range1d,
)
from bokeh.palettes import Category20
from bokeh.plotting import figure

from veloxquant_exporters.report.levels import find_fill, find_hindsight, find_levels
from veloxquant_exporters.report.raster import NOBODY, rasterise

if TYPE_CHECKING:
    from veloxquant_exporters.report.holdings import Holdings
    from veloxquant_exporters.report.latency import Timed
    from veloxquant_exporters.report.owners import Owners
    from veloxquant_mlx.telemetry.trace import Event, Trace

__all__ = [
    "MAX_DRAWN",
    "event_figure",
    "latency_figure",
    "level_figure",
    "map_figure",
    "owner_figure",
    "owner_text",
    "time_range",
    "waste_figure",
]

# Holdings that are drawn one by one, so that each can be pointed at; more become an image.
MAX_DRAWN: Final = 12_000
# Events that are drawn; of more of one kind, the first ones.
MAX_EVENTS: Final = 2_000
FRAME: Final = 1040
LEFT: Final = 76  # for the axis' numbers, alike in all figures so that their times line up
PALETTE: Final = Category20[20]
STREAM_COLOURS: Final = {"k": "#1f77b4", "v": "#ff7f0e", "kv": "#1f77b4"}
EVENT_COLOURS: Final = {
    "exhausted": "#d62728",
    "grown": "#2ca02c",
    "shrunk": "#17becf",
    "slow": "#9467bd",
    "lost": "#7f7f7f",
}
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
    return _range(*bounds, min_interval=1e-6)


def _range(start: float, end: float, min_interval: float) -> Range1d:
    return Range1d(start=start, end=end, bounds=(start, end), min_interval=min_interval)


def owner_text(trace: Trace, number: int) -> str:
    """An owner's id where it was recorded, else its number in the trace."""
    return str(trace.owners[number]) if number < len(trace.owners) else f"#{number}"


def _over_time(title: str, height: int, at: Range1d, label: str, **more: Any) -> Any:
    plot = figure(
        title=title,
        frame_width=FRAME,
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
    plot.grid.grid_line_alpha = 0.4
    return plot


def _legend_above(plot: Any) -> None:
    for legend in list(plot.legend):
        plot.add_layout(legend, "above")
    plot.legend.orientation = "horizontal"
    plot.legend.click_policy = "hide"
    plot.legend.label_text_font_size = "9pt"
    plot.legend.border_line_color = None
    plot.legend.padding = 2


# -- levels ----------------------------------------------------------------------------------------


def level_figure(trace: Trace, at: Range1d) -> Any:
    """Blocks in use and managed by stream, and how many of them tokens fill, where that is known."""
    plot = _over_time("Blocks in use", 230, at, "blocks of a stream")
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
    _legend_above(plot)
    return plot


def waste_figure(trace: Trace, holdings: Holdings, at: Range1d) -> Any | None:
    """Slots held beside those that tokens filled; None where the trace tells neither."""
    plot = _over_time("Token slots of all streams: held, and filled", 190, at, "token slots")
    known = _add_hindsight(plot, trace, holdings) | _add_fill(plot, trace)
    plot.y_range.start = 0
    if not known:
        return None
    _legend_above(plot)
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


# -- block map -------------------------------------------------------------------------------------


def map_figure(trace: Trace, holdings: Holdings, at: Range1d) -> Any:
    """Blocks over time, coloured by owner; a block taken for fewer tokens than it has is hatched."""
    drawn = len(holdings.block) <= MAX_DRAWN
    title = "Block map: colour is the owner" + (
        ", hatched is partly filled" if drawn else ", strength is the share of a cell that is held"
    )
    top = max(1, holdings.n_rows)
    label = "blocks ever held, k below v" if len(trace.header.streams) > 1 else "blocks ever held"
    plot = _over_time(title, 360, at, label, y_range=_range(0, top, min_interval=2))
    (_draw_holdings if drawn else _draw_raster)(plot, trace, holdings)
    plot.add_tools("ywheel_zoom", "ypan")
    plot.grid.grid_line_color = None
    return plot


def _draw_holdings(plot: Any, trace: Trace, holdings: Holdings) -> None:
    size = trace.header.config.block_size
    owners = holdings.owner.tolist()
    source = ColumnDataSource(
        {
            "left": holdings.since_ns / 1e9,
            "right": holdings.until_ns / 1e9,
            "bottom": holdings.row,
            "top": holdings.row + 1,
            "block": holdings.block,
            "owner": [owner_text(trace, owner) for owner in owners],
            "colour": [PALETTE[owner % len(PALETTE)] for owner in owners],
            "filled": holdings.filled,
            "hatch": ["/" if 0 < n < size else " " for n in holdings.filled.tolist()],
        }
    )
    boxes = plot.quad(
        left="left", right="right", bottom="bottom", top="top", source=source,
        fill_color="colour", line_color=None, hatch_pattern="hatch",
        hatch_color="black", hatch_alpha=0.6, hatch_scale=7, hatch_weight=0.7,
    )  # fmt: skip
    tips = [
        ("owner", "@owner"),
        ("block", "@block"),
        ("held", "@left{0.000} to @right{0.000} s"),
        ("slots asked for", f"@filled of {size}"),
    ]
    plot.add_tools(HoverTool(renderers=[boxes], tooltips=tips, point_policy="follow_mouse"))


def _draw_raster(plot: Any, trace: Trace, holdings: Holdings) -> None:
    import numpy as np

    raster = rasterise(holdings, trace.duration_ns)
    colours = np.array([_rgb(colour) for colour in PALETTE], dtype=np.uint32)
    rgb = colours[np.maximum(raster.owner, 0) % len(PALETTE)]
    alpha = np.where(raster.owner == NOBODY, 0, 40 + raster.occupancy * 215).astype(np.uint32)
    alpha[raster.occupancy <= 0] = 0
    end = trace.duration_ns / 1e9
    source = ColumnDataSource(
        {
            "image": [(rgb | alpha << 24).astype(np.uint32)],
            "owner": [raster.owner.astype(np.int32)],
            "held": [(raster.occupancy * 100).astype(np.uint8)],
        }
    )
    image = plot.image_rgba(image="image", x=0, y=0, dw=end, dh=holdings.n_rows, source=source)
    tips = [
        ("owner", "#@owner"),
        ("row", "$y{0,0}"),
        ("at", "$x{0.000} s"),
        ("of the cell held", "@held %"),
    ]
    plot.add_tools(HoverTool(renderers=[image], tooltips=tips, point_policy="follow_mouse"))


def _rgb(colour: str) -> int:
    """As the three low bytes of what `image_rgba` takes."""
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return red | green << 8 | blue << 16


# -- owners ----------------------------------------------------------------------------------------


def owner_figure(trace: Trace, owners: Owners, at: Range1d) -> Any:
    """A bar for each owner's life, in the order of their beginning."""
    import numpy as np

    order = np.argsort(owners.since_ns, kind="stable")
    n = len(order)
    more = f" (the {n} that held most)" if trace.n_owners > n else ""
    plot = _over_time(
        f"Owner lifetimes{more}", 260, at, "owners, the first at the bottom",
        y_range=_range(0, max(1, n), min_interval=2),
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


# -- latency, events -------------------------------------------------------------------------------


def latency_figure(timed: Sequence[Timed]) -> Any:
    """p50, p99 and the most of timed calls, by operation and blocks moved."""
    labels = [(timing.operation, _blocks_text(timing)) for timing in timed]
    plot = figure(
        title="Time in the pool of timed calls",
        frame_width=FRAME,
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
    _legend_above(plot)
    return plot


def _blocks_text(timing: Timed) -> str:
    return str(timing.low) if timing.low == timing.high else f"{timing.low} to {timing.high}"


def event_figure(trace: Trace, at: Range1d) -> Any | None:
    """A mark for each event, a row for each kind; None where nothing happened."""
    drawn, kinds = _drawn(trace.events)
    if not drawn:
        return None
    plot = _over_time("Events", 12 + 26 * len(kinds), at, "", y_range=FactorRange(factors=kinds))
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
