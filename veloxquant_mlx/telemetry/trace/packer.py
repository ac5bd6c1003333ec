"""Packer: journal entries as rows, and rows as the maps of a trace file's chunks.

Runs outside the pool's lock. It follows what each stream has free, and numbers the owners: a number
is one life of an owner, from its first block to its last, so that what is kept of them is bounded by
those that are alive.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from veloxquant_mlx.memory.journal import ALLOCATE, EXHAUSTED, FREE, FREE_ALL, SHRINK
from veloxquant_mlx.telemetry.trace.columns import pack_columns
from veloxquant_mlx.telemetry.trace.schema import (
    ALLOCATE_OP,
    COLUMNS,
    EXHAUSTED_OUTCOME,
    FREE_ALL_OP,
    FREE_OP,
    HOLDING_COLUMNS,
    MAX_COUNT,
    MAX_NAME_CHARS,
    OK,
    SAMPLE_COLUMNS,
    SHRINK_OP,
    Level,
)

if TYPE_CHECKING:
    from veloxquant_mlx.memory.journal import Entry, Part
    from veloxquant_mlx.memory.lease import Lease, Owner

__all__ = ["Packer", "Sampled"]

OPERATION_OF: Final = {
    ALLOCATE: ALLOCATE_OP,
    EXHAUSTED: ALLOCATE_OP,
    FREE: FREE_OP,
    FREE_ALL: FREE_ALL_OP,
    SHRINK: SHRINK_OP,
}
# Owners that were refused and hold nothing, for whom a number is kept in case they ask again.
MAX_REFUSED: Final = 1024


class Sampled(NamedTuple):
    """A call that was timed: when it ended, its operation, its blocks, and how long it took."""

    at_ns: int
    operation: int
    blocks: int
    took_ns: int


class Packer:
    """Turns entries into rows. Not thread-safe.

    Args:
        block_size: Token slots a block.
        streams: Names of the streams.
        levels: What is free and managed before the first entry.
        n_grown: Blocks that the pool had grown by before it.
        began_ns: The clock at the beginning.
        names: Whether owner ids are kept.
    """

    def __init__(
        self,
        block_size: int,
        streams: Sequence[str],
        levels: Sequence[Level],
        n_grown: int,
        began_ns: int,
        *,
        names: bool,
    ) -> None:
        self._size = block_size
        self._streams = {name: index for index, name in enumerate(streams)}
        self._free = [level.free for level in levels]
        self._n_grown = n_grown
        self._began_ns = self._now = began_ns
        self._keep_names = names
        self._formats: dict[str, int] = {}
        self._alive: dict[Owner, list[int]] = {}  # number, blocks held
        self._refused: OrderedDict[Owner, list[int]] = OrderedDict()
        self._n_owners = 0
        # Blocks taken and given, and retired, in all, by the newest entry.
        self._sums: tuple[int, int] | None = None
        self.doubtful = False  # whether an entry is missing that nobody counted
        self._empty()

    def _empty(self) -> None:
        self._rows: list[tuple[int, ...]] = []
        self._new_formats: list[str] = []
        self._new_names: list[Owner] = []
        self._n_owners_before = self._n_owners
        self._picked: list[tuple[int, array[int]]] = []

    @property
    def n_rows(self) -> int:
        """Rows since the last `take`."""
        return len(self._rows)

    @property
    def n_grown(self) -> int:
        """Blocks that the pool had grown by after the newest entry."""
        return self._n_grown

    # -- what is held ---------------------------------------------------------------------------

    def holdings(self, held: Sequence[tuple[Lease, int, int]]) -> dict[str, object]:
        """The map of (lease, blocks, slack) each; who is not among them is not alive any more."""
        columns: dict[str, list[int]] = {name: [] for name in HOLDING_COLUMNS}
        before, self._alive = self._alive, {}
        for lease, blocks, slack in held:
            record = self._alive.get(lease._owner) or before.get(lease._owner)
            if record is None:
                record = self._numbered(lease._owner)
            if lease._owner not in self._alive:
                self._alive[lease._owner] = record
                record[1] = 0
            record[1] += blocks
            columns["owner"].append(record[0])
            columns["stream"].append(self._streams[lease._stream.name])
            columns["format"].append(self._format(lease._format))
            columns["blocks"].append(blocks)
            columns["slack"].append(max(0, min(slack, blocks * self._size, MAX_COUNT)))
        return {"n": len(held), **pack_columns(HOLDING_COLUMNS, columns)}

    def go_on_from(self, levels: Sequence[Level], n_grown: int) -> None:
        """Take these levels for granted: calls before the next entry were lost."""
        self._sums = None
        self._free = [level.free for level in levels]
        self._n_grown = n_grown

    def _numbered(self, owner: Owner) -> list[int]:
        record = [self._n_owners, 0]
        self._n_owners += 1
        if self._keep_names:
            self._new_names.append(_shortened(owner))
        return record

    def _format(self, name: str) -> int:
        found = self._formats.get(name)
        if found is None:
            found = self._formats[name] = len(self._formats)
            self._new_formats.append(encodable(name))
        return found

    # -- rows -----------------------------------------------------------------------------------

    def add(self, entry: Entry, fills: tuple[int, ...] = ()) -> None:
        """Append the rows of one entry; `fills` tells of each part of a `free` the filled slots."""
        at_ns, operation, what, n, n_tokens, taken, counts = entry
        parts: tuple[Part, ...] = what if isinstance(what, tuple) else ((what, n, None),)
        before, sums = self._sums, (taken + counts[0], counts[4].n_retired)
        retired = n if operation == SHRINK else 0
        self._sums = sums
        if before is not None and sums != (before[0] + n - retired, before[1] + retired):
            self.doubtful = True  # a Ctrl-C struck between the change and its entry
        if operation == EXHAUSTED:
            self._add_refused(at_ns, parts, n_tokens)
            return
        n_grown = counts[4].n_grown
        grown, self._n_grown = n_grown - self._n_grown, n_grown
        code, fresh = OPERATION_OF[operation], 1
        for index, (lease, blocks, run) in enumerate(parts):
            stream, fmt = self._streams[lease._stream.name], self._formats.get(lease._format)
            if fmt is None:
                fmt = self._format(lease._format)
            owner, growth, tokens = -1, 0, -1
            if operation == ALLOCATE:
                if grown:
                    last = index == len(parts) - 1
                    growth = max(grown, 0) if last else self._lacked(stream, blocks, grown)
                    grown -= growth
                self._free[stream] += growth - blocks
                owner, tokens = self._took(lease, blocks), min(n_tokens, MAX_COUNT)
            elif operation == SHRINK:
                self._free[stream] -= blocks
            else:
                self._free[stream] += blocks
                owner = self._gave(lease, blocks)
                tokens = self._tokens_of(operation, lease, blocks, run, fills[index : index + 1])
            self._row(at_ns, (fresh, code, OK, stream, fmt, owner, blocks, tokens), growth)
            fresh = 0

    def _row(self, at_ns: int, values: tuple[int, ...], growth: int) -> None:
        delta = at_ns - self._now
        if delta < 0:
            delta = 0
        self._now += delta
        self._rows.append((delta, *values, growth))

    def _lacked(self, stream: int, blocks: int, grown: int) -> int:
        return max(0, min(grown, blocks - self._free[stream]))

    def _add_refused(self, at_ns: int, parts: tuple[Part, ...], n_tokens: int) -> None:
        n = -(-n_tokens // self._size)
        asked, tokens = min(n, MAX_COUNT), min(n_tokens, MAX_COUNT)
        fresh = 1
        for lease, blocks, _ in parts:
            # Keys and values that a unified pool could not give are one part of twice the blocks.
            for _ in range(2 if blocks == 2 * n else 1):
                owner = self._known(lease._owner)
                stream, fmt = self._streams[lease._stream.name], self._format(lease._format)
                values = (fresh, ALLOCATE_OP, EXHAUSTED_OUTCOME, stream, fmt, owner, asked, tokens)
                self._row(at_ns, values, 0)
                fresh = 0

    def _took(self, lease: Lease, blocks: int) -> int:
        owner = lease._owner
        record = self._alive.get(owner)
        if record is None:
            record = self._refused.pop(owner, None) or self._numbered(owner)
            self._alive[owner] = record
        record[1] += blocks
        return record[0]

    def _gave(self, lease: Lease, blocks: int) -> int:
        owner = lease._owner
        record = self._alive.get(owner)
        if record is None:
            return self._numbered(owner)[0]
        record[1] -= blocks
        if record[1] <= 0:
            del self._alive[owner]
        return record[0]

    def _known(self, owner: Owner) -> int:
        record = self._alive.get(owner) or self._refused.get(owner)
        if record is None:
            record = self._refused[owner] = self._numbered(owner)
            if len(self._refused) > MAX_REFUSED:
                self._refused.popitem(last=False)
        return record[0]

    def _tokens_of(
        self, operation: int, lease: Lease, blocks: int, run: Any, fill: tuple[int, ...]
    ) -> int:
        """Filled slots of what was given back, noting which blocks these were."""
        if operation == FREE_ALL:
            return min(max(0, blocks * self._size - lease._slack), MAX_COUNT)
        ids = array("q", [block._id for block in run or ()])
        if len(ids) == blocks:  # otherwise they were too many to be remembered
            self._picked.append((self.n_rows, ids))
        return min(fill[0], MAX_COUNT) if fill else -1

    # -- chunks ---------------------------------------------------------------------------------

    def take(self, samples: Sequence[Sampled] = ()) -> dict[str, Any]:
        """The map of a chunk with all that was added since the last one."""
        fields = zip(*self._rows, strict=True) if self._rows else ((),) * len(COLUMNS)
        columns: dict[str, Sequence[int]] = dict(zip(COLUMNS, fields, strict=True))
        chunk: dict[str, Any] = {"n": self.n_rows, **pack_columns(COLUMNS, columns)}
        if self._picked:
            chunk["picks"] = pack_columns(
                ("rows", "counts", "ids"),
                {
                    "rows": [row for row, _ in self._picked],
                    "counts": [len(ids) for _, ids in self._picked],
                    "ids": [block_id for _, ids in self._picked for block_id in ids],
                },
            )
        if samples:
            columns = dict(zip(SAMPLE_COLUMNS, zip(*samples, strict=True), strict=True))
            columns["at_ns"] = [max(0, at - self._began_ns) for at in columns["at_ns"]]
            chunk["samples"] = {"n": len(samples), **pack_columns(SAMPLE_COLUMNS, columns)}
        if self.doubtful:
            chunk["doubtful"] = True
        return {**chunk, **self.take_tables()}

    def take_tables(self) -> dict[str, Any]:
        """What was said of owners and formats since the last time, for the map of a header."""
        tables: dict[str, Any] = {
            "n_owners": self._n_owners - self._n_owners_before,
            "formats": self._new_formats,
        }
        if self._keep_names:
            tables["names"] = self._new_names
        self._empty()
        return tables


def _shortened(owner: Owner) -> Owner:
    """An owner id as a file may hold it."""
    if isinstance(owner, int):
        return owner if -(1 << 63) <= owner < 1 << 63 else str(owner)[:MAX_NAME_CHARS]
    return encodable(owner[:MAX_NAME_CHARS])


def encodable(text: str) -> str:
    """`text` as a file can hold it: what no UTF-8 has, such as half a surrogate pair, would fail it."""
    return text.encode(errors="replace").decode()


def level_map(levels: Sequence[Level]) -> list[list[int]]:
    """Levels as a file has them."""
    return [[max(0, level.free), max(0, level.managed)] for level in levels]


def snapshot_map(at_ns: int, snapshot: Mapping[str, Any]) -> dict[str, Any]:
    """A pool's snapshot as a chunk has it."""
    return {"at_ns": at_ns, "pool": dict(snapshot)}
