"""Reader: a trace file as a `Trace`."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from veloxquant_mlx.memory.pool_config import PoolConfig
from veloxquant_mlx.telemetry.trace.calls import check_calls, size_fault
from veloxquant_mlx.telemetry.trace.columns import CODES
from veloxquant_mlx.telemetry.trace.decoding import (
    Frames,
    column,
    columns,
    integer,
    mapping,
    sequence,
    text,
)
from veloxquant_mlx.telemetry.trace.libraries import load_library
from veloxquant_mlx.telemetry.trace.schema import (
    COLUMNS,
    EXHAUSTED_OUTCOME,
    HEADER,
    HOLDING_COLUMNS,
    MAGIC,
    MAX_NAME_CHARS,
    MAX_NS,
    MAX_ROWS,
    OPERATIONS,
    RESUMED,
    SAMPLE_COLUMNS,
    VERSION,
    Header,
    Holding,
    Level,
    Opening,
    TraceError,
)
from veloxquant_mlx.telemetry.trace.trace import Gap, Samples, Snapshot, Trace

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]

__all__ = ["load_trace"]

MAX_FILE_BYTES: Final = 4 << 30


def load_trace(path: str | os.PathLike[str], *, max_rows: int = MAX_ROWS) -> Trace:
    """Read a trace file; one that was cut is read up to the cut.

    Args:
        path: The file.
        max_rows: A file with more is refused; a row takes about 110 bytes of memory.

    Raises:
        TraceError: No trace, of another format version, damaged, or not to be believed.
        OSError: The file cannot be read.
        ImportError: The extra `trace` is not installed.
    """
    path = Path(path)
    if path.stat().st_size > MAX_FILE_BYTES:
        raise TraceError(f"{path}: more than {MAX_FILE_BYTES} bytes")
    with path.open("rb") as file:
        # The first bytes alone, before the rest: a device has no size, and may never end.
        data = file.read(len(MAGIC))
        if data == MAGIC:
            data += file.read()
    try:
        return _Loading(max_rows).load(Frames(data))
    except TraceError as error:
        raise TraceError(f"{path}: {error}") from None


class _Loading:
    """What is known of a file so far."""

    def __init__(self, max_rows: int) -> None:
        self._numpy = load_library("numpy")
        self._max_rows = max_rows
        self._header: Header | None = None
        self._formats: list[str] = []
        self._owners: list[int | str] = []
        self._named = False
        self._n_owners = 0
        self._n_rows = self._n_calls = self._now = 0
        self._parts: dict[str, list[Ints]] = {name: [] for name in (*COLUMNS, "call", "at_ns")}
        self._samples: dict[str, list[Ints]] = {name: [] for name in SAMPLE_COLUMNS}
        self._snapshots: list[Snapshot] = []
        self._gaps: list[tuple[int, Gap]] = []
        self._picked: dict[int, Ints] = {}
        # Of a dump that was made because the books do not add up, that is no fault of the file.
        self._is_believed = True
        self._consistent = True

    def load(self, frames: Frames) -> Trace:
        for kind, content in frames:
            if (kind == HEADER) != (self._header is None):
                raise TraceError("a header must come first, and once")
            if kind == HEADER:
                self._read_header(content)
            else:
                self._read_chunk(content)
        if self._header is None:
            raise TraceError("the file was cut before the end of its header")
        return self._trace(self._header, cut=frames.cut)

    # -- header ---------------------------------------------------------------------------------

    def _read_header(self, raw: dict[str, Any]) -> None:
        streams = tuple(
            text(name, "a stream", 8) for name in sequence(raw.get("streams"), "streams")
        )
        if streams not in (("k", "v"), ("kv",)):
            raise TraceError(f"streams are {streams!r:.40}, must be k and v, or kv")
        try:
            config = PoolConfig(**mapping(raw.get("config"), "the config"))
        except (TypeError, ValueError) as error:
            raise TraceError(f"the config is none: {str(error)[:200]!r}") from None
        if config.separate_kv != (len(streams) == 2):
            raise TraceError("streams and config do not fit")
        integer(config.block_size, "block_size", 1)
        integer(config.n_blocks, "n_blocks")
        wall_s = raw.get("began_wall_s")
        if not isinstance(wall_s, float) or not 0 <= wall_s < 1e11:
            raise TraceError("began_wall_s must be a time in seconds")
        versions = mapping(raw.get("versions"), "versions")
        self._read_tables(raw, most=self._n_held(raw))
        self._is_believed = raw.get("reason") != "violation" and raw.get("doubtful") is not True
        self._header = Header(
            version=VERSION,
            pool=text(raw.get("pool"), "pool"),
            config=config,
            began_wall_s=wall_s,
            began_ns=integer(raw.get("began_ns"), "began_ns", 0, 1 << 63),
            reason=text(raw.get("reason"), "reason", 64),
            streams=streams,
            opening=self._opening(raw, streams, config.block_size),
            versions={name: text(value, "a version") for name, value in versions.items()},
        )

    @staticmethod
    def _n_held(raw: dict[str, Any]) -> int:
        return integer(mapping(raw.get("holdings"), "holdings").get("n"), "holdings", 0, MAX_ROWS)

    def _opening(self, raw: dict[str, Any], streams: tuple[str, ...], size: int) -> Opening:
        n = self._n_held(raw)
        held = columns(raw["holdings"], n, HOLDING_COLUMNS, "holdings")
        self._check_indexes(held, len(streams))
        rows = zip(*(held[name].tolist() for name in HOLDING_COLUMNS), strict=True)
        holdings = tuple(Holding(*row) for row in rows)
        levels = []
        for pair in sequence(raw.get("levels"), "levels"):
            free, managed = (integer(x, "a level") for x in _pair(pair))
            levels.append(Level(free, managed))
        if len(levels) != len(streams):
            raise TraceError("there must be a level a stream")
        for index, level in enumerate(levels):
            in_use = sum(h.blocks for h in holdings if h.stream == index)
            if level.free + in_use != level.managed:
                self._doubt(
                    f"the books at the beginning do not add up: stream {streams[index]!r} has "
                    f"{level.free} free and {in_use} held of {level.managed} blocks"
                )
        if len({(h.owner, h.stream, h.format) for h in holdings}) < n:
            raise TraceError("an owner is there twice at the beginning")
        if any(h.blocks < 1 or h.slack > h.blocks * size for h in holdings):
            raise TraceError("a holding at the beginning is empty, or emptier than that")
        return Opening(holdings, tuple(levels), raw.get("newborn") is True and not holdings)

    def _read_tables(self, raw: dict[str, Any], most: int) -> None:
        formats = sequence(raw.get("formats"), "formats")
        if len(formats) > most:
            raise TraceError("more formats than rows")
        self._formats += [text(name, "a format", 64) for name in formats]
        n = integer(raw.get("n_owners"), "n_owners", 0, most)
        self._n_owners += n
        names = raw.get("names")
        if self._header is None:
            self._named = names is not None
        if self._named:
            names = sequence(names, "names")
            if len(names) != n:
                raise TraceError(f"{len(names)} names of {n} owners")
            self._owners += [
                name if type(name) is int else text(name, "a name", MAX_NAME_CHARS)
                for name in names
            ]

    # -- chunks ---------------------------------------------------------------------------------

    def _read_chunk(self, raw: dict[str, Any]) -> None:
        n = integer(raw.get("n"), "rows", 0, MAX_ROWS)
        if self._n_rows + n > self._max_rows:
            raise TraceError(f"more than {self._max_rows} rows")
        if raw.get("doubtful") is True:
            self._is_believed = False
        gap = raw.get("gap")
        gap = None if gap is None else mapping(gap, "a gap")
        # A refused request has a row for keys and one for values, and one owner.
        self._read_tables(raw, most=n + (self._n_held(gap) if gap else 0))
        if gap is not None:
            self._read_gap(gap)
        found = columns(raw, n, COLUMNS, "row")
        self._check_rows(found, n)
        check_calls(found)
        for name in COLUMNS:
            self._parts[name].append(found[name])
        self._add_times(found, n)
        self._read_picks(raw.get("picks"), found["blocks"], n)
        self._read_samples(raw.get("samples"))
        self._read_snapshots(raw.get("snapshots", []))
        self._n_rows += n

    def _add_times(self, found: dict[str, Ints], n: int) -> None:
        np = self._numpy
        if not n:
            return
        # As floats: the sum of hostile ones would run over.
        if float(found["delta_ns"].sum(dtype=float)) > MAX_NS or not int(found["new_call"][0]):
            raise TraceError("rows run away with time, or begin within a call")
        at_ns = self._now + np.cumsum(found["delta_ns"])
        calls = self._n_calls - 1 + np.cumsum(found["new_call"])
        self._now, self._n_calls = int(at_ns[-1]), int(calls[-1]) + 1
        if self._now > MAX_NS:
            raise TraceError("rows run away with time")
        self._parts["at_ns"].append(at_ns)
        self._parts["call"].append(calls)

    def _check_rows(self, found: dict[str, Ints], n: int) -> None:
        assert self._header is not None
        self._check_indexes(found, len(self._header.streams))
        for name, most in (("operation", len(OPERATIONS)), ("outcome", RESUMED), ("new_call", 2)):
            if n and int(found[name].max()) >= most:
                raise TraceError(f"row {name} has a number outside of 0..{most - 1}")

    def _check_indexes(self, found: dict[str, Ints], n_streams: int) -> None:
        for name, most in (
            ("stream", n_streams),
            ("format", len(self._formats)),
            ("owner", self._n_owners),
        ):
            if len(found[name]) and int(found[name].max()) >= most:
                raise TraceError(
                    f"{name} {int(found[name].max())} is not among the {most} there are"
                )

    def _read_gap(self, raw: dict[str, Any]) -> None:
        assert self._header is not None
        opening = self._opening(raw, self._header.streams, self._header.config.block_size)
        n_lost = integer(raw.get("lost"), "lost", 1)
        self._gaps.append((self._n_rows, Gap(self._n_calls, n_lost, opening)))

    def _read_picks(self, raw: object, blocks: Ints, n: int) -> None:
        if raw is None:
            return
        picks = mapping(raw, "picks")
        counts_raw = sequence(picks.get("counts"), "picks")
        if (
            len(counts_raw) != 2
            or counts_raw[0] not in CODES
            or not isinstance(counts_raw[1], bytes)
        ):
            raise TraceError("picks counts is no column")
        n_picks = len(counts_raw[1]) // CODES[counts_raw[0]]
        counts = column(counts_raw, n_picks, "picks counts", 1)
        rows = column(picks.get("rows"), n_picks, "picks rows", 0, max(0, n - 1))
        total = int(counts.sum()) if n_picks and int(counts.max()) < MAX_ROWS else n_picks and -1
        if total < 0 or (blocks[rows] != counts).any():
            raise TraceError("picks do not fit their rows")
        ids = column(picks.get("ids"), total, "picks ids")
        ends = self._numpy.cumsum(counts)
        for row, count, end in zip(rows.tolist(), counts.tolist(), ends.tolist(), strict=True):
            self._picked[self._n_rows + row] = ids[end - count : end]

    def _read_samples(self, raw: object) -> None:
        if raw is None:
            return
        samples = mapping(raw, "samples")
        n = integer(samples.get("n"), "samples", 0, MAX_ROWS)
        found = {
            name: column(samples.get(name), n, f"sample {name}", 0, MAX_NS)
            for name in SAMPLE_COLUMNS
        }
        if n and int(found["operation"].max()) >= len(OPERATIONS):
            raise TraceError("a sample is of no operation")
        for name in SAMPLE_COLUMNS:
            self._samples[name].append(found[name])

    def _read_snapshots(self, raw: object) -> None:
        for one in sequence(raw, "snapshots"):
            snapshot = mapping(one, "a snapshot")
            at_ns = integer(snapshot.get("at_ns"), "a snapshot's time", 0, MAX_NS)
            document = mapping(snapshot.get("pool"), "a snapshot")
            pool = mapping(document.get("snapshot"), "a snapshot")
            self._snapshots.append(Snapshot(at_ns, pool, document))

    def _doubt(self, what: str) -> None:
        """Note that the books do not add up, which is an error where it was not to be expected."""
        self._consistent = False
        if self._is_believed:
            raise TraceError(what)

    # -- all of it ------------------------------------------------------------------------------

    def _trace(self, header: Header, *, cut: bool) -> Trace:
        found = {name: self._joined(parts) for name, parts in self._parts.items()}
        del found["delta_ns"], found["new_call"]
        gaps: tuple[Gap, ...] = tuple(gap for _, gap in self._gaps)
        picked = self._picked
        if self._gaps:
            from veloxquant_mlx.telemetry.trace.resuming import resume

            found, picked, gaps = resume(header, found, picked, self._gaps)
        free, managed = self._levels(header, found)
        self._check_holdings(header, found)
        fault = size_fault(found, header.config.block_size)
        if fault is not None:
            self._doubt(fault)
        return Trace(
            header=header,
            formats=tuple(self._formats),
            owners=tuple(self._owners),
            n_owners=self._n_owners,
            free_after=free,
            managed_after=managed,
            samples=Samples(**{name: self._joined(p) for name, p in self._samples.items()}),
            snapshots=tuple(self._snapshots),
            gaps=gaps,
            cut=cut,
            n_lost=sum(gap.n_lost for gap in gaps),
            consistent=self._consistent,
            picked=picked,
            **found,
        )

    def _joined(self, parts: Iterable[Ints]) -> Ints:
        np = self._numpy
        parts = list(parts)
        joined: Ints = np.concatenate(parts) if parts else np.empty(0, np.int64)
        return joined

    def _levels(self, header: Header, found: dict[str, Ints]) -> tuple[Ints, Ints]:
        """Free and managed blocks after each row, from the opening on."""
        np = self._numpy
        blocks = np.where(found["outcome"] == EXHAUSTED_OUTCOME, 0, found["blocks"])
        gives = (found["operation"] == 1) | (found["operation"] == 2)
        shrinks = found["operation"] == 3
        moved = np.where(gives, blocks, -blocks) + found["growth"]
        resized = found["growth"] - np.where(shrinks, blocks, 0)
        free, managed = np.empty_like(blocks), np.empty_like(blocks)
        for stream, level in enumerate(header.opening.levels):
            rows = np.flatnonzero(found["stream"] == stream)
            free[rows] = level.free + np.cumsum(moved[rows])
            managed[rows] = level.managed + np.cumsum(resized[rows])
            wrong = rows[(free[rows] < 0) | (free[rows] > managed[rows])]
            if len(wrong):
                call = int(found["call"][wrong[0]])
                self._doubt(
                    f"the books do not add up at call {call}: stream {header.streams[stream]!r} "
                    f"would have {int(free[wrong[0]])} free blocks"
                )
        return free, managed

    def _check_holdings(self, header: Header, found: dict[str, Ints]) -> None:
        """No owner gives back more than it holds, and `free_all` all of it."""
        np = self._numpy
        opening = np.array(
            [(h.owner, h.stream, h.format, h.blocks) for h in header.opening.holdings], np.int64
        ).reshape(-1, 4)
        kept = np.flatnonzero(
            (found["outcome"] != EXHAUSTED_OUTCOME)
            & (found["operation"] != 3)
            & (found["blocks"] > 0)
        )
        n_opening = len(opening)
        key = [
            np.concatenate([opening[:, index], found[name][kept]])
            for index, name in enumerate(("owner", "stream", "format"))
        ]
        gives = np.isin(found["operation"][kept], (1, 2))
        moved = np.where(gives, -found["blocks"][kept], found["blocks"][kept])
        order = np.lexsort(key[::-1])
        total = np.cumsum(np.concatenate([opening[:, 3], moved])[order])
        first = np.zeros(len(order), bool)
        first[:1] = True
        for column_of in key:
            first[1:] |= np.diff(column_of[order]) != 0
        before = np.concatenate([np.zeros(min(1, len(total)), np.int64), total[:-1]])
        held = total - before[np.maximum.accumulate(np.where(first, np.arange(len(order)), 0))]
        rows = np.concatenate([np.full(n_opening, -1), kept])[order]
        ends = np.concatenate([np.zeros(n_opening, bool), found["operation"][kept] == 2])[order]
        nobody = np.flatnonzero((key[0][order] < 0) & (rows >= 0))
        wrong = np.flatnonzero((held < 0) | (ends & (held != 0)))
        for which, what in (
            (nobody, "blocks move for no owner"),
            (wrong, "an owner gives back other blocks than it holds"),
        ):
            if len(which):
                call = int(found["call"][rows[which].min()])
                self._doubt(f"the books do not add up at call {call}: {what}")


def _pair(value: object) -> list[Any]:
    pair = sequence(value, "a level")
    if len(pair) != 2:
        raise TraceError("a level is two numbers")
    return pair
