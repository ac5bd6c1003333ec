"""Shown: a screen that is drawn anew when there is another board."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, cast

from rich.text import Text
from textual.screen import Screen

from veloxquant_exporters.top.panels.head import head
from veloxquant_exporters.top.panels.paint import clean
from veloxquant_exporters.top.screens.panel import Panel
from veloxquant_exporters.top.screens.slider_panel import SliderPanel
from veloxquant_exporters.top.screens.state import State

if TYPE_CHECKING:
    from veloxquant_exporters.top.screens.app import TopApp

__all__ = ["Shown"]


class Shown(Screen[None]):
    """A screen with the two lines at its top."""

    @property
    def state(self) -> State:
        """What all screens share."""
        return cast("TopApp", self.app).state

    def top(self) -> Iterator[Panel]:
        """The two lines at the top, and the slider of a trace."""
        yield Panel(self._top, id="top")
        place = cast("TopApp", self.app).place
        if place is not None:
            yield SliderPanel(place)

    def redraw(self) -> None:
        """Show the state as it is now."""
        for panel in self.query(Panel):
            panel.redraw()

    def on_screen_resume(self) -> None:
        """Show what changed while another screen was in front."""
        self.redraw()

    def _top(self, width: int, _height: int | None) -> list[Text]:
        state = self.state
        rows = head(state.board, width, status=state.status, trouble=bool(state.fault))
        if state.fault:
            rows[1] = Text(f" {clean(state.fault)}", style="red")
        return rows
