"""The two lines at the top: what is read, how old it is, and the sums."""

from __future__ import annotations

import time

from rich.text import Text

from veloxquant_exporters.top.board import Board
from veloxquant_exporters.top.panels.paint import cell, clean
from veloxquant_exporters.top.units import amount, duration, percent, rate

__all__ = ["head"]


def head(board: Board, width: int, *, status: str = "", trouble: bool = False) -> list[Text]:
    """Two lines.

    Args:
        board: What is shown.
        width: Columns.
        status: How the source is, as in "paused".
        trouble: Whether `status` is bad news.
    """
    when = time.strftime("%H:%M:%S", time.localtime(board.wall_s))
    right = Text(status, style="bold red" if trouble else "bold")
    right.append(("  " if status else "") + when, style="dim")
    left = Text.assemble((" vqmon top ", "bold reverse"), " ")
    room = width - left.cell_len - right.cell_len - 1
    title = cell(_shortened(board.source, room), max(0, room), style="cyan")
    return [left + title + Text(" ") + right, _sums(board)]


def _shortened(source: str, room: int) -> str:
    """The end of a long path tells more than its beginning."""
    return source if len(source) <= room or room < 2 else "…" + source[-(room - 1) :]


def _sums(board: Board) -> Text:
    up = sum(process.up for process in board.processes)
    down = len(board.processes) - up
    text = Text(" ")
    text.append(f"{up} up")
    if down:
        text.append(", ").append(f"{down} down", style="bold red")
    text.append(f"  {_plural(len(board.pools), 'pool', 'pools')}")
    managed = sum(pool.n_blocks for pool in board.pools)
    used = sum(pool.in_use for pool in board.pools)
    if managed:
        text.append(f"  {amount(used)}/{amount(managed)} blocks {percent(used / managed)}")
    rates = [pool.rates for pool in board.pools if pool.rates is not None]
    if rates:
        text.append(f"  alloc {rate(sum(r.allocations for r in rates))}")
        text.append(f" free {rate(sum(r.frees for r in rates))}")
        failed = sum(r.exhaustions for r in rates)
        text.append(f" fail {rate(failed)}/s", style="bold red" if failed else "")
    if board.errors:
        errors = ", ".join(f"{clean(reason)} {n}" for reason, n in sorted(board.errors.items()))
        text.append(f"  unread: {errors}", style="yellow")
    ages = [p.age_s for p in board.processes if p.age_s is not None and p.age_s > 10]
    if ages:
        text.append(f"  oldest {duration(max(ages))} ago", style="yellow")
    return text


def _plural(n: int, one: str, many: str) -> str:
    return f"{n} {one if n == 1 else many}"
