"""Panel: a widget that shows lines made for its width."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from rich.text import Text
from textual.widget import Widget

from veloxquant_exporters.top.panels.paint import lines

if TYPE_CHECKING:
    from textual.geometry import Size

__all__ = ["Draw", "Panel"]

# Lines for a width and a height; the height is None where as many as wanted may come.
Draw = Callable[[int, int | None], list[Text]]


class Panel(Widget):
    """Shows what `draw` makes; as high as that, or as its style says.

    Args:
        draw: Makes the lines.
        id: Of the widget.
    """

    def __init__(self, draw: Draw, *, id: str | None = None) -> None:  # noqa: A002 - Textual's name
        super().__init__(id=id)
        self._draw = draw
        self._n_lines = 0

    def render(self) -> Text:
        """The lines that fit."""
        width, height = self.size
        return lines(self._draw(width, height)[:height], width)

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        """As many lines as there are to show."""
        self._n_lines = len(self._draw(width, None))
        return self._n_lines

    def redraw(self) -> None:
        """Show the lines as they are now; the screen is laid out anew if there are more or fewer."""
        grows = self.styles.is_auto_height
        self.refresh(layout=grows and len(self._draw(self.size.width, None)) != self._n_lines)
