"""Bars, curves, rules and cells, as rich text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from rich.cells import cell_len, set_cell_size
from rich.text import Text

__all__ = [
    "ASCII",
    "bar",
    "cell",
    "clean",
    "heat",
    "join",
    "lines",
    "parts_bar",
    "rule",
    "sparkline",
]

_SHADES: Final = "▁▂▃▄▅▆▇█"
_EIGHTHS: Final = " ▏▎▍▌▋▊▉█"
# For terminals and files that cannot hold these: the nearest of what all can.
ASCII: Final = str.maketrans(
    {
        "█": "#", "▓": "+", "▒": "=", "░": ".", "─": "-", "·": "|", "▸": ">", "▲": "!", "△": "?",
        "…": "~", "▼": "v", "●": "*", "│": "|", "▏": ".", "▎": ".", "▍": "-", "▌": "-", "▋": "=",
        "▊": "=", "▉": "#", "▁": "_", "▂": ".", "▃": "-", "▄": "=", "▅": "=", "▆": "+", "▇": "*",
        "←": "<", "→": ">", "↑": "^", "↓": "v",
    }
)  # fmt: skip


def clean(text: str) -> str:
    """`text` with "?" for control characters: names that others chose must not move the cursor."""
    return text if text.isprintable() else "".join(c if c.isprintable() else "?" for c in text)


def cell(text: str, width: int, *, right: bool = False, style: str = "") -> Text:
    """`text`, cleaned, in exactly `width` columns; what does not fit ends in an ellipsis."""
    text = clean(text)
    if cell_len(text) > width:
        text = set_cell_size(text, max(width - 1, 0)) + "…" * (width > 0)
    space = " " * (width - cell_len(text))
    return Text(space + text if right else text + space, style=style, no_wrap=True)


def bar(share: float, width: int, style: str) -> Text:
    """A bar filled to `share`, 0 to 1, to an eighth of a column."""
    eighths = round(min(max(share, 0.0), 1.0) * width * 8)
    full, part = divmod(eighths, 8)
    text = Text("█" * full, style=style)
    if part:
        text.append(_EIGHTHS[part], style=style)
    text.append("░" * (width - full - bool(part)), style="bright_black")
    return text


def parts_bar(parts: Sequence[tuple[float, str, str]], whole: float, width: int) -> Text:
    """A bar of several parts, each with its character and style; the rest is empty."""
    text = Text()
    so_far = 0.0
    done = 0
    for value, character, style in parts:
        so_far += value
        end = min(width, round(so_far / whole * width)) if whole > 0 else 0
        text.append(character * max(0, end - done), style=style)
        done = max(done, end)
    text.append("░" * (width - done), style="bright_black")
    return text


def sparkline(values: Sequence[float], width: int) -> str:
    """The newest `width` of `values`, 0 to 1, as a curve."""
    top = len(_SHADES) - 1
    return "".join(_SHADES[round(min(max(v, 0.0), 1.0) * top)] for v in values[-width:])


def heat(share: float) -> str:
    """Style of a share of what there is: the steps of the boards."""
    return "red" if share >= 0.95 else "yellow" if share >= 0.8 else "green"


def rule(title: str, width: int, more: str = "") -> Text:
    """A line across, with a title at its left and `more` at its right."""
    title, more = clean(title), clean(more)
    text = Text(no_wrap=True)
    text.append("─ ", style="bright_black").append(title, style="bold")
    room = width - cell_len(title) - 3
    more = f" {more} ─" if more and cell_len(more) + 3 <= room else ""
    text.append(f" {'─' * (room - cell_len(more))}{more}", style="bright_black")
    text.truncate(width)
    return text


def join(parts: Iterable[Text | str], between: str = " ") -> Text:
    """Cells side by side."""
    row = Text(no_wrap=True)
    for place, part in enumerate(parts):
        if place:
            row.append(between)
        row.append(part)
    return row


def lines(rows: Iterable[Text], width: int) -> Text:
    """Rows below each other, none wider than `width`."""
    whole = Text(no_wrap=True)
    for place, row in enumerate(rows):
        row = row.copy()  # noqa: PLW2901 - the caller's stays as it is
        if row.cell_len > width:
            row.truncate(width, overflow="ellipsis")
        if place:
            whole.append("\n")
        whole.append(row)
    return whole
