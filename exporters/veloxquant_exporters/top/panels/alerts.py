"""The alerts that would fire."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rich.text import Text

from veloxquant_exporters.top.board import AlertView, Board
from veloxquant_exporters.top.panels.paint import cell, clean, join, rule
from veloxquant_exporters.top.rules import HALF_JUDGED, NOT_JUDGED, RULES
from veloxquant_exporters.top.units import duration

__all__ = ["alert_rows", "alert_summary", "not_judged_rows"]

# Columns before the name.
_NAME: Final = 20
# Narrower than this, names stand without what all of them begin with.
ROOMY: Final = 100
_STYLES: Final = {"critical": "bold red", "warning": "yellow", "info": "cyan"}


def alert_summary(board: Board, width: int, n_rows: int | None = None) -> list[Text]:
    """A rule that counts them, and a line for each.

    Args:
        board: Their board.
        width: Columns.
        n_rows: Most lines below the rule; None shows all.
    """
    firing = sum(alert.state == "firing" for alert in board.alerts)
    pending = len(board.alerts) - firing
    title = f"alerts: {firing} firing, {pending} pending" if board.alerts else "alerts: none"
    more = f"{len(RULES)} of {len(RULES) + len(NOT_JUDGED)} rules judged"
    rows = [rule(title, width, more)]
    shown = board.alerts if n_rows is None or len(board.alerts) <= n_rows else board.alerts[:n_rows]
    rows += alert_rows(shown, width)
    if len(shown) < len(board.alerts):
        left = len(board.alerts) - len(shown)
        rows[-1] = Text(f"  … and {left + 1} more: press a", style="dim")
    return rows


def alert_rows(alerts: Sequence[AlertView], width: int, selected: int | None = None) -> list[Text]:
    """A line each: how grave, the name, what it is about, the figures."""
    if not alerts:
        return [Text("  no condition of the judged rules holds", style="dim")]
    rows = []
    for place, alert in enumerate(alerts):
        style = _STYLES[alert.severity]
        name = alert.name if width >= ROOMY else alert.name.removeprefix("VeloxQuant")
        mark = "▲" if alert.state == "firing" else "△"
        about = " ".join(filter(None, (alert.pool, alert.process))) or "-"
        row = join(
            [
                Text("▸" if place == selected else " ", style="bold"),
                Text(mark, style=style),
                cell(_state(alert), 15, style=style),
                Text(name, style="bold"),
                Text(clean(about), style="cyan"),
                Text(clean(alert.detail)),
            ]
        )
        if row.cell_len > width:
            row.truncate(width, overflow="ellipsis")
        if place == selected:
            row.stylize("reverse", _NAME, _NAME + len(name))
        rows.append(row)
    return rows


def not_judged_rows(width: int) -> list[Text]:
    """The rules that are not judged here, and why."""
    rows = [rule("not judged here", width, "ask Prometheus")]
    for name, why in (*NOT_JUDGED.items(), *HALF_JUDGED.items()):
        rows.append(join([Text(f"  {name}"), Text(why, style="dim")]))
    return rows


def _state(alert: AlertView) -> str:
    if alert.state == "firing":
        return "firing"
    return f"pending {duration(max(1.0, alert.for_s - alert.held_s))}"
