"""TopApp: the program behind the screens. It never waits for a source."""

from __future__ import annotations

import asyncio
import os
import signal
import termios
from contextlib import suppress
from typing import ClassVar, Final

from textual.app import App
from textual.binding import Binding, BindingType

from veloxquant_exporters.top.board import Board
from veloxquant_exporters.top.poller import Poller
from veloxquant_exporters.top.screens.alerts_screen import AlertsScreen
from veloxquant_exporters.top.screens.board_screen import BoardScreen
from veloxquant_exporters.top.screens.detail_screen import DetailScreen
from veloxquant_exporters.top.screens.help_screen import HelpScreen
from veloxquant_exporters.top.screens.shown import Shown
from veloxquant_exporters.top.screens.state import State

__all__ = ["TopApp"]

# How often the screens look whether there is another board; the age is shown to the second.
LOOK_S: Final = 0.1
_OF_A_TRACE: Final = ("step", "event", "faster")


class TopApp(App[int]):
    """Shows what a poller hears.

    Args:
        poller: Started; it has a board.
    """

    TITLE = "vqmon top"
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    Screen { layout: vertical; }
    Panel { height: auto; }
    #top, #slider { height: 2; }
    #body, #scroll { height: 1fr; }
    #left { width: 1fr; }
    #pools { height: 1fr; min-height: 2; }
    #side { display: none; width: 62; height: 100%; margin-left: 2; }
    .-wide #side { display: block; }
    .-wide #pools { height: auto; max-height: 60%; }
    .-wide #alerts { height: 1fr; }
    .-low #memory, .-low #alerts { display: none; }
    VerticalScroll { scrollbar-size-vertical: 1; }
    HelpScreen { align: center middle; }
    #help { width: 78; height: auto; max-height: 100%; border: round $accent; padding: 0 1;
            background: $surface; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "Quit"),
        Binding("ctrl+c,ctrl+q", "quit", show=False, priority=True),
        Binding("p,space", "pause", "Pause", key_display="p"),
        Binding("r", "read", show=False),
        Binding("left", "step(-0.01)", "Back", key_display="←", priority=True),
        Binding("right", "step(0.01)", "On", key_display="→", priority=True),
        Binding("left_square_bracket", "step(-0.1)", show=False),
        Binding("right_square_bracket", "step(0.1)", show=False),
        Binding("home", "step(-1)", show=False, priority=True),
        Binding("end", "step(1)", show=False, priority=True),
        Binding("e", "event(1)", "Event"),
        Binding("E", "event(-1)", show=False),
        Binding("plus", "faster(2)", show=False),
        Binding("minus", "faster(0.5)", show=False),
        Binding("question_mark", "help", "Help", key_display="?"),
    ]

    def __init__(self, poller: Poller) -> None:
        # Without this, Textual turns colours into greys where NO_COLOR asks for none.
        super().__init__(ansi_color=True if os.environ.get("NO_COLOR") else None)
        heard = poller.heard
        board = heard.board or Board(
            source=poller.boards.title, wall_s=0.0, watched_s=0.0, processes=(), pools=()
        )
        self.poller = poller
        self.state = State(board, heard, now_s=poller.clock())
        self.place = poller.boards.place
        self._status = ""

    def run_to_end(self) -> int:
        """Run until the person quits, or a signal asks for it; the exit code."""
        # Textual believes these over the terminal, and would not see it resized.
        for name in ("COLUMNS", "LINES"):
            os.environ.pop(name, None)
        code = self.run()
        return code if code is not None else self.return_code or 0

    def on_load(self) -> None:
        """Leave the terminal as it was, also when a signal ends the program."""
        loop = asyncio.get_running_loop()
        ends = {signal.SIGTERM: self._end, signal.SIGINT: self._end, signal.SIGHUP: self._hang_up}
        for number, end in ends.items():
            if signal.getsignal(number) is signal.SIG_IGN:  # as nohup wants it
                continue
            with suppress(ValueError, RuntimeError):  # not the main thread, as in some tests
                loop.add_signal_handler(number, end)

    def _end(self) -> None:
        self.exit(0)

    def _hang_up(self) -> None:
        """End; at once where the terminal is gone, as what is written to it would wait for ever."""
        try:
            termios.tcgetattr(0)
        except (OSError, termios.error):
            signal.signal(signal.SIGHUP, signal.SIG_DFL)
            signal.raise_signal(signal.SIGHUP)
        self.exit(0)

    def on_mount(self) -> None:
        """Show the board, and look for others."""
        self.push_screen(BoardScreen())
        self.set_interval(LOOK_S, self._look)

    def _look(self) -> None:
        changed = self.state.take(self.poller.heard, self.poller.clock())
        changed |= self.place is not None and self.place.playing
        if changed or self.state.status != self._status:
            self._status = self.state.status
            self.action_redraw()

    # -- actions --------------------------------------------------------------------------------

    def action_redraw(self) -> None:
        """Draw the screen in front anew, or the one that is seen behind the help."""
        for screen in reversed(self.screen_stack):
            if isinstance(screen, Shown):
                screen.redraw()
                break

    async def action_quit(self) -> None:
        """End, with exit code 0."""
        self.exit(0)

    def action_pause(self) -> None:
        """Hold the picture, or go on; of a trace, play it or stop."""
        if self.place is not None:
            self.place.play(on=not self.place.playing)
            self.action_moved()
            return
        self.state.paused = not self.state.paused
        self._look()
        self.action_redraw()

    def action_read(self) -> None:
        """Read now."""
        self.poller.poke()

    def action_moved(self) -> None:
        """Show the trace where it is now."""
        self.poller.poke()
        self.action_redraw()

    def action_step(self, share: float) -> None:
        """Move the place in the trace by a share of its length."""
        if self.place is not None:
            self.place.step(share)
            self.action_moved()

    def action_event(self, by: int) -> None:
        """Move the place in the trace to the next event, or to the one before."""
        if self.place is not None:
            self.place.step_event(by)
            self.action_moved()

    def action_faster(self, by: float) -> None:
        """Play the trace so many times as fast."""
        if self.place is not None:
            self.place.change_speed(by)
            self.action_moved()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Hide the keys of a trace where there is none."""
        if action in _OF_A_TRACE:
            return self.place is not None
        return True

    def action_sort(self) -> None:
        """Sort the pools by the next order."""
        self.state.sort_next()
        self.action_redraw()

    def action_move(self, by: int) -> None:
        """Mark another pool."""
        self.state.move(by)
        self.action_redraw()

    def action_open_pool(self) -> None:
        """Show the marked pool in full."""
        if self.state.pool is not None:
            self.state.selected = self.state.pool.key
            self.push_screen(DetailScreen())

    def action_alerts(self) -> None:
        """Show the alerts."""
        self.push_screen(AlertsScreen())

    def action_help(self) -> None:
        """Show the keys."""
        self.push_screen(HelpScreen())
