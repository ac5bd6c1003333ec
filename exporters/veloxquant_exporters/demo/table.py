"""The live table: a rich rendering of a frame, four times a second."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from veloxquant_exporters.demo.screen import POOL_NAME, Frame, megabytes

__all__ = ["LiveScreen", "render"]

FRAMES_PER_S: Final = 4
WIDEST: Final = 110  # columns; wider is harder to read, not richer
FIXED_LINES: Final = 17  # all but the rows of the requests
SHADES: Final = " ▁▂▃▄▅▆▇█"


class LiveScreen:
    """Redraws the table from a thread of its own; gone when it is left."""

    def __init__(self, look: Callable[[], Frame]) -> None:
        self._look = look
        self._past: deque[float] = deque(maxlen=WIDEST)
        self._next_s = 0.0
        self._console = Console()
        self._live = Live(
            console=self._console,
            get_renderable=self._render,
            refresh_per_second=FRAMES_PER_S,
            transient=True,
            vertical_overflow="crop",
        )

    def _render(self) -> RenderableType:
        frame = self._look()
        if frame.elapsed_s >= self._next_s:  # rich may ask more than once a frame
            self._next_s = frame.elapsed_s + 0.9 / FRAMES_PER_S
            self._past.append(frame.figures.usage)
        width = min(self._console.width, WIDEST)
        return render(frame, list(self._past), width, self._console.height)

    def __enter__(self) -> Self:
        self._live.start(refresh=True)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._live.stop()

    def tick(self) -> None:
        """Nothing: the table redraws itself."""


def render(frame: Frame, past: list[float], width: int, height: int) -> RenderableType:
    """The table.

    Args:
        frame: What to show.
        past: Usage of the pool at earlier frames, 0 to 1, newest last.
        width: Columns to fill.
        height: Lines there are; rows of requests that do not fit are left out.
    """
    parts = [_head(frame), _rule(), _traffic(frame, width), _rule(f'pool "{POOL_NAME}"')]
    parts += [_pool(frame, past, width), _rule("requests being generated")]
    body = Table.grid()
    body.width = width
    for part in parts:
        body.add_row(part)
    body.add_row(_requests(frame, max(1, height - FIXED_LINES)))
    return Group(body, _foot(frame))


def _rule(title: str = "") -> Rule:
    return Rule(Text(title, style="bold"), align="left", style="dim", characters="─")


def _rows() -> Table:
    grid = Table.grid(padding=(0, 1))
    grid.add_column(width=9, style="dim", no_wrap=True)
    grid.add_column(no_wrap=True)
    return grid


def _head(frame: Frame) -> RenderableType:
    rows = _rows()
    rows.add_row("model", Text(frame.title, style="bold") + Text(f"  {frame.note}", style="dim"))
    rows.add_row("metrics", Text(frame.url, style="cyan"))
    return rows


def _traffic(frame: Frame, width: int) -> RenderableType:
    now = frame.progress
    rows = _rows()
    count = f"{frame.served}/{frame.n_requests}"
    label = count if frame.once else f"{count} round {frame.round}"
    rows.add_row("served", _bar(frame.served, frame.n_requests, width, "green", label))
    waiting = Text(f"{now.waiting} waiting")
    if now.refused:
        waiting.append(f" ({now.refused} for room)", style="yellow")
    rows.add_row("requests", Text(f"{len(now.active)} active  ") + waiting)
    rows.add_row(
        "tokens",
        f"{now.output_tokens:,} generated  {frame.rate:,.0f}/s  {now.prompt_tokens:,} of prompts",
    )
    return rows


def _pool(frame: Frame, past: list[float], width: int) -> RenderableType:
    pool = frame.figures
    rows = _rows()
    shown = f"{pool.usage:4.0%}  {pool.in_use:,} of {pool.n_blocks:,}"
    rows.add_row("in use", _bar(pool.in_use, pool.n_blocks, width, _heat(pool.usage), shown))
    filled = f"{pool.fill:4.0%}  {pool.slots_used:,} of {pool.slots_allocated:,}"
    rows.add_row("fill", _bar(pool.slots_used, pool.slots_allocated, width, "blue", filled))
    rows.add_row("lately", Text(_spark(past, _bar_width(width)), style="magenta"))
    free = "  ".join(f"{stream} {n:,}" for stream, n in pool.free.items())
    rows.add_row("free", f"{free}  blocks of {frame.block_size} tokens; peak use {pool.peak:,}")
    tone = "bold yellow" if pool.exhausted else ""
    rows.add_row(
        "exhausted",
        Text(f"{pool.exhausted:,} times", style=tone)
        + Text("  the request waits, then starts anew", style="dim"),
    )
    rows.add_row(
        "MLX",
        f"{megabytes(pool.mlx_active_bytes)} active  {megabytes(pool.mlx_peak_bytes)} peak",
    )
    return rows


def _requests(frame: Frame, n_rows: int) -> RenderableType:
    rows = Table(box=None, padding=(0, 2), pad_edge=False, header_style="dim")
    for name, width in (("request", 9), ("prompt", 9), ("generated", 9), ("blocks", 7)):
        rows.add_column(name, width=width, justify="right", no_wrap=True)
    rows.add_column(no_wrap=True)
    for view in frame.progress.active[:n_rows]:
        rows.add_row(
            str(view.plan.number),
            _of(view.n_read, view.plan.n_prompt),
            _of(view.n_done, view.plan.n_output),
            f"{view.n_blocks:,}",
            ProgressBar(view.plan.n_output, view.n_done, width=20, complete_style="green"),
        )
    return rows


def _foot(frame: Frame) -> RenderableType:
    end = "It ends when all are served; Ctrl-C ends it now." if frame.once else "Ctrl-C ends it."
    return Text(end, style="dim")


def _of(done: int, all_of_it: int) -> str:
    return f"{done}/{all_of_it}"


def _bar_width(width: int) -> int:
    return max(10, width - 40)


def _bar(value: float, total: float, width: int, style: str, text: str) -> RenderableType:
    row = Table.grid(padding=(0, 1))
    bar = ProgressBar(
        max(total, 1), value, width=_bar_width(width), complete_style=style, finished_style=style
    )
    row.add_row(bar, Text(text))
    return row


def _heat(usage: float) -> str:
    return "red" if usage >= 0.95 else "yellow" if usage >= 0.8 else "green"


def _spark(past: list[float], width: int) -> str:
    return "".join(SHADES[round(share * (len(SHADES) - 1))] for share in past[-width:])
