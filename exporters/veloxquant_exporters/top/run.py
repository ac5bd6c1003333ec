"""What `vqmon top` does: open the source, then show it on screens, as one frame, or as JSON."""

from __future__ import annotations

import logging
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from veloxquant_exporters.access import Access
from veloxquant_exporters.top.board import Board
from veloxquant_exporters.top.boards import Boards, LiveBoards
from veloxquant_exporters.top.poller import Poller
from veloxquant_exporters.top.source import SourceError
from veloxquant_mlx.telemetry import stop_publishing

__all__ = ["Settings", "open_boards", "read_once", "run"]

# Longest wait for a first answer, and for a second one after its interval.
FIRST_S: Final = 10.0
NARROWEST: Final = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What to show, and how.

    Attributes:
        source: A snapshot folder, the URL of a metrics page, or a trace file.
        interval_s: Seconds between readings.
        at_s: Where in a trace to begin, in seconds; None is its end.
        once, as_json: One frame of plain text, or one reading as JSON, instead of screens.
        access: How to get in, of a URL.
    """

    source: str
    interval_s: float = 1.0
    at_s: float | None = None
    once: bool = False
    as_json: bool = False
    access: Access = field(default_factory=Access)


def run(settings: Settings) -> int:
    """Show until told to stop; for the main thread of a program.

    Returns:
        The exit code.

    Raises:
        SourceError: Nothing can be read at first.
    """
    # What a source logs would land on the screens; the screens say what it is worth.
    logging.getLogger("veloxquant_exporters").addHandler(logging.NullHandler())
    stop_publishing()  # the variable that names the folder is meant for those who have pools
    boards = open_boards(settings.source, settings.access)
    if settings.at_s is not None:
        if boards.place is None:
            raise SourceError("--at is for a trace: what is live is shown as it is now")
        boards.place.seek(settings.at_s * 1e9)
    if settings.as_json:
        from veloxquant_exporters.top.as_json import board_to_json

        _print(board_to_json(read_once(boards, settings.interval_s)))
        return 0
    if settings.once:
        _print_frame(read_once(boards, settings.interval_s))
        return 0
    from veloxquant_exporters.top.screens.app import TopApp

    # A trace costs nothing while its place does not move, and plays the smoother.
    interval_s = settings.interval_s if boards.place is None else min(settings.interval_s, 0.25)
    poller = Poller(boards, interval_s)
    poller.start()
    try:
        _first(poller)
        return TopApp(poller).run_to_end()
    finally:
        poller.close()


def open_boards(name: str, access: Access | None = None) -> Boards:
    """What makes boards of what `name` names; of a folder and a page nothing is read yet.

    Raises:
        SourceError: There is no such folder or file, or it is no trace.
    """
    if "://" in name:
        from veloxquant_exporters.top.page_source import PageSource

        return LiveBoards(PageSource(name, access))
    path = Path(name)
    if path.is_dir():
        from veloxquant_exporters.top.folder_source import FolderSource

        return LiveBoards(FolderSource(path))
    if not path.exists():
        raise SourceError(f"{name!r} is neither a folder or file that is there, nor a URL")
    from veloxquant_exporters.top.trace_boards import TraceBoards

    return TraceBoards(path)


def read_once(boards: Boards, interval_s: float) -> Board:
    """The board of two readings, `interval_s` apart, so that it has rates.

    Raises:
        SourceError: Nothing can be read.
    """
    poller = Poller(boards, interval_s)
    poller.start()
    try:
        first = _first(poller)
        if boards.place is not None:  # what is recorded has its rates at once
            return first
        heard = poller.wait(2, FIRST_S + interval_s)
    finally:
        poller.close()
    if heard.board is None:
        raise SourceError(heard.fault)
    return heard.board


def _first(poller: Poller) -> Board:
    """Wait for the first answer."""
    heard = poller.wait(1, FIRST_S)
    if heard.board is None:
        late = f"{poller.boards.title} does not answer in {FIRST_S:g} s"
        raise SourceError(heard.fault or late)
    return heard.board


def _print_frame(board: Board) -> None:
    from veloxquant_exporters.top.panels.frame import frame
    from veloxquant_exporters.top.panels.paint import ASCII

    width = max(NARROWEST, shutil.get_terminal_size().columns)
    text = "\n".join(row.plain[:width].rstrip() for row in frame(board, width))
    # Of a stdout that was closed before there is none.
    encoding = (getattr(sys.stdout, "encoding", None) or "ascii").lower()
    _print(text if "utf" in encoding else text.translate(ASCII))


def _print(text: str) -> None:
    import click

    click.echo(text)
