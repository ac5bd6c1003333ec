"""BoardMaker: a board from each reading, with the history behind it."""

from __future__ import annotations

from veloxquant_exporters.top.alerts import AlertWatch
from veloxquant_exporters.top.board import Board, PoolView, ProcessView
from veloxquant_exporters.top.history import History, Moment
from veloxquant_exporters.top.rules import Scene
from veloxquant_exporters.top.track import Track, Tracks, tracks
from veloxquant_exporters.top.views import pool_view, process_view
from veloxquant_mlx.telemetry.process import ProcessSnapshot

__all__ = ["BoardMaker"]


class BoardMaker:
    """Makes boards of one source. One thread at a time.

    Args:
        source: The source, as a title.
    """

    def __init__(self, source: str) -> None:
        self._source = source
        self._history = History()
        self._watch = AlertWatch()

    def add(self, moment: Moment) -> Board:
        """The board of `moment`; one that is older than the last begins anew."""
        if len(self._history) and moment.at_s < self._history.now.at_s:
            self._watch.clear()
        self._history.add(moment)
        found = tracks(self._history)
        ages = {name: _age_s(track, moment) for name, track in found.processes.items()}
        return Board(
            source=self._source,
            wall_s=moment.wall_s,
            watched_s=self._history.watched_s,
            processes=_processes(moment, ages),
            pools=_pools(moment, found, ages),
            alerts=self._watch.look(Scene(tuple(self._history), found)),
            errors={reason: n for reason, n in moment.reading.errors.items() if n},
        )


def _age_s(track: Track[ProcessSnapshot], moment: Moment) -> float:
    """Seconds since the snapshot changed, or where it was not seen to, by both clocks."""
    newest = track.points[-1]
    by_clocks = max(0.0, moment.wall_s - newest.taken_s)
    # Clocks of two machines differ; a change that was seen tells better.
    return min(by_clocks, moment.at_s - newest.at_s) if len(track.points) > 1 else by_clocks


def _processes(moment: Moment, ages: dict[str, float]) -> tuple[ProcessView, ...]:
    views = [process_view(p, ages[p.process]) for p in moment.reading.processes]
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
