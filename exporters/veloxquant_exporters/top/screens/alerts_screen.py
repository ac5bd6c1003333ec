"""AlertsScreen: the alerts that would fire, what is not judged, and the runbooks."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from rich.text import Text
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.widgets import Footer, Markdown

from veloxquant_exporters.export import ExportError
from veloxquant_exporters.export.shipped import shipped
from veloxquant_exporters.top.board import AlertView
from veloxquant_exporters.top.panels.alerts import alert_rows, not_judged_rows
from veloxquant_exporters.top.panels.paint import rule
from veloxquant_exporters.top.screens.panel import Panel
from veloxquant_exporters.top.screens.shown import Shown

if TYPE_CHECKING:
    from textual.app import ComposeResult

__all__ = ["AlertsScreen", "RunbookScreen"]


class AlertsScreen(Shown):
    """All alerts; one is marked, and its runbook opens with enter."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,backspace,a", "app.pop_screen", "Back", key_display="esc"),
        Binding("enter", "runbook", "Runbook"),
        Binding("down,j", "mark(1)", show=False),
        Binding("up,k", "mark(-1)", show=False),
    ]

    def __init__(self) -> None:
        super().__init__()
        self._marked: tuple[str, str, str, str] | None = None

    def compose(self) -> ComposeResult:
        """The panels."""
        yield from self.top()
        with VerticalScroll(id="scroll", can_focus=False):
            yield Panel(self._rows)
        yield Footer()

    def _rows(self, width: int, _height: int | None) -> list[Text]:
        alerts = self.state.board.alerts
        place = self._place()
        rows = [rule("alerts that would fire", width, f"watched for {self._watched()}")]
        rows += alert_rows(alerts, width, place)
        if alerts:
            alert = alerts[place]
            rows += [
                Text(),
                Text(f"  {alert.name}: {alert.severity}, {alert.detail}"),
                Text(f"  runbook docs/runbooks/{alert.runbook}: press enter", style="cyan"),
            ]
        return [*rows, Text(), *not_judged_rows(width)]

    def _watched(self) -> str:
        from veloxquant_exporters.top.units import duration

        return duration(self.state.board.watched_s)

    def _place(self) -> int:
        keys = [_key(alert) for alert in self.state.board.alerts]
        return keys.index(self._marked) if self._marked in keys else 0

    def action_mark(self, by: int) -> None:
        """Mark the alert `by` places further down."""
        alerts = self.state.board.alerts
        if alerts:
            place = min(max(self._place() + by, 0), len(alerts) - 1)
            self._marked = _key(alerts[place])
            self.redraw()

    def action_runbook(self) -> None:
        """Open the runbook of the marked alert."""
        alerts = self.state.board.alerts
        if alerts:
            self.app.push_screen(RunbookScreen(alerts[self._place()].runbook))


def _key(alert: AlertView) -> tuple[str, str, str, str]:
    return alert.name, alert.process, alert.pool, alert.detail.partition(" ")[2]


class RunbookScreen(Shown):
    """A runbook, as it came with this version.

    Args:
        name: Its file.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,backspace,enter", "app.pop_screen", "Back", key_display="esc"),
    ]

    def __init__(self, name: str) -> None:
        super().__init__()
        self._runbook = name

    def compose(self) -> ComposeResult:
        """The text, which scrolls."""
        yield from self.top()
        with VerticalScroll(id="scroll"):
            yield Markdown(_text(self._runbook), open_links=False)
        yield Footer()


def _text(name: str) -> str:
    try:
        return shipped("runbooks")[name]
    except (ExportError, KeyError) as error:
        return f"The runbook {name} is not to be had: {error}"
