"""The memory account of a process."""

from __future__ import annotations

from typing import Final

from rich.text import Text

from veloxquant_exporters.top.board import MemoryView, ProcessView
from veloxquant_exporters.top.panels.paint import clean, parts_bar, rule
from veloxquant_exporters.top.units import gigabytes, percent

__all__ = ["memory"]

_POOLS: Final = ("█", "magenta")
_WEIGHTS: Final = ("▓", "blue")
_REST: Final = ("▒", "cyan")
_CACHE: Final = ("▒", "bright_black")


def memory(process: ProcessView | None, width: int) -> list[Text]:
    """A rule and three lines: what active memory is made of, the bar, the rest."""
    name = process.name if process else ""
    title = f"memory of {name}" if name else "memory"
    if process is None or process.memory is None:
        what = "nothing is told of its memory here" if process and process.up else "no snapshot"
        return [rule(title, width), Text(f"  {what}", style="dim")]
    found = process.memory
    rows = [rule(title, width, "  ".join(process.versions))]
    if found.active is None:
        rows.append(Text("  MLX tells nothing: the process has not imported it", style="dim"))
    else:
        rows += [_account(found), _bar(found, width)]
    rows.append(_others(found))
    rows += [Text(f"  {clean(line)}") for line in process.program]
    return rows


def _account(found: MemoryView) -> Text:
    text = Text.assemble(("  active ", "dim"), (gigabytes(found.active), "bold"), " = ")
    parts = [("pools", found.pools, _POOLS), ("weights", found.weights, _WEIGHTS)]
    for name, value, (character, style) in parts:
        if value is not None:
            text.append(f"{character} ", style=style).append(f"{name} {gigabytes(value)} + ")
    what = "rest" if found.pools is not None or found.weights is not None else "weights, KV and all"
    text.append(f"{_REST[0]} ", style=_REST[1]).append(f"{what} {gigabytes(found.rest)}")
    return text


def _bar(found: MemoryView, width: int) -> Text:
    active, cache = found.active or 0, found.cache or 0
    whole = found.limit or max(active + cache, found.peak or 0)
    said = f" {percent((active + cache) / whole)} of {gigabytes(whole)}" if whole else ""
    said += "" if found.limit else " at the peak"
    rest = found.rest or 0
    pools = min(found.pools or 0, active)
    parts = [
        (pools, *_POOLS),
        (min(found.weights or 0, active - pools), *_WEIGHTS),
        (rest, *_REST),
        (cache, *_CACHE),
    ]
    return Text("  ") + parts_bar(parts, whole, max(10, width - 4 - len(said))) + Text(said)


def _others(found: MemoryView) -> Text:
    named = (
        ("cache", found.cache),
        ("peak", found.peak),
        ("limit", found.limit),
        ("footprint", found.footprint),
        ("resident", found.resident),
    )
    text = Text("  ")
    for name, value in named:
        if value is not None:
            text.append(f"{name} ", style="dim").append(f"{gigabytes(value)}  ")
    return text
