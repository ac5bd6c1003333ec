"""TraceBoards: boards of a recorded trace, at its place."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

from veloxquant_exporters.sources import Reading
from veloxquant_exporters.top.board import Board
from veloxquant_exporters.top.boards import BoardMaker
from veloxquant_exporters.top.history import Moment
from veloxquant_exporters.top.source import SourceError
from veloxquant_exporters.top.trace_index import TraceIndex
from veloxquant_exporters.top.trace_place import TracePlace
from veloxquant_mlx.telemetry.process import ProcessSnapshot
from veloxquant_mlx.telemetry.trace import TraceError, load_trace

__all__ = ["TraceBoards"]

# Moments before the one that is shown, in seconds before it: for rates, latencies and alerts.
_BEFORE_S: Final = (
    *range(1800, 60, -60),
    *range(60, 10, -10),
    *range(10, 0, -2),
    1.0,
    0.5,
    0.1,
)
# What the curve of a pool shows: the last two minutes.
PAST_NS: Final = 120 * 10**9
N_PAST: Final = 120


class TraceBoards:
    """Boards of a trace; `Boards`.

    Args:
        path: The file.
        clock: Monotonic seconds, for playing.

    Attributes:
        place: The moment that is shown.

    Raises:
        SourceError: It is no trace that can be read.
    """

    def __init__(
        self, path: str | os.PathLike[str], clock: Callable[[], float] = time.monotonic
    ) -> None:
        try:
            self._trace = load_trace(path)
        except (TraceError, OSError) as error:
            raise SourceError(str(error)) from error
        self._index = TraceIndex(self._trace)
        self._path = Path(path)
        self._curve: tuple[int, list[float]] = (0, [])
        self._made: tuple[int, Board] | None = None
        # A dump of a ring begins long after its header did: with the first row there is.
        first = int(self._trace.at_ns[0]) if self._trace.n_rows else 0
        end = self._trace.duration_ns
        self.place = TracePlace(min(first, end), end, self._trace.events, self._course, clock)

    @property
    def title(self) -> str:
        """The file."""
        return f"{self._path}{' (cut)' if self._trace.cut else ''}"

    def _course(self, width: int) -> list[float]:
        """Share of the blocks in use over the whole trace, in `width` parts."""
        if self._curve[0] != width:
            place = self.place
            self._curve = width, self._index.usage_between(place.begin_ns, place.end_ns, width)
        return self._curve[1]

    def make(self) -> Board:
        """The board of the place, as it would have been had one watched the trace until then."""
        at_ns = self.place.at_ns
        if self._made is not None and self._made[0] == at_ns:
            return self._made[1]
        maker = BoardMaker(self.title)
        times = [at_ns - int(before_s * 1e9) for before_s in _BEFORE_S]
        begin_ns = max(self.place.begin_ns, times[0])
        for earlier_ns in (begin_ns, *(time_ns for time_ns in times if time_ns > begin_ns)):
            if earlier_ns < at_ns:
                maker.note(self._moment(earlier_ns))
        board = maker.add(self._moment(at_ns, holders=True))
        begin_ns = max(self.place.begin_ns, at_ns - PAST_NS)
        past = tuple(self._index.usage_between(begin_ns, at_ns, N_PAST))
        board = replace(board, pools=tuple(replace(pool, past=past) for pool in board.pools))
        self._made = at_ns, board
        return board

    def _moment(self, at_ns: int, *, holders: bool = False) -> Moment:
        header = self._trace.header
        pool = self._index.pool_at(at_ns)
        process = ProcessSnapshot(
            process="", sequence=0, wall_s=pool.wall_s,
            version=header.versions.get("veloxquant", ""),
            python=header.versions.get("python", ""), mlx=header.versions.get("mlx", ""),
            resident_bytes=None, footprint_bytes=None, mlx_active_bytes=None, mlx_cache_bytes=None,
            mlx_peak_bytes=None, mlx_limit_bytes=None, errors={}, dropped={}, overhead_s=0.0,
            pools=(pool,),
        )  # fmt: skip
        top = {("", pool.name): self._index.holders_at(at_ns)} if holders else {}
        return Moment(at_ns / 1e9, pool.wall_s, Reading((process,), {"": 1}), top)
