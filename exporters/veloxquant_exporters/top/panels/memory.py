"""The memory account of a process."""

from __future__ import annotations

from typing import Final

from rich.text import Text

from veloxquant_exporters.top.board import MemoryView, ProcessView
from veloxquant_exporters.top.panels.paint import clean, parts_bar, rule
from veloxquant_exporters.top.units import gigabytes, percent

__all__ = ["memory"]

_POOLS: Final = ("█", "cyan")
_CACHES: Final = ("█", "green")
_WEIGHTS: Final = ("▓", "blue")
_REST: Final = ("▒", "white")
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
    parts = [
        ("pools", found.pools, _POOLS),
        ("KV caches", found.caches, _CACHES),
        ("weights", found.weights, _WEIGHTS),
    ]
    for name, value, (character, style) in parts:
        if value is not None:
            text.append(f"{character} ", style=style).append(f"{name} {gigabytes(value)} + ")
    told = any(value is not None for _, value, _ in parts)
    what = "rest" if told else "weights, KV and all"
    text.append(f"{_REST[0]} ", style=_REST[1]).append(f"{what} {gigabytes(found.rest)}")
    return text


def _bar(found: MemoryView, width: int) -> Text:
    active, cache = found.active or 0, found.cache or 0
    whole = found.limit or max(active + cache, found.peak or 0)
    said = f" {percent((active + cache) / whole)} of {gigabytes(whole)}" if whole else ""
    said += "" if found.limit else " at the peak"
    parts: list[tuple[float, str, str]] = []
    left = active
    told = ((found.pools, _POOLS), (found.caches, _CACHES), (found.weights, _WEIGHTS))
    for value, (character, style) in told:
        part = min(value or 0, left)  # MLX is lazy: not all of it need be memory yet
        left -= part
        parts.append((part, character, style))
    parts += [(left, *_REST), (cache, *_CACHE)]
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
