"""Driver: does the calls of a trace on a real allocator, one by one, under this or another config."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from veloxquant_exporters.replay.opening import bounded, opening_pool, refuse_giants
from veloxquant_mlx.memory.block_pool import BlockPoolAllocator, BlockPoolExhaustedError
from veloxquant_mlx.telemetry.trace.schema import (
    ALLOCATE_OP,
    EXHAUSTED_OUTCOME,
    FREE_ALL_OP,
    FREE_OP,
    RESUMED,
    SHRINK_OP,
)

if TYPE_CHECKING:
    from veloxquant_mlx.memory.block import Block
    from veloxquant_mlx.memory.pool_config import PoolConfig
    from veloxquant_mlx.telemetry.trace import Trace

__all__ = ["Driver", "Moved", "Outcome", "Share"]

Outcome = Literal["ok", "exhausted", "admitted", "ignored"]
NOBODY: Final = -1
WINDOW: Final = 8192
Key = tuple[int, int, int]


class Share(NamedTuple):
    """Blocks that moved, of one owner. A tuple, as a frozen dataclass takes three times as long.

    Attributes:
        owner: Number in the trace.
        stream: Index into the trace's `header.streams`; the blocks know the pool's own stream.
        format: Index into the trace's `formats`.
        blocks: The blocks, in the order in which they moved.
    """

    owner: int
    stream: int
    format: int
    blocks: list[Block]

    @property
    def ids(self) -> list[int]:
        """Ids of the blocks."""
        return [block.block_id for block in self.blocks]


class Moved(NamedTuple):
    """What a call came to.

    Attributes:
        call: Its number; -1 of the opening.
        outcome: "ok"; "exhausted", refused; "admitted", refused in the recording but not here;
            "ignored", a later call of an owner that was rejected.
        taken: Blocks handed out.
        freed: Blocks given back, also those of an owner that is rejected now.
        retired: Blocks that a shrink took out.
    """

    call: int
    outcome: Outcome = "ok"
    taken: tuple[Share, ...] = ()
    freed: tuple[Share, ...] = ()
    retired: int = 0


class _Row(NamedTuple):
    owner: int
    stream: int
    format: int
    blocks: int
    tokens: int
    growth: int
    outcome: int

    @property
    def key(self) -> Key:
        return self[:3]


class Driver:
    """Drives a pool through a trace.

    Under the recorded config every call does what it did. Under another one the program is taken to
    ask for the same tokens in the same calls, and:

    - An allocation that finds no room there rejects its owner: what it holds is freed, its later
      calls are ignored. With `on_exhaustion="skip"` it goes on with what it has.
    - One that was refused in the recording but finds room is "admitted" and given back at once, as
      the trace does not tell how the request would have gone on.
    - A `free` of single blocks gives back as many tokens, from the same end.

    Args:
        trace: Loaded by `load_trace`.
        config: Another config; None takes the recorded one, as the pool was at the beginning.
        on_exhaustion: "reject" or "skip".
        make: What makes the pool: the allocator, or another one with its methods.

    Raises:
        TraceError: The trace needs more blocks than can be replayed.

    Attributes:
        pool: The allocator.
        opening: What was taken to begin with.
        rejected: Owners that were rejected.
    """

    def __init__(
        self,
        trace: Trace,
        config: PoolConfig | None = None,
        *,
        on_exhaustion: Literal["reject", "skip"] = "reject",
        make: Callable[[PoolConfig], BlockPoolAllocator] = BlockPoolAllocator,
    ) -> None:
        refuse_giants(trace, config or trace.header.config)
        self.trace = trace
        self.pool = opening_pool(trace, make) if config is None else make(bounded(config))
        self.rejected: set[int] = set()
        self._rejects = on_exhaustion == "reject"
        self._size = trace.header.config.block_size
        self._scales = self.pool.config.block_size != self._size
        self._held: dict[Key, list[Block]] = {}
        # Blocks that the recorded pool held out, where block sizes differ.
        self._n_recorded: dict[Key, int] = {}
        self._by_owner: dict[int, dict[Key, None]] = {}
        self._streams = self._stream_names()
        self._starts: list[int] = trace.first_row.tolist()
        self._operations: list[int] = trace.operation.tolist()
        # One object a number and a format, by which the pool's fast path knows them again.
        self._owners = list(range(trace.n_owners))
        self._formats = [sys.intern(fmt) for fmt in trace.formats]
        self._window: list[_Row] = []
        self._window_at = 0
        self._pick_at: dict[int, int] | None = None
        self.opening = self._open()

    def _stream_names(self) -> tuple[str, ...]:
        recorded = self.trace.header.streams
        if len(recorded) == 1 and self.pool.config.separate_kv:
            return ("",)  # chosen call by call
        return recorded

    # -- for callers ----------------------------------------------------------------------------

    @property
    def n_calls(self) -> int:
        """Calls in the trace."""
        return len(self._starts) - 1

    def step(self, call: int) -> Moved:
        """Do call number `call`; calls are to be done in order, each once.

        Raises:
            IndexError: There is no such call.
        """
        if not 0 <= call < self.n_calls:
            raise IndexError(f"call must be in 0..{self.n_calls - 1}, got {call}")
        begin, end = self._starts[call], self._starts[call + 1]
        rows = self._rows(begin, end)
        if rows[0].outcome == RESUMED:
            return self._resume(call, begin, rows)
        operation = self._operations[begin]
        if rows[0].owner in self.rejected:
            return Moved(call, "ignored")
        if operation == ALLOCATE_OP:
            return self._allocate(call, rows)
        if operation == FREE_OP:
            return self._free(call, begin, rows)
        if operation == FREE_ALL_OP:
            return Moved(call, freed=self._free_all(rows[0].owner))
        return Moved(call, retired=sum(self._shrink(row.stream, row.blocks) for row in rows))

    def _rows(self, begin: int, end: int) -> list[_Row]:
        """Rows of the trace as tuples; made some thousand at once, a third of their time one by one."""
        at = self._window_at
        if begin < at or end > at + len(self._window):
            self._window_at = at = begin
            until = max(end, begin + WINDOW)
            owner, *others = [getattr(self.trace, name)[begin:until] for name in _Row._fields]
            owners = [self._owners[n] if n >= 0 else NOBODY for n in owner.tolist()]
            columns = [column.tolist() for column in others]
            self._window = list(map(_Row._make, zip(owners, *columns, strict=True)))
        return self._window[begin - at : end - at]

    def run(self) -> Iterator[Moved]:
        """Every call, one after another; the opening is done by then."""
        for call in range(self.n_calls):
            yield self.step(call)

    def held(self, owner: int) -> dict[tuple[int, int], list[Block]]:
        """Blocks of an owner by stream and format, in the order of allocation; not to be changed."""
        keys = self._by_owner.get(owner, {})
        return {key[1:]: self._held[key] for key in keys if self._held[key]}

    # -- allocate -------------------------------------------------------------------------------

    def _open(self) -> Moved:
        shares: list[Share] = []
        for h in self.trace.header.opening.holdings:
            row = _Row(
                self._owners[h.owner], h.stream, h.format, h.blocks, h.blocks * self._size, 0, 0
            )
            if h.owner in self.rejected:
                continue
            moved = self._allocate(-1, [row])
            if moved.outcome == "ok":
                shares += moved.taken
                self.pool.add_filled(-h.slack, moved.taken[-1].blocks[0].lease)
        kept = tuple(share for share in shares if share.owner not in self.rejected)
        return Moved(-1, taken=kept)

    def _allocate(self, call: int, rows: Sequence[_Row]) -> Moved:
        first = rows[0]
        refused = first.outcome == EXHAUSTED_OUTCOME
        try:
            taken = self._take(rows)
        except BlockPoolExhaustedError:
            if refused or not self._rejects:
                return Moved(call, "exhausted")
            freed = self._free_all(first.owner)
            self.rejected.add(first.owner)
            return Moved(call, "exhausted", freed=freed)
        if refused:
            self.pool.free([block for blocks in taken for block in blocks])
            return Moved(call, "admitted")
        return Moved(call, taken=self._keep(rows, taken))

    def _take(self, rows: Sequence[_Row]) -> list[list[Block]]:
        first = rows[0]
        tokens = first.tokens if first.tokens > 0 else first.blocks * self._size
        fmt = self._formats[first.format]
        if len(rows) == 2:
            return list(self.pool.allocate_kv(tokens, first.owner, fmt))
        return [self.pool.allocate(self._stream_of(first), tokens, first.owner, fmt)]

    def _stream_of(self, row: _Row) -> str:
        """The pool's stream; a unified pool did not tell, so keys and values take turns."""
        name = self._streams[row.stream]
        if name:
            return name
        held = self._held.get(row.key, [])
        return "v" if held and held[-1].stream == "k" else "k"

    def _keep(self, rows: Sequence[_Row], taken: list[list[Block]]) -> tuple[Share, ...]:
        shares = []
        for row, blocks in zip(rows, taken, strict=True):
            key = row[:3]
            held = self._held.get(key)
            if held is None:
                held = self._held[key] = []
                self._n_recorded[key] = 0
                self._by_owner.setdefault(row.owner, {})[key] = None
            held += blocks
            self._n_recorded[key] += row.blocks
            shares.append(Share(*key, blocks))
        return tuple(shares)

    # -- free -----------------------------------------------------------------------------------

    def _free(self, call: int, begin: int, rows: Sequence[_Row]) -> Moved:
        shares = []
        for at, row in enumerate(rows):
            if row.owner in self.rejected:
                continue
            blocks = self._picked(begin + at, row)
            shares.append(Share(row.owner, row.stream, row.format, blocks))
        gone = [block for share in shares for block in share.blocks]
        if gone:
            self.pool.free(gone)
        return Moved(call, freed=tuple(shares))

    def _picked(self, row_number: int, row: _Row) -> list[Block]:
        """The blocks to give back, off the list of the owner."""
        held = self._held.get(row.key, [])
        n_recorded = self._n_recorded.get(row.key, 0)
        self._n_recorded[row.key] = left = max(0, n_recorded - row.blocks)
        places = self._positions(row_number)
        if self._scales or len(held) != n_recorded:
            n = max(0, len(held) - self._scaled(left))
            from_front = bool(places) and places[0] == 0 and left > 0
            places = list(range(n) if from_front else range(len(held) - n, len(held)))
        blocks = [held[place] for place in places]
        n = len(places)
        if places == list(range(len(held) - n, len(held))):
            del held[len(held) - n :]
        else:
            gone = set(places)
            held[:] = [block for place, block in enumerate(held) if place not in gone]
        return blocks

    def _scaled(self, n_blocks: int) -> int:
        return -(-n_blocks * self._size // self.pool.config.block_size)

    def _positions(self, row: int) -> list[int]:
        picks = self.trace.picks
        if self._pick_at is None:
            self._pick_at = {at: index for index, at in enumerate(picks.rows.tolist())}
        index = self._pick_at[row]
        begin, end = int(picks.offsets[index]), int(picks.offsets[index + 1])
        places: list[int] = picks.positions[begin:end].tolist()
        return places

    def _free_all(self, owner: int) -> tuple[Share, ...]:
        freed = []
        for key in self._by_owner.pop(owner, {}):
            self._n_recorded.pop(key, None)
            blocks = self._held.pop(key, [])
            if blocks:
                freed.append(Share(*key, blocks))
        self.pool.free_all(owner)
        return tuple(freed)

    # -- shrink, and what was lost --------------------------------------------------------------

    def _shrink(self, stream: int, n_blocks: int) -> int:
        n = self._scaled(n_blocks) if self._scales else n_blocks
        names = [self._streams[stream]] if self._streams[stream] else ["k", "v"]
        shares = [n - n // len(names) * (len(names) - 1), *[n // len(names)] * (len(names) - 1)]
        return sum(
            self.pool.shrink(name, max(0, self.pool.n_free(name) - share))
            for name, share in zip(names, shares, strict=True)
        )

    def _resume(self, call: int, begin: int, rows: Sequence[_Row]) -> Moved:
        """The made-up rows that stand for calls which were lost."""
        taken: list[Share] = []
        freed: list[Share] = []
        retired = 0
        outcome: Outcome = "ok"
        for at, row in enumerate(rows):
            operation = self._operations[begin + at]
            if operation == SHRINK_OP:
                retired += self._shrink(row.stream, row.blocks)
            elif row.owner == NOBODY:
                self._grow(row)
            elif row.owner not in self.rejected:
                if operation == ALLOCATE_OP:
                    moved = self._allocate(call, [row])
                    outcome = "exhausted" if moved.outcome == "exhausted" else outcome
                else:
                    moved = self._free(call, begin + at, [row])
                taken += moved.taken
                freed += moved.freed
        return Moved(call, outcome, tuple(taken), tuple(freed), retired)

    def _grow(self, row: _Row) -> None:
        """Grow a stream as the recorded pool did: by taking more than is free, and giving it back."""
        if self._scales or not self._streams[row.stream]:
            return
        name, pool = self._streams[row.stream], self.pool
        try:
            pool.allocate(name, (pool.n_free(name) + row.growth) * self._size, NOBODY)
        except BlockPoolExhaustedError:
            return
        pool.free_all(NOBODY)
