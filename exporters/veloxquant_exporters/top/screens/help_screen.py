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
  ↑ ↓  j k      mark a pool          enter  its detail, and back
  s             next order           a      alerts and runbooks
  p             hold the picture     r      read now
  n N           next pool (detail)   q      quit

[b]The table[/b]
  in use   blocks held, of those managed; colour: of what the pool can come to
  waste    held token slots without a token; matters when the pool is full
  alloc/s  blocks handed out a second, over the last 10 seconds
  fail/s   allocation calls a second that found no room
  p99      1 in 100 allocations takes longer (in the last minute)
  free/s owners oldest p50 lately   where there is room for them

[b]Memory[/b]
  active = the pools' buffers + the rest (weights, activations, other caches)

[b]Alerts[/b]
  ▲ fires now; △ its condition holds, and it fires in the time shown. Only what
  was seen since top began counts. docs/top.md tells more."""


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
