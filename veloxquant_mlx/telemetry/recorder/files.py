"""Files: what a recorder took off its ring, written as traces."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from veloxquant_mlx.telemetry.process import own_version, python_version
from veloxquant_mlx.telemetry.recorder.capture import Books, rewind
from veloxquant_mlx.telemetry.trace.packer import Packer, encodable, level_map, snapshot_map
from veloxquant_mlx.telemetry.trace.schema import CHUNK_ROWS, VERSION
from veloxquant_mlx.telemetry.trace.writer import TraceWriter, refuse_special

if TYPE_CHECKING:
    from veloxquant_mlx.memory.journal import Entry
    from veloxquant_mlx.memory.pool_config import PoolConfig
    from veloxquant_mlx.telemetry.recorder.ring import Taken
    from veloxquant_mlx.telemetry.snapshot import PoolSnapshot

__all__ = ["Source", "TraceFile", "write_ring"]

MAX_SNAPSHOTS: Final = 64  # in a chunk


class Source:
    """What does not change of a recorded pool.

    Args:
        pool: Its name.
        config: Its settings.
        owners: Whether owner ids go into files.
    """

    def __init__(self, pool: str, config: PoolConfig, *, owners: bool) -> None:
        self.pool = pool
        self.config = config
        self.owners = owners
        self.streams = ("k", "v") if config.separate_kv else ("kv",)

    def packer(self, books: Books) -> Packer:
        """A packer that goes on from `books`."""
        return Packer(
            self.config.block_size,
            self.streams,
            books.levels,
            books.n_grown,
            books.at_ns,
            names=self.owners,
        )


class TraceFile:
    """A trace that is being written. Not thread-safe.

    Args:
        path: Replaced if there is one.
        source: The pool.
        books: What was held at the beginning.
        now_ns: The pool's clock now.
        reason: Why it is written.
    """

    def __init__(
        self, path: str | os.PathLike[str], source: Source, books: Books, now_ns: int, reason: str
    ) -> None:
        self._source = source
        self._began_ns = books.at_ns
        self._packer = source.packer(books)
        holdings = self._packer.holdings(books.held)
        self.writer = TraceWriter(
            path,
            {
                "version": VERSION,
                "pool": encodable(source.pool),
                "config": asdict(source.config),
                # A machine without a battery for its clock may start before 1970.
                "began_wall_s": max(0.0, time.time() - (now_ns - books.at_ns) / 1e9),
                "began_ns": books.at_ns,
                "reason": reason,
                "streams": list(source.streams),
                "holdings": holdings,
                "levels": level_map(books.levels),
                "newborn": books.newborn,
                "doubtful": _in_use(books) != sum(n for _, n, _ in books.held),
                "versions": program_versions(),
                **self._packer.take_tables(),
            },
        )
        self._snapshots: list[dict[str, Any]] = []

    def add_snapshot(self, snapshot: PoolSnapshot | None) -> None:
        """Keep a snapshot for the next chunk."""
        from veloxquant_mlx.telemetry.snapshot_json import pool_to_dict

        if snapshot is not None and len(self._snapshots) < MAX_SNAPSHOTS:
            at_ns = max(0, snapshot.monotonic_ns - self._began_ns)
            self._snapshots.append(snapshot_map(at_ns, pool_to_dict(snapshot)))

    def append(self, taken: Taken) -> None:
        """Write what was taken, in chunks; after lost calls, first what was held after them."""
        chunk: dict[str, Any] = {}
        samples = [s for s in taken.samples if s.at_ns >= self._began_ns]
        if taken.n_lost:
            if taken.books is None:
                return  # the pool is gone, and with it what it held
            books, entries = _before(taken, self._source)
            taken = taken._replace(entries=list(entries))
            self._packer.go_on_from(books.levels, books.n_grown)
            chunk["gap"] = {
                "lost": taken.n_lost,
                "holdings": self._packer.holdings(books.held),
                "levels": level_map(books.levels),
            }
        freed = {id(entry): what for entry, what in taken.freed}
        for entry in taken.entries:
            self._packer.add(entry, freed.get(id(entry), ()))
            if self._packer.n_rows >= CHUNK_ROWS:
                self.writer.chunk({**chunk, **self._packer.take()})
                chunk = {}
        if chunk or self._packer.n_rows or samples or self._snapshots:
            self.writer.chunk({**chunk, **self._packer.take(samples), **self._take_snapshots()})

    def _take_snapshots(self) -> dict[str, Any]:
        taken, self._snapshots = self._snapshots, []
        return {"snapshots": taken} if taken else {}

    def end(self) -> None:
        """Write the end, and close."""
        self.writer.end({**self._packer.take(), **self._take_snapshots()})


def write_ring(
    path: str | os.PathLike[str],
    source: Source,
    taken: Taken,
    snapshot: PoolSnapshot | None,
    reason: str,
) -> None:
    """Write a whole trace of what a ring holds, under a temporary name first.

    Raises:
        OSError: It cannot be written; nothing is left over.
        ImportError: The extra `trace` is not installed.
    """
    assert taken.books is not None
    refuse_special(Path(path))
    now_ns = taken.books.at_ns
    books, entries = _before(taken, source)
    part = Path(f"{os.fspath(path)}.{os.getpid()}-{threading.get_ident()}.part")
    file = None
    try:
        file = TraceFile(part, source, books, now_ns, reason)
        file.add_snapshot(snapshot)
        file.append(taken._replace(entries=list(entries)))
        file.end()
        part.replace(path)
    except BaseException:
        if file is not None:
            file.writer.abandon()
        part.unlink(missing_ok=True)
        raise


def _in_use(books: Books) -> int:
    return sum(level.managed - level.free for level in books.levels)


def _before(taken: Taken, source: Source) -> tuple[Books, Sequence[Entry]]:
    assert taken.books is not None
    size = source.config.block_size
    return rewind(taken.books, taken.entries, taken.splits, source.streams, size)


def program_versions() -> dict[str, str]:
    """Of this project, Python, and MLX if it was loaded."""
    versions = {"veloxquant": own_version(), "python": python_version()}
    for name in ("mlx", "mlx_lm"):
        if name in sys.modules:
            from importlib.metadata import PackageNotFoundError, version

            try:
                versions[name] = version(name.replace("_", "-"))
            except PackageNotFoundError:
                continue
    return versions
