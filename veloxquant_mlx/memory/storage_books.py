"""StorageBooks: the bytes of a block storage by kind, as plain ints. Needs no MLX.

A storage is not told when blocks are freed (the pool releases an owner in constant time, without
visiting its blocks), so "in use" is settled when it is asked for: first the leases that ended,
then the blocks that left a lease which goes on. Each asking does a bounded amount of that work.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

from veloxquant_mlx.memory.storage_format import STORAGE_FORMATS

if TYPE_CHECKING:
    from veloxquant_mlx.memory.block import Block, Lease
    from veloxquant_mlx.memory.storage_format import StorageFormat

__all__ = ["Buffer", "StorageBooks", "StorageUsage"]

# Checks of each kind when somebody asks: some 0.1 ms, whatever the number of blocks and owners.
SETTLE_ASKED: Final = 1024
# Checks that each new buffer pays for, so that the watch lists stay in proportion unasked.
SETTLE_MADE: Final = 2

_Watched = TypeVar("_Watched")


@dataclass(frozen=True, slots=True)
class StorageUsage:
    """Bytes of one storage at one moment. ``in_use + free_cached == resident`` always holds.

    Attributes:
        n_buffers: Buffers held, one a block id.
        resident_bytes: Sum of the buffers' sizes. MLX arrays are lazy: a buffer takes memory when
            it is evaluated, so this is what they take at most.
        written_bytes: Those of them that rows were written to: memory now, or as soon as the caller
            evaluates. The rest was only asked for with `buffer_for`.
        evaluated_bytes: Those of them that `MLXBlockStorage.evaluate` evaluated: memory for sure.
            What callers evaluate themselves cannot be seen without touching the arrays.
        in_use_bytes: Buffers of blocks that are held under the lease that made them. A release of
            a whole lease is seen at once up to 1,024 leases; blocks freed singly, or more leases,
            may be counted here for a few more readings.
        free_cached_bytes: Buffers of free blocks, kept until the block comes to a new holder.
        retired_bytes: Buffers of retired ids that someone outside still refers to; not in
            `resident_bytes`. 0 when all is well.
        logical_bytes: What the rows written to blocks in use would take, packed at the bits of
            their format.
        fp16_equivalent_bytes: What the buffers would take if all were fp16.
        pending_writes: Writes since `MLXBlockStorage.evaluate`: each may hold its values in memory
            until its buffer is evaluated.
        bytes_by_format: `resident_bytes` by format; every known format is there.
    """

    n_buffers: int
    resident_bytes: int
    written_bytes: int
    evaluated_bytes: int
    in_use_bytes: int
    free_cached_bytes: int
    retired_bytes: int
    logical_bytes: int
    fp16_equivalent_bytes: int
    pending_writes: int
    bytes_by_format: Mapping[str, int]


class Buffer:
    """The array of one block under one lease, and what is known of it.

    A block that comes to a new holder gets a new Buffer with a new array: who kept the old array
    never sees the new holder's rows, and a lazy graph left by a thread that ended dies with it.
    """

    __slots__ = ("array", "block", "evaluated", "holding", "lease", "nbytes", "rows", "spec")

    def __init__(
        self, block: Block, lease: Lease, spec: StorageFormat, array: Any, nbytes: int
    ) -> None:
        self.block = block
        self.lease = lease
        self.spec = spec
        self.array = array
        self.nbytes = nbytes
        self.rows = 0  # one past the last row written
        self.evaluated = False
        self.holding: _Holding | None = None  # while it counts as in use


class _Holding:
    """Sums over the buffers of one lease, so that its end is one subtraction."""

    __slots__ = ("counted", "lease", "logical_bits", "n_buffers", "nbytes")

    def __init__(self, lease: Lease) -> None:
        self.lease = lease
        self.counted = True
        self.n_buffers = 0
        self.nbytes = 0
        self.logical_bits = 0


class StorageBooks:
    """Byte counts of one storage.

    Every method is called under the storage's lock; single ints may be read by any thread.
    """

    __slots__ = (
        "_buffers",
        "_head_dim",
        "_holdings",
        "_leases",
        "by_format",
        "evaluated",
        "in_use",
        "logical_bits",
        "n_buffers",
        "resident",
        "written",
    )

    def __init__(self, head_dim: int) -> None:
        self._head_dim = head_dim
        self._clear()

    def _clear(self) -> None:
        self._holdings: dict[Lease, _Holding] = {}
        self._leases: deque[_Holding] = deque()  # watched for their end
        self._buffers: deque[Buffer] = deque()  # watched for leaving a lease that goes on
        self.n_buffers = 0
        self.resident = 0
        self.written = 0
        self.evaluated = 0
        self.in_use = 0
        self.logical_bits = 0
        self.by_format = dict.fromkeys(STORAGE_FORMATS, 0)

    def swap(self, old: Buffer | None, new: Buffer | None) -> None:
        """Count `new`, just made and without rows, in the place of `old`."""
        nbytes = 0
        if old is not None:
            nbytes -= old.nbytes
            self.by_format[old.spec.name] -= old.nbytes
            self.written -= old.nbytes if old.rows else 0
            self.evaluated -= old.nbytes if old.evaluated else 0
            self._leave(old)
        if new is not None:
            nbytes += new.nbytes
            self.by_format[new.spec.name] += new.nbytes
            self.enter(new)
            self.settle(SETTLE_MADE)
        self.n_buffers += (new is not None) - (old is not None)
        # One step, so that a reader without the lock sees no dip.
        self.resident += nbytes

    def enter(self, buffer: Buffer) -> None:
        """Count `buffer` as in use, where it is not: its lease is live and holds its block."""
        if buffer.holding is not None:
            return
        bits = buffer.rows * self._head_dim * buffer.spec.bits
        holding = self._holdings.get(buffer.lease)
        if holding is None:
            holding = self._holdings[buffer.lease] = _Holding(buffer.lease)
            self._leases.append(holding)
        buffer.holding = holding
        holding.n_buffers += 1
        holding.nbytes += buffer.nbytes
        holding.logical_bits += bits
        if holding.counted:
            self.in_use += buffer.nbytes
            self.logical_bits += bits
        self._buffers.append(buffer)

    def note_rows(self, buffer: Buffer, end: int) -> None:
        """Rows of `buffer` were written, the last of them just before `end`."""
        if end <= buffer.rows:
            return
        if buffer.rows == 0:
            self.written += buffer.nbytes
        bits = (end - buffer.rows) * self._head_dim * buffer.spec.bits
        buffer.rows = end
        if buffer.holding is not None:
            buffer.holding.logical_bits += bits
            self.logical_bits += bits if buffer.holding.counted else 0

    def note_evaluated(self, buffer: Buffer) -> None:
        """`buffer` takes memory from now on."""
        if not buffer.evaluated:
            buffer.evaluated = True
            self.evaluated += buffer.nbytes

    def settle(self, budget: int) -> None:
        """Look for buffers that are in use no more; at most `budget` checks of each kind."""
        _sift(self._leases, self._goes_on, budget)
        _sift(self._buffers, self._stays, budget)

    def recount(self, buffers: Iterable[Buffer]) -> None:
        """Count anew, after an interrupt may have torn a change. Linear."""
        self._clear()
        for buffer in buffers:
            rows, buffer.rows = buffer.rows, 0
            evaluated, buffer.evaluated = buffer.evaluated, False
            buffer.holding = None
            self.swap(None, buffer)
            self.note_rows(buffer, rows)
            if evaluated:
                self.note_evaluated(buffer)

    def _leave(self, buffer: Buffer) -> None:
        holding, buffer.holding = buffer.holding, None
        if holding is None:
            return
        bits = buffer.rows * self._head_dim * buffer.spec.bits
        holding.n_buffers -= 1
        holding.nbytes -= buffer.nbytes
        holding.logical_bits -= bits
        if holding.counted:
            self.in_use -= buffer.nbytes
            self.logical_bits -= bits
        if holding.n_buffers == 0:
            self._holdings.pop(holding.lease, None)

    def _goes_on(self, holding: _Holding) -> bool:
        if holding.n_buffers == 0:
            return False
        if holding.lease.live:
            return True
        holding.counted = False
        self.in_use -= holding.nbytes
        self.logical_bits -= holding.logical_bits
        return False

    def _stays(self, buffer: Buffer) -> bool:
        holding = buffer.holding
        if holding is None or not holding.counted:
            return False
        if buffer.block.lease is buffer.lease:
            return True
        self._leave(buffer)
        return False


def _sift(watched: deque[_Watched], keep: Callable[[_Watched], bool], budget: int) -> None:
    for _ in range(min(budget, len(watched))):
        item = watched.popleft()
        if keep(item):
            watched.append(item)
