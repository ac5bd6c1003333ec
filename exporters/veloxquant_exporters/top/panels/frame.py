"""One plain frame: what `vqmon top --once` prints."""

from __future__ import annotations

from rich.text import Text

from veloxquant_exporters.top.board import Board
from veloxquant_exporters.top.panels.alerts import alert_summary
from veloxquant_exporters.top.panels.head import head
from veloxquant_exporters.top.panels.memory import memory
from veloxquant_exporters.top.panels.pool import summary
from veloxquant_exporters.top.panels.pools import sorted_pools, table

__all__ = ["empty", "frame"]


def frame(board: Board, width: int) -> list[Text]:
    """Everything below each other: all pools, the fullest in full, each process, each alert."""
    rows = [*head(board, width), Text()]
    pools = sorted_pools(board, "in use")
    rows += table(pools, width) if pools else [empty(board)]
    if pools:
        rows += [Text(), *summary(pools[0], width)]
    for process in board.processes:
        rows += [Text(), *memory(process, width)]
    return [*rows, Text(), *alert_summary(board, width)]


def empty(board: Board) -> Text:
    """What to say where there is no pool."""
    if any(process.up for process in board.processes):
        return Text("  no pool is watched: instrument() one", style="dim")
    return Text("  no process publishes here yet", style="dim")
