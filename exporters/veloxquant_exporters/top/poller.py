"""Poller: reads a source again and again on a thread of its own, so that no screen ever waits."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from veloxquant_exporters.top.board import Board
from veloxquant_exporters.top.boards import Boards
from veloxquant_exporters.top.source import SourceError

__all__ = ["Heard", "Poller"]

# A read that takes longer is said to be overdue.
OVERDUE_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class Heard:
    """What is known of a source.

    Attributes:
        board: The newest, None before the first.
        seen_s: When it was made, by the monotonic clock; 0 before the first.
        fault: Why the newest read gave nothing, "" if it gave something.
        asked_s: When the read began that is going on; None between reads.
        n_reads: Reads that ended, failed ones too.
    """

    board: Board | None = None
    seen_s: float = 0.0
    fault: str = ""
    asked_s: float | None = None
    n_reads: int = 0

    def quiet_s(self, now_s: float) -> float:
        """Seconds since the source gave something."""
        return now_s - self.seen_s

    def trouble(self, now_s: float) -> str:
        """What is wrong with the source now, "" if nothing is."""
        if self.asked_s is not None and now_s - self.asked_s > OVERDUE_S:
            return "no answer yet"
        return self.fault


class Poller:
    """Asks a source every `interval_s` seconds, from `start` to `close`. Thread-safe.

    The thread is a daemon: a source that hangs for good holds up no exit.

    Args:
        boards: What makes them; the poller's thread alone asks it.
        interval_s: Seconds from one read's end to the next.
        clock: Monotonic seconds.
    """

    def __init__(
        self, boards: Boards, interval_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.boards = boards
        self.interval_s = interval_s
        self.clock = clock
        self._changed = threading.Condition()
        self._heard = Heard()
        self._closing = False
        self._poked = False
        self._thread = threading.Thread(target=self._run, name="vqmon-top", daemon=True)

    def start(self) -> None:
        """Begin to ask; once."""
        self._thread.start()

    def close(self) -> None:
        """Ask no more. A read that goes on is left to itself."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    def poke(self) -> None:
        """Ask now; if a read goes on, once more after it."""
        with self._changed:
            self._poked = True
            self._changed.notify_all()

    @property
    def heard(self) -> Heard:
        """What is known now; never waits."""
        return self._heard

    def wait(self, n_reads: int, timeout_s: float) -> Heard:
        """What is known once `n_reads` reads ended, or `timeout_s` later."""
        with self._changed:
            self._changed.wait_for(lambda: self._heard.n_reads >= n_reads, timeout_s)
        return self._heard

    def _run(self) -> None:
        while not self._closing:
            self._note(replace(self._heard, asked_s=self.clock()))
            self._note(self._read())
            with self._changed:
                self._changed.wait_for(lambda: self._closing or self._poked, self.interval_s)
                self._poked = False

    def _read(self) -> Heard:
        n_reads = self._heard.n_reads + 1
        try:
            board = self.boards.make()
        except SourceError as error:
            return replace(self._heard, fault=str(error), asked_s=None, n_reads=n_reads)
        except Exception as error:  # noqa: BLE001 - the screen shall say so, and go on
            fault = f"{type(error).__name__}: {error}"
            return replace(self._heard, fault=fault, asked_s=None, n_reads=n_reads)
        return Heard(board, self.clock(), "", None, n_reads)

    def _note(self, heard: Heard) -> None:
        with self._changed:
            self._heard = heard
            self._changed.notify_all()
