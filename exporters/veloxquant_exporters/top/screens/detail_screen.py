"""DetailScreen: one pool in full."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from rich.text import Text
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.widgets import Footer

from veloxquant_exporters.top.panels.memory import memory
from veloxquant_exporters.top.panels.paint import rule
from veloxquant_exporters.top.panels.pool import detail
from veloxquant_exporters.top.screens.panel import Panel
from veloxquant_exporters.top.screens.shown import Shown

if TYPE_CHECKING:
    from textual.app import ComposeResult

__all__ = ["DetailScreen"]


class DetailScreen(Shown):
    """The marked pool: streams, operations, owners, holders, its alerts and its process' memory."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,backspace,enter", "app.pop_screen", "Back", key_display="esc"),
        Binding("n", "app.move(1)", "Next pool"),
        Binding("N", "app.move(-1)", "Previous"),
        Binding("a", "app.alerts", "Alerts"),
    ]

    def compose(self) -> ComposeResult:
        """The panels."""
        yield from self.top()
        with VerticalScroll(id="scroll"):
            yield Panel(self._detail)
        yield Footer()

    def _detail(self, width: int, _height: int | None) -> list[Text]:
        pool = self.state.pool
        if pool is None:
            return [rule("pool", width), Text("  it is gone", style="dim")]
        rows = detail(self.state.board, pool, width)
        return [*rows, *memory(self.state.board.process(pool.process), width)]
