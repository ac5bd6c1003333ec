"""Help for the tests of `vqmon top`: real pools read at made-up times, and what a screen shows."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from html import unescape
from xml.etree import ElementTree as ET

from veloxquant_exporters.sources import Reading
from veloxquant_exporters.top.history import Moment
from veloxquant_exporters.top.source import SourceError
from veloxquant_mlx.core.exceptions import PoolError
from veloxquant_mlx.memory.block_pool import BlockPoolAllocator, PoolConfig
from veloxquant_mlx.telemetry import instrument, take_snapshot, uninstrument
from veloxquant_mlx.telemetry.process import ProcessSnapshot

WALL_S = 1_800_000_000.0
DEADLINE_S = 20.0


@contextmanager
def watched(name: str, **config: object) -> Iterator[BlockPoolAllocator]:
    """A watched pool of that name."""
    pool = BlockPoolAllocator(PoolConfig(**config))  # type: ignore[arg-type]
    instrument(pool, name=name)
    try:
        yield pool
    finally:
        uninstrument(pool)


def snapshot(*names: str, process: str = "", **changes: object) -> ProcessSnapshot:
    """This process now, with those of its pools alone, and with `changes`."""
    found = take_snapshot()
    pools = tuple(pool for pool in found.pools if pool.name in names)
    assert len(pools) == len(names)
    return replace(found, process=process, pools=pools, **changes)  # type: ignore[arg-type]


def at(seconds: float, *processes: ProcessSnapshot, **changes: object) -> Moment:
    """A reading of `processes`, `seconds` after the first, as if they were taken right then."""
    taken = tuple(replace(process, wall_s=WALL_S + seconds) for process in processes)
    up = {process.process: 1 for process in processes}
    reading = replace(Reading(processes=taken, up=up), **changes)  # type: ignore[arg-type]
    return Moment(seconds, WALL_S + seconds, reading)


def exhaust(pool: BlockPoolAllocator, stream: str = "k", times: int = 1) -> None:
    """Ask for more than the pool has, so many times."""
    for _ in range(times):
        try:
            pool.allocate(stream, 10**6, "greedy")
        except PoolError:
            continue
        raise AssertionError("the pool had room")


class Scripted:
    """A source that tells what it is told, and hangs or fails when it is told to."""

    title = "scripted"

    def __init__(self, tell: Callable[[], Moment]) -> None:
        self.tell = tell
        self.fault = ""
        self.hanging = threading.Event()
        self.released = threading.Event()
        self.n_reads = 0

    def read(self) -> Moment:
        """As any source."""
        self.n_reads += 1
        if self.hanging.is_set():
            self.released.wait(DEADLINE_S)
        if self.fault:
            raise SourceError(self.fault)
        return self.tell()


def live(*names: str, process: str = "") -> Callable[[], Moment]:
    """Tells of those pools of this process, at the true time."""

    def tell() -> Moment:
        found = snapshot(*names, process=process)
        return Moment(time.monotonic(), time.time(), Reading((found,), {process: 1}))

    return tell


def shown(svg: str) -> list[str]:
    """The lines of a screen that Textual exported, without blanks at their ends."""
    rows: dict[float, list[tuple[float, str]]] = {}
    for element in ET.fromstring(svg).iter():
        if element.tag.endswith("}text") and element.get("clip-path"):
            place = float(element.get("y", "0")), float(element.get("x", "0"))
            text = unescape("".join(element.itertext())).replace("\xa0", " ")
            rows.setdefault(place[0], []).append((place[1], text))
    lines = []
    for y in sorted(rows):
        line = ""
        for x, text in sorted(rows[y]):
            line = line.ljust(round(x / 12.2)) + text
        lines.append(line.rstrip())
    return lines
