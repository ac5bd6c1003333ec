"""BoardScreen: all pools, and the memory and alerts beside them."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from rich.text import Text
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.widgets import Footer

from veloxquant_exporters.top.panels.alerts import alert_summary
from veloxquant_exporters.top.panels.frame import empty
from veloxquant_exporters.top.panels.memory import memory
from veloxquant_exporters.top.panels.paint import rule
from veloxquant_exporters.top.panels.pool import summary
from veloxquant_exporters.top.panels.pools import table
from veloxquant_exporters.top.screens.panel import Panel
from veloxquant_exporters.top.screens.shown import Shown
from veloxquant_exporters.top.screens.state import State

if TYPE_CHECKING:
    from textual import events
    from textual.app import ComposeResult

__all__ = ["BoardScreen", "PoolPanel"]

# Lines that the summary of a pool needs to be worth its place.
SUMMARY_LINES = 4
# Lines from which on the table has a title.
ROOM_FOR_TITLE = 3


class PoolPanel(Panel, can_focus=True):
    """The table of pools; keys and the mouse mark one.

    Args:
        state: What is shown.
    """

    def __init__(self, state: State) -> None:
        super().__init__(self._rows, id="pools")
        self._state = state
        self._first = 0  # the pool in the first row, where not all fit

    def _rows(self, width: int, height: int | None) -> list[Text]:
        state = self._state
        pools = state.pools
        title = rule("pools", width, f"by {state.sort}")
        if not pools:
            return [title, empty(state.board)]
        head = 1 if height is not None and height < ROOM_FOR_TITLE else 2
        room = max(1, len(pools) if height is None else height - head)
        if len(pools) > room:
            self._scroll([pool.key for pool in pools], room)
            title = rule("pools", width, f"{self._place(len(pools), room)}, by {state.sort}")
        else:
            self._first = 0
        shown = pools[self._first : self._first + room]
        marked = state.pool
        rows = table(shown, width, selected=marked.key if marked else None)
        if height is None or height >= ROOM_FOR_TITLE:
            rows.insert(0, title)
        left = 0 if height is None else height - len(rows) - 1
        wide = self.screen.has_class("-wide")
        if marked is not None and left >= SUMMARY_LINES and not wide:
            rows += [Text(), *summary(marked, width)[:left]]
        return rows

    def _scroll(self, keys: list[tuple[str, str]], room: int) -> None:
        marked = self._state.pool
        place = keys.index(marked.key) if marked else 0
        self._first = min(max(self._first, place - room + 1, 0), place, len(keys) - room)

    def _place(self, n: int, room: int) -> str:
        return f"{self._first + 1}-{self._first + room} of {n}"

    async def on_click(self, event: events.Click) -> None:
        """Mark the pool that was clicked; it opens with a second click."""
        place = self._first + event.y - 2
        keys = [pool.key for pool in self._state.pools]
        if event.y - 2 >= 0 and place < len(keys) and event.y < self.size.height:
            again = self._state.selected == keys[place]
            self._state.selected = keys[place]
            self.app.action_redraw()  # type: ignore[attr-defined]
            if again:
                await self.app.run_action("open_pool")

    def on_mouse_scroll_down(self) -> None:
        """Mark the next pool."""
        self.app.action_move(1)  # type: ignore[attr-defined]

    def on_mouse_scroll_up(self) -> None:
        """Mark the pool before."""
        self.app.action_move(-1)  # type: ignore[attr-defined]


class BoardScreen(Shown):
    """What there is at a glance."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "app.open_pool", "Detail"),
        Binding("s", "app.sort", "Sort"),
        Binding("a", "app.alerts", "Alerts"),
        Binding("down,j", "app.move(1)", show=False),
        Binding("up,k", "app.move(-1)", show=False),
        Binding("pagedown", "app.move(10)", show=False),
        Binding("pageup", "app.move(-10)", show=False),
        Binding("g", "app.move(-1000000)", show=False),
        Binding("G", "app.move(1000000)", show=False),
    ]
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (140, "-wide")]  # noqa: RUF012 - Textual's own form
    VERTICAL_BREAKPOINTS = [(0, "-low"), (18, "-high")]  # noqa: RUF012

    def compose(self) -> ComposeResult:
        """The panels."""
        yield from self.top()
        with Horizontal(id="body"):
            with Vertical(id="left"):
                yield PoolPanel(self.state)
                yield Panel(self._memory, id="memory")
                yield Panel(self._alerts, id="alerts")
            yield Panel(self._side, id="side")
        yield Footer()

    def _memory(self, width: int, _height: int | None) -> list[Text]:
        return memory(self.state.process, width)

    def _alerts(self, width: int, height: int | None) -> list[Text]:
        room = max(3, self.app.size.height // 5)
        if height is not None:
            room = max(1, height - 1)
        return alert_summary(self.state.board, width, room)

    def _side(self, width: int, _height: int | None) -> list[Text]:
        pool = self.state.pool
        return summary(pool, width) if pool is not None else []
