"""Page: the figures and tables of a trace, put together as one file."""

from __future__ import annotations

import html
import math
import os
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from bokeh.embed import components
from bokeh.resources import Resources

from veloxquant_exporters.findings import printable
from veloxquant_exporters.report import figures
from veloxquant_exporters.report.holdings import find_holdings
from veloxquant_exporters.report.latency import find_latency
from veloxquant_exporters.report.owners import find_owners
from veloxquant_mlx.telemetry.trace.schema import ALLOCATE_OP, EXHAUSTED_OUTCOME

if TYPE_CHECKING:
    from veloxquant_exporters.report.holdings import Holdings
    from veloxquant_exporters.report.owners import Owners
    from veloxquant_mlx.telemetry.trace import Trace

__all__ = ["make_page", "write_report"]

TOP_HOLDERS: Final = 15
STYLE: Final = """
body { font: 15px/1.45 system-ui, sans-serif; color: #222; background: #fff; margin: 0 auto;
       max-width: 1800px; padding: 1.2rem; }
h1 { font-size: 1.4rem; margin: 0 0 .2rem; overflow-wrap: anywhere; }
h2 { font-size: 1.05rem; margin: 1.6rem 0 .4rem; }
p { margin: .3rem 0; }
.note { color: #555; }
.warn { color: #9a3412; }
dl { display: grid; grid-template-columns: repeat(auto-fill, minmax(165px, 1fr)); gap: .6rem 1rem;
     margin: 1rem 0; }
dt { color: #555; font-size: .82rem; }
dd { margin: 0; font-size: 1.12rem; font-variant-numeric: tabular-nums; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .18rem .8rem .18rem 0; border-bottom: 1px solid #e5e5e5; }
th:first-child, td:first-child { text-align: left; max-width: 22rem; overflow-wrap: anywhere; }
th { color: #555; font-weight: 500; font-size: .85rem; }
kbd { border: 1px solid #bbb; border-radius: 3px; padding: 0 .3rem; font-size: .85em; }
.plot { margin: .5rem 0; }
"""
HELP: Final = (
    '<p class="note">Drag to zoom; point at things; click a legend to hide. Keys: '
    "<kbd>&larr;</kbd> <kbd>&rarr;</kbd> move, <kbd>+</kbd> <kbd>-</kbd> zoom, <kbd>Home</kbd> "
    "<kbd>End</kbd>, <kbd>0</kbd> all. Time is one for all figures.</p>"
)
# The range is the one that all figures over time share: moving it moves them all.
KEYS: Final = """
document.addEventListener("keydown", event => {
  if (event.ctrlKey || event.metaKey || event.altKey) return
  const tag = event.target.tagName
  if (tag === "INPUT" || tag === "TEXTAREA") return
  const range = Bokeh.documents.map(d => d.get_model_by_name("time")).find(r => r)
  if (!range) return
  const [low, high] = range.bounds, span = range.end - range.start
  const to = (start, end) => {
    start = Math.max(low, start); end = Math.min(high, end)
    if (end - start > 1e-9) range.setv({ start, end })
  }
  const pan = by => {
    const by_ = Math.max(low - range.start, Math.min(high - range.end, by * span))
    to(range.start + by_, range.end + by_)
  }
  const zoom = by => {
    const middle = (range.start + range.end) / 2
    to(middle - span * by / 2, middle + span * by / 2)
  }
  const keys = {
    ArrowLeft: () => pan(-0.2), ArrowRight: () => pan(0.2),
    "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2),
    Home: () => pan(-1e9), End: () => pan(1e9), "0": () => to(low, high),
  }
  if (keys[event.key]) { keys[event.key](); event.preventDefault() }
})
"""


def write_report(
    trace: Trace, path: Path, *, progress: Callable[[int], object] = lambda _: None
) -> None:
    """Write the page; a file that was at `path` stays until the new one is whole.

    What is there and no file, such as `/dev/stdout`, is written to. A link is followed.

    Args:
        trace: The recording.
        path: Where to write.
        progress: Called now and then with the number of calls done, of `trace.n_calls`.

    Raises:
        TraceError: The trace needs more blocks than can be replayed.
        OSError: The file cannot be written.
    """
    path = path.resolve()
    if path.exists() and not path.is_file():
        path.write_text(make_page(trace, progress), "utf-8", "backslashreplace")
        return
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        # Made before the work, so that a folder that cannot be written to is told at once.
        with part.open("w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(make_page(trace, progress))
        part.replace(path)
    finally:
        with suppress(OSError):
            part.unlink()


def make_page(trace: Trace, progress: Callable[[int], object] = lambda _: None) -> str:
    """The page as text. See `write_report`."""
    # Who held which block is found by doing the calls again, which wrong books do not allow.
    holdings = find_holdings(trace, progress) if trace.consistent else None
    owners = None if holdings is None else find_owners(trace, holdings)
    script, divs = components(_figures(trace, holdings, owners))
    body = "\n".join(
        [
            _head(trace, holdings),
            *(f'<div class="plot" id="{name}">{div}</div>' for name, div in divs.items()),
            "" if owners is None else _holders(trace, owners),
        ]
    )
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(printable(trace.header.pool))}: block pool trace</title>\n"
        f"<style>{STYLE}</style>\n{_library()}\n{script}\n<script>{KEYS}</script>\n"
        f"</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def _figures(trace: Trace, holdings: Holdings | None, owners: Owners | None) -> dict[str, Any]:
    """By name, in the order of the page; those of which the trace tells nothing are left out."""
    at = figures.time_range(trace)
    at.name = "time"
    timed = find_latency(trace)
    plots = {
        "levels": figures.level_figure(trace, at),
        "waste": figures.waste_figure(trace, holdings, at),
        "events": figures.event_figure(trace, at),
        "map": None if holdings is None else figures.map_figure(trace, holdings, at),
        "owners": None if owners is None else figures.owner_figure(trace, owners, at),
        "latency": figures.latency_figure(timed) if timed else None,
    }
    return {name: plot for name, plot in plots.items() if plot is not None}


def _library() -> str:
    """Bokeh itself, without the parts for widgets, tables and formulas that the page does not use."""
    return Resources(mode="inline", components=["bokeh"]).render()


# -- what stands above the figures -----------------------------------------------------------------


def _head(trace: Trace, holdings: Holdings | None) -> str:
    header = trace.header
    began = datetime.fromtimestamp(header.began_wall_s, UTC)
    facts = [
        ("pool began with", f"{header.config.n_blocks:,} blocks of {header.config.block_size}"),
        ("recorded", f"{_span(trace.duration_ns)}"),
        ("calls", f"{trace.n_calls:,}"),
        ("owners", f"{trace.n_owners:,}"),
        *_outcomes(trace),
    ]
    notes = [f"Recorded from {began:%Y-%m-%d %H:%M:%S} UTC; written because: {header.reason}."]
    notes += [_versions(header.versions)] if header.versions else []
    warnings = list(_warnings(trace, holdings))
    return "\n".join(
        [
            f"<h1>Block pool {html.escape(printable(header.pool))}</h1>",
            f'<p class="note">{html.escape(printable(" ".join(notes), 2000))}</p>',
            *(f'<p class="warn">{html.escape(text)}</p>' for text in warnings),
            "<dl>",
            *(f"<div><dt>{html.escape(k)}</dt><dd>{html.escape(v)}</dd></div>" for k, v in facts),
            "</dl>",
            HELP,
        ]
    )


def _outcomes(trace: Trace) -> list[tuple[str, str]]:
    rows = trace.first_row[:-1]
    asked = trace.operation[rows] == ALLOCATE_OP
    refused = int((asked & (trace.outcome[rows] == EXHAUSTED_OUTCOME)).sum())
    used = trace.managed_after - trace.free_after
    peaks = [
        f"{name} {int(used[trace.stream == index].max(initial=0)):,}"
        for index, name in enumerate(trace.header.streams)
    ]
    kinds = Counter(event.kind for event in trace.events)
    found = [
        ("allocations", f"{int(asked.sum()):,}"),
        ("refused", f"{refused:,}"),
        ("most in use", ", ".join(peaks)),
    ]
    if int(trace.growth.sum()):
        found.append(("grown by", f"{int(trace.growth.sum()):,} blocks"))
    if kinds["slow"]:
        found.append(("slow calls", f"{kinds['slow']:,}"))
    return found


def _versions(versions: dict[str, str]) -> str:
    return "With " + ", ".join(f"{name} {version}" for name, version in versions.items()) + "."


def _warnings(trace: Trace, holdings: Holdings | None) -> Sequence[str]:
    found = []
    if holdings is None:
        found.append(
            "The books do not add up: the pool was found to be wrong, or a Ctrl-C kept a call out of "
            "the trace. Levels are as the calls tell them; who held which block cannot be told."
        )
    if trace.cut:
        found.append("The file was cut: it ends without its end, by a crash or while written.")
    if trace.n_lost:
        found.append(f"{trace.n_lost:,} calls were lost in recording; the books go on after them.")
    if trace.header.opening.holdings:
        found.append(
            "The trace begins in the middle of the pool's life: block ids are those that a new pool "
            "gives to the same calls."
        )
    if holdings is not None and holdings.disagreed >= 0:
        found.append(
            f"The allocator of this version does call {holdings.disagreed} otherwise than recorded; "
            "the block map and the lifetimes are its own from there on."
        )
    return found


# -- what stands below -----------------------------------------------------------------------------


def _holders(trace: Trace, owners: Owners) -> str:
    rows = []
    for n in range(min(TOP_HOLDERS, len(owners.number))):
        filled = float(owners.filled[n])
        life = int(owners.until_ns[n] - owners.since_ns[n])
        cells = (
            figures.owner_text(trace, int(owners.number[n])),
            f"{int(owners.most[n]):,}",
            _span(life),
            f"{float(owners.block_ns[n]) / 1e9:,.1f}",
            "not known" if math.isnan(filled) else f"{filled:.0%}",
            "yes" if bool(owners.held[n]) else "",
        )
        rows.append("<tr>" + "".join(f"<td>{html.escape(c)}</td>" for c in cells) + "</tr>")
    titles = ("owner", "blocks, at most", "held for", "block-seconds", "slots filled", "still held")
    return (
        "<h2>Top holders</h2>\n<table><thead><tr>"
        + "".join(f"<th>{title}</th>" for title in titles)
        + "</tr></thead>\n<tbody>"
        + "\n".join(rows)
        + "</tbody></table>"
    )


def _span(ns: int) -> str:
    seconds = ns / 1e9
    if seconds < 120:
        return f"{seconds:.3f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
