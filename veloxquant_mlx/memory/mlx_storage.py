"""MLXBlockStorage: one MLX buffer for each block of a pool.

Nothing here evaluates an array, except what says so: `validate=True` and `evaluate`. Importing this
module imports MLX.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NoReturn

import mlx.core as mx

from veloxquant_mlx.core.exceptions import ArgumentTypeError
from veloxquant_mlx.memory.block_pool import BlockPoolAllocator
from veloxquant_mlx.memory.buffer_table import BufferTable, holds
from veloxquant_mlx.memory.storage_checks import (
    check_block,
    check_dtype,
    check_flag,
    check_held,
    check_range,
    checked_end,
    stored,
)
from veloxquant_mlx.memory.storage_format import storage_format

if TYPE_CHECKING:
    from collections.abc import Iterable

    from veloxquant_mlx.memory.block import Block, Lease, Owner
    from veloxquant_mlx.memory.storage_books import StorageUsage
    from veloxquant_mlx.memory.storage_format import StorageFormat

__all__ = ["MLXBlockStorage"]

_FIRST_ROW: Final = mx.array(0)


class MLXBlockStorage:
    """The arrays behind the blocks of one pool: shape ``(block_size, head_dim)``, one a block id.

    A buffer is made by the first `buffer_for` or `write` of a block under its lease, and kept when
    the block is freed. A block that comes to a new holder gets a new array, all zeros: no owner
    reads rows that it did not write, not even through an array kept from `buffer_for`. Buffers of
    ids that the pool retires are dropped.

    Formats: fp32, fp16 and bf16; int8, int4, int2 and int1 as uint8 codes, one a byte. A block has
    one format for as long as it is held. To convert, read the rows, free the block and write them
    to one allocated in the other format.

    **Laziness.** A write adds a slice update to the buffer's lazy graph, without evaluating. That
    graph, and every array written, stays in memory until the buffer is evaluated: under 1 kB a
    write besides the values, without bound. Reading the rows and evaluating what was computed from
    them, as a decode step does, evaluates the buffer too; code that only writes calls `evaluate`
    every few hundred writes.

    **Threads.** All methods are thread-safe. MLX evaluates an array only on the thread that made
    it (its streams are per thread): before a block's rows go to another thread, `evaluate` them on
    the one that wrote. In a signal handler that interrupted a call on the same storage, rows are
    refused with `PoolReentryError`; counts, `release` and `drop_retired` work.

    **Books.** Blocks are checked against the pool's books at every call. Calls with `owner` refuse
    a block that another owner holds; calls without it act on the present holder. A refused call
    raises ValueError with the reason, is counted by the pool, and changes nothing.

    Args:
        pool: The pool whose blocks are stored. It refers to the storage weakly.
        head_dim: Elements in a row (one token slot), an int >= 1.
        validate: Default of `write`: True also checks the values themselves, at the price of
            evaluating them (a device sync) on each write.

    Raises:
        ArgumentTypeError: An argument has the wrong type.
        ValueError: `head_dim` is below 1.
    """

    __slots__ = ("__weakref__", "_block_size", "_head_dim", "_pool", "_table", "_validate")

    def __init__(self, pool: BlockPoolAllocator, head_dim: int, *, validate: bool = False) -> None:
        if not isinstance(pool, BlockPoolAllocator):
            raise ArgumentTypeError(f"pool must be a BlockPoolAllocator, got {pool!r}")
        if type(head_dim) is not int:
            raise ArgumentTypeError(f"head_dim must be an int >= 1, got {head_dim!r}")
        if head_dim < 1:
            raise ValueError(f"head_dim must be >= 1, got {head_dim}")
        self._validate = check_flag(validate)
        self._pool = pool
        self._head_dim = head_dim
        self._block_size = pool.config.block_size
        self._table = BufferTable(self._block_size, head_dim)
        pool.add_retire_listener(self)

    @property
    def pool(self) -> BlockPoolAllocator:
        """The pool whose blocks are stored."""
        return self._pool

    @property
    def head_dim(self) -> int:
        """Elements in a row."""
        return self._head_dim

    def __repr__(self) -> str:
        books = self._table.books
        return (
            f"<MLXBlockStorage {books.n_buffers} buffers of "
            f"({self._block_size}, {self._head_dim}), {books.resident} bytes>"
        )

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "an MLXBlockStorage cannot be copied or pickled: its buffers belong to the blocks of "
            "one pool. Share the storage, or read() the rows and write() them to other blocks"
        )

    # -- rows -----------------------------------------------------------------------------------

    def buffer_for(self, block: Block, owner: Owner | None = None) -> mx.array:
        """The array of a block, made of zeros if it has none under its present lease.

        Rows may be updated in place (``array[2:4] = rows``) as long as the block is held; that is
        seen by `read`, but neither checked nor counted as a write, nor does it mark the rows used.

        Returns:
            The array itself: shape ``(block_size, head_dim)``, dtype of the block's format.

        Raises:
            ValueError: The block is refused, or its format is unknown here.
        """
        lease, spec = self._admit(block, owner)
        array = self._table.locked(lambda: self._open(block, lease, spec))
        return array if array is not None else self._lost(block, owner)

    def write(
        self,
        block: Block,
        offset: int,
        values: mx.array,
        owner: Owner | None = None,
        *,
        validate: bool | None = None,
    ) -> None:
        """Write rows `offset` to ``offset + len(values)`` of a block and mark them used.

        The block's `n_used` rises to the end of the rows and never falls; used rows that its holder
        did not write read as zeros.

        A float format takes float16, bfloat16 and float32 values. Where its range is smaller than
        theirs, values beyond it, infinities too, become its largest finite value; NaN stays. An
        integer format takes uint8 codes only. With `validate`, values that are not finite or not
        within the format's range are refused instead.

        Args:
            block: A block that is held.
            offset: First row, an int >= 0.
            values: Shape ``(n, head_dim)`` with 1 <= n <= block_size - offset; copied.
            owner: Who must hold the block; None is whoever does.
            validate: Check the values, which evaluates them; None is the storage's default.

        Raises:
            ArgumentTypeError: An argument has the wrong type.
            ValueError: The block is refused, or offset, shape, dtype or (with `validate`) a value
                does not fit. Nothing was changed.
        """
        lease, spec = self._admit(block, owner)
        end = checked_end(offset, values, self._block_size, self._head_dim)
        check_dtype(spec, values)
        if self._validate if validate is None else check_flag(validate):
            check_range(spec, values)
        rows = stored(spec, values)
        place = slice(offset, end)
        if not self._table.locked(lambda: self._store(block, lease, spec, place, rows)):
            self._lost(block, owner)
        # After the storage's lock: the pool is never called under it.
        if block.n_used < end and holds(block, lease):
            self._pool.mark_used(block, end)

    def read(self, block: Block, owner: Owner | None = None) -> mx.array:
        """The used rows of a block; zeros where its present holder wrote nothing.

        Makes no buffer and evaluates nothing. Later writes do not change what was returned.

        Returns:
            Shape ``(n_used, head_dim)``, dtype of the block's format.

        Raises:
            ValueError: The block is refused, or its format is unknown here.
        """
        lease, spec = self._admit(block, owner)
        n_used = block.n_used
        array = self._table.locked(lambda: self._rows(block, lease, spec, n_used))
        return array if array is not None else self._lost(block, owner)

    def release(self, block: Block, owner: Owner | None = None) -> None:
        """Drop the buffer of a block, held or free; what it held reads as zeros from now on.

        Without a buffer this does nothing. A finalizer may call it.

        Raises:
            ValueError: The block is foreign or a copy, or (with `owner`) held by another.
        """
        check_block(block)
        buffer = self._table.peek(block.block_id)
        # A freed handle is welcome here, so the books are not asked about it.
        if block.lease.live or (buffer is not None and buffer.block is not block):
            check_held(self._pool, block, owner)
        self._table.release(block)

    def evaluate(self) -> None:
        """Evaluate the buffers written since the last call; call it on the thread that wrote.

        Raises:
            RuntimeError: MLX cannot evaluate a buffer here, e.g. another thread wrote it.
        """
        self._table.evaluate(mx.eval)

    # -- counts ---------------------------------------------------------------------------------

    def resident_bytes(self) -> int:
        """Sum of the sizes of all buffers; what they take in memory at most, see `StorageUsage`.

        A plain int kept up to date: evaluates nothing, takes no lock, any thread may ask.
        """
        return self._table.books.resident

    def written_bytes(self) -> int:
        """Bytes of the buffers that were written to, whether evaluated yet or not."""
        return self._table.books.written

    def evaluated_bytes(self) -> int:
        """Bytes of the buffers that `evaluate` evaluated: what takes memory for sure."""
        return self._table.books.evaluated

    def fp16_equivalent_bytes(self) -> int:
        """Bytes that the buffers would take if all were fp16."""
        return self._table.fp16_equivalent_bytes()

    def retired_bytes(self) -> int:
        """Bytes of buffers of retired ids that someone outside still refers to."""
        return self._table.retired_bytes()

    def bytes_by_format(self) -> dict[str, int]:
        """`resident_bytes` by format; every known format is there."""
        return dict(self._table.books.by_format)

    def usage(self) -> StorageUsage:
        """All counts at one moment, in constant time and without evaluating; any thread may ask.

        Asked in the middle of a call on this storage, by a signal handler or because another thread
        is stuck in one, it is the usage that was asked for last. May be asked under the pool's lock.
        """
        return self._table.usage()

    def drop_retired(self, block_ids: Iterable[int]) -> None:
        """Drop the buffers of ids that the pool no longer manages; the pool calls this."""
        self._table.retire(block_ids)

    # -- under the table's lock; None or False when the block was lost to another holder -------

    def _open(self, block: Block, lease: Lease, spec: StorageFormat) -> mx.array | None:
        if not holds(block, lease):
            return None
        buffer = self._table.current(block, lease)
        if buffer is None:
            buffer = self._table.install(block, lease, spec, self._zeros(self._block_size, spec))
        array: mx.array = buffer.array
        return array

    def _store(
        self, block: Block, lease: Lease, spec: StorageFormat, place: slice, rows: mx.array
    ) -> bool:
        if not holds(block, lease):
            return False
        buffer = self._table.current(block, lease)
        array = self._zeros(self._block_size, spec) if buffer is None else buffer.array
        if place.stop - place.start == self._block_size:
            # A plain update of all rows would make the buffer a view of `rows`, and keep alive the
            # whole array that they are a slice of, such as the keys of a prompt.
            rows = mx.slice_update(array, rows, _FIRST_ROW, (0,))
        array[place] = rows
        if buffer is None:
            buffer = self._table.install(block, lease, spec, array)
        self._table.note_write(buffer, place.stop)
        return True

    def _rows(
        self, block: Block, lease: Lease, spec: StorageFormat, n_used: int
    ) -> mx.array | None:
        if not holds(block, lease):
            return None
        buffer = self._table.current(block, lease)
        return self._zeros(n_used, spec) if buffer is None else buffer.array[:n_used]

    def _zeros(self, n_rows: int, spec: StorageFormat) -> mx.array:
        return mx.zeros((n_rows, self._head_dim), getattr(mx, spec.dtype))

    # -- refusals -------------------------------------------------------------------------------

    def _admit(self, block: Block, owner: Owner | None) -> tuple[Lease, StorageFormat]:
        """The lease and the format of a block that the pool's books hold for `owner`."""
        check_block(block)
        # Read before the books are asked: a block that changes hands in between is refused later.
        lease = block.lease
        check_held(self._pool, block, owner)
        return lease, storage_format(lease.format)

    def _lost(self, block: Block, owner: Owner | None) -> NoReturn:
        """Refuse a block that changed hands during the call."""
        check_held(self._pool, block, owner)
        raise ValueError(f"block {block.block_id} is refused as stale: it changed hands meanwhile")
