"""From readings to boards: BoardMaker, with the history behind it, and LiveBoards, which asks."""

from __future__ import annotations

from typing import Protocol

from veloxquant_exporters.top.alerts import AlertWatch
from veloxquant_exporters.top.board import AlertView, Board, PoolView, ProcessView
from veloxquant_exporters.top.history import History, Moment
from veloxquant_exporters.top.rule import Scene
from veloxquant_exporters.top.source import Source
from veloxquant_exporters.top.trace_place import TracePlace
from veloxquant_exporters.top.track import Track, Tracks, tracks
from veloxquant_exporters.top.views import pool_view, process_view
from veloxquant_mlx.telemetry.process import ProcessSnapshot

__all__ = ["BoardMaker", "Boards", "LiveBoards"]


class Boards(Protocol):
    """Makes boards, one after the other; asked by one thread at a time."""

    @property
    def place(self) -> TracePlace | None:
        """Where in a recording the board is made; None of what is live."""
        ...

    @property
    def title(self) -> str:
        """What is read, without any password."""
        ...

    def make(self) -> Board:
        """The board of now. May take long, or hang: who asks does so on a thread to spare.

        Raises:
            SourceError: There is none to be had now.
        """
        ...


class BoardMaker:
    """Makes boards of one source. One thread at a time.

    Args:
        source: The source, as a title.
    """

    def __init__(self, source: str) -> None:
        self._source = source
        self._history = History()
        self._watch = AlertWatch()

    def note(self, moment: Moment) -> None:
        """Take in a reading that is not shown; one that is older than the last begins anew."""
        self._take(moment)

    def add(self, moment: Moment) -> Board:
        """The board of `moment`; one that is older than the last begins anew."""
        found, alerts = self._take(moment)
        ages = {name: _age_s(track, moment) for name, track in found.processes.items()}
        return Board(
            source=self._source,
            wall_s=moment.wall_s,
            watched_s=self._history.watched_s,
            processes=_processes(moment, found, ages),
            pools=_pools(moment, found, ages),
            alerts=alerts,
            errors={reason: n for reason, n in moment.reading.errors.items() if n},
        )

    def _take(self, moment: Moment) -> tuple[Tracks, tuple[AlertView, ...]]:
        if len(self._history) and moment.at_s < self._history.now.at_s:
            self._watch.clear()
        self._history.add(moment)
        found = tracks(self._history)
        return found, self._watch.look(Scene(tuple(self._history), found))


class LiveBoards:
    """Boards of what a source tells; `Boards`.

    Args:
        source: What to read.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self._maker = BoardMaker(source.title)

    @property
    def place(self) -> None:
        """See `Boards.place`."""
        return None

    @property
    def title(self) -> str:
        """See `Boards.title`."""
        return self._source.title

    def make(self) -> Board:
        """See `Boards.make`."""
        return self._maker.add(self._source.read())


def _age_s(track: Track[ProcessSnapshot], moment: Moment) -> float:
    """Seconds since the snapshot changed, or where it was not seen to, by both clocks."""
    newest = track.points[-1]
    by_clocks = max(0.0, moment.wall_s - newest.taken_s)
    # Clocks of two machines differ; a change that was seen tells better.
    return min(by_clocks, moment.at_s - newest.at_s) if len(track.points) > 1 else by_clocks


def _processes(moment: Moment, found: Tracks, ages: dict[str, float]) -> tuple[ProcessView, ...]:
    views = [
        process_view(track, moment.at_s, ages[name]) for name, track in found.processes.items()
    ]
    present = {view.name for view in views}
    views += [
        ProcessView(name=name, up=False, age_s=None, versions=(), memory=None)
        for name, up in moment.reading.up.items()
        if not up and name not in present
    ]
    return tuple(sorted(views, key=lambda view: view.name))


def _pools(moment: Moment, found: Tracks, ages: dict[str, float]) -> tuple[PoolView, ...]:
    return tuple(
        pool_view(
            process,
            track,
            moment.at_s,
            age_s=ages[process],
            holders=moment.holders.get((process, name), ()),
        )
        for (process, name), track in sorted(found.pools.items())
    )
