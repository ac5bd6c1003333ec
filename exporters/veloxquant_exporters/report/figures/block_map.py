"""Block map: which block was held when, and by whom; each holding, or an image of many."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from bokeh.models import ColumnDataSource, HoverTool, Range1d

from veloxquant_exporters.report.figures.axes import PALETTE, limited, over_time, owner_text
from veloxquant_exporters.report.raster import NOBODY, rasterise

if TYPE_CHECKING:
    from veloxquant_exporters.report.holdings import Holdings
    from veloxquant_mlx.telemetry.trace import Trace

__all__ = ["MAX_DRAWN", "map_figure"]

# Holdings that are drawn one by one, so that each can be pointed at; more become an image.
MAX_DRAWN: Final = 12_000


def map_figure(trace: Trace, holdings: Holdings, at: Range1d) -> Any:
    """Blocks over time, coloured by owner; a block taken for fewer tokens than it has is hatched."""
    drawn = len(holdings.block) <= MAX_DRAWN
    title = "Block map: colour is the owner" + (
        ", hatched is partly filled" if drawn else ", strength is the share of a cell that is held"
    )
    top = max(1, holdings.n_rows)
    label = "blocks ever held, k below v" if len(trace.header.streams) > 1 else "blocks ever held"
    plot = over_time(title, 360, at, label, y_range=limited(0, top, min_interval=2))
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
