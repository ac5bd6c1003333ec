"""HelpScreen: the keys, and what the columns mean."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Final

from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Static

if TYPE_CHECKING:
    from textual.app import ComposeResult

__all__ = ["HelpScreen"]

_HELP: Final = """\
[b]Keys[/b]
  ↑ ↓ j k  mark a pool            enter  its detail, and back
  s        next order             a      alerts and runbooks
  p        hold the picture       r      read now
  n N      next, previous pool    q      quit
[b]Pools[/b]
  in use   blocks held of those managed; coloured by what it can come to
  waste    token slots of held blocks that hold no token
  alloc/s free/s    blocks a second, over the last 10 seconds
  fail/s   allocation calls a second that found no room
  p50 p99  seconds of an allocation, in the last minute
  oldest   how long the oldest owner has held blocks
[b]Memory[/b]
  active = the pools' buffers + the rest: weights, activations, caches
[b]Alerts[/b]
  ▲ would fire now; △ its condition holds, and it fires after the time
  shown. Only what happened since top began is known. See docs/top.md."""


class HelpScreen(ModalScreen[None]):
    """Gone with any of its keys."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,question_mark,enter,q,space", "dismiss", "Back", priority=True),
    ]

    def compose(self) -> ComposeResult:
        """The text, which scrolls where it must."""
        with VerticalScroll(id="help"):
            yield Static(_HELP)

    async def action_dismiss(self, result: None = None) -> None:
        """Go back."""
        self.dismiss(result)
