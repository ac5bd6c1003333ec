"""The MLX block storage: rows, refusals, bytes, and a numpy model of who wrote what."""

from __future__ import annotations

import copy
import gc
import math
import os
import pickle
import signal
import subprocess
import sys
import threading
import warnings
import weakref
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Self

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from veloxquant_mlx.core.exceptions import ArgumentTypeError, PoolReentryError
from veloxquant_mlx.memory.block_pool import Block, BlockPoolAllocator, PoolConfig
from veloxquant_mlx.memory.buffer_table import holds
from veloxquant_mlx.memory.mlx_storage import MLXBlockStorage
from veloxquant_mlx.memory.storage_books import SETTLE_ASKED
from veloxquant_mlx.memory.storage_format import STORAGE_FORMATS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

    from veloxquant_mlx.memory.block import Lease

SIZE = 4
DIM = 8
FP16_BYTES = SIZE * DIM * 2
DTYPES = {
    "fp32": mx.float32,
    "fp16": mx.float16,
    "bf16": mx.bfloat16,
    "int8": mx.uint8,
    "int4": mx.uint8,
    "int2": mx.uint8,
    "int1": mx.uint8,
}


def make_pool(n_blocks: int = 8, block_size: int = SIZE) -> BlockPoolAllocator:
    """A pool with one free list."""
    return BlockPoolAllocator(
        PoolConfig(block_size=block_size, n_blocks=n_blocks, separate_kv=False)
    )


@pytest.fixture
def pool() -> BlockPoolAllocator:
    """Eight blocks of four rows."""
    return make_pool()


@pytest.fixture
def storage(pool: BlockPoolAllocator) -> MLXBlockStorage:
    """A storage of the pool above."""
    return MLXBlockStorage(pool, DIM)


def one(pool: BlockPoolAllocator, owner: int | str = 1, fmt: str = "fp16", n: int = 1) -> Block:
    """Allocate a block."""
    return pool.allocate("k", n, owner, fmt)[0]


def rows(n: int, value: float = 1.0, dtype: mx.Dtype = mx.float16) -> mx.array:
    """Equal rows."""
    return mx.full((n, DIM), value, dtype=dtype)


def column(array: mx.array) -> list[float]:
    """The first element of each row."""
    first: list[float] = array[:, 0].astype(mx.float32).tolist()  # type: ignore[assignment]
    return first


# -- rows ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", DTYPES)
def test_write_then_read_returns_the_rows(
    pool: BlockPoolAllocator, storage: MLXBlockStorage, fmt: str
) -> None:
    """Every format stores its dtype and gives back what was written."""
    block = one(pool, fmt=fmt)
    storage.write(block, 0, rows(3, 1, DTYPES[fmt]))
    read = storage.read(block)
    assert read.dtype == DTYPES[fmt]
    assert read.shape == (3, DIM)
    assert column(read) == [1, 1, 1]


def test_rows_below_the_offset_read_as_zeros(
    pool: BlockPoolAllocator, storage: MLXBlockStorage
) -> None:
    """A write marks everything up to its end used; what nobody wrote is zero."""
    block = one(pool)
    storage.write(block, 2, rows(1, 5))
    assert block.n_used == 3
    assert column(storage.read(block)) == [0, 0, 5]


def test_a_write_never_lowers_the_fill(pool: BlockPoolAllocator, storage: MLXBlockStorage) -> None:
    """Rewriting the first row of a full block leaves it full."""
    block = one(pool, n=SIZE)
    storage.write(block, 0, rows(1))
    assert block.n_used == SIZE
    assert column(storage.read(block)) == [1, 0, 0, 0]


def test_read_rows_do_not_change_later(pool: BlockPoolAllocator, storage: MLXBlockStorage) -> None:
    """What `read` returned, of a part or of a full block, keeps its values; so does the source."""
    block = one(pool)
    values = rows(SIZE, 1)
    storage.write(block, 0, values)
    read = storage.read(block)
    storage.write(block, 0, rows(2, 7))
    read[0:1] = rows(1, 9)
    assert column(storage.read(block)) == [7, 7, 1, 1]
    assert column(values) == [1, 1, 1, 1]
    assert column(read) == [9, 1, 1, 1]


def test_a_full_write_copies(pool: BlockPoolAllocator, storage: MLXBlockStorage) -> None:
    """A block of a long prompt does not keep the whole prompt in memory."""
    storage.evaluate()
    gc.collect()
    active = mx.get_active_memory()
    prompt = mx.random.normal((1000, DIM)).astype(mx.float16)
    mx.eval(prompt)
    block = one(pool)
    storage.write(block, 0, prompt[SIZE : 2 * SIZE])
    storage.evaluate()
    expected = prompt[SIZE : 2 * SIZE].tolist()
    del prompt
    assert storage.read(block).tolist() == expected
    gc.collect()
    assert mx.get_active_memory() - active < 1000


def test_buffer_for_is_the_array_itself(pool: BlockPoolAllocator, storage: MLXBlockStorage) -> None:
    """One array a block and lease, shaped (block_size, head_dim); in-place updates are seen."""
    block = one(pool, n=2)
    buffer = storage.buffer_for(block)
    assert buffer.shape == (SIZE, DIM)
    assert storage.buffer_for(block) is buffer
    buffer[0:1] = rows(1, 3)
    storage.write(block, 1, rows(1, 4))
    assert storage.buffer_for(block) is buffer
    assert column(storage.read(block)) == [3, 4]


def test_a_kept_array_never_shows_the_next_holder(
    pool: BlockPoolAllocator, storage: MLXBlockStorage
) -> None:
    """An array kept past the release sees no rows of the next owner, and cannot change them."""
    block = one(pool, owner=1)
    kept = storage.buffer_for(block)
    storage.write(block, 0, rows(1, 1))
    pool.free_all(1)
    assert one(pool, owner=2) is block
    assert column(storage.read(block)) == [0]
    storage.write(block, 0, rows(1, 2))
    kept[0:1] = rows(1, 6)
    assert column(storage.read(block, 2)) == [2]
    assert column(kept) == [6, 0, 0, 0]


def test_release_drops_the_buffer_of_a_held_and_of_a_freed_block(
    pool: BlockPoolAllocator, storage: MLXBlockStorage
) -> None:
    """Rows of a released buffer read as zeros; a freed handle is no misuse and not counted."""
    block = one(pool)
    storage.write(block, 0, rows(1))
    storage.release(block)
    assert storage.resident_bytes() == 0
    assert column(storage.read(block)) == [0]
    storage.write(block, 0, rows(1))
    pool.free([block])
    storage.release(block)
    storage.release(block)
    assert storage.resident_bytes() == 0
    assert sum(pool.rejected.values()) == 0


def test_release_refuses_other_blocks(pool: BlockPoolAllocator, storage: MLXBlockStorage) -> None:
    """A copy, a foreign block and, with `owner`, another's block keep their buffers."""
    block = one(pool)
    storage.write(block, 0, rows(1))
    for stranger, owner in ((copy.copy(block), None), (one(make_pool()), None), (block, 2)):
        with pytest.raises(ValueError, match="refused as"):
            storage.release(stranger, owner)
    assert column(storage.read(block)) == [1]


# -- refusals -----------------------------------------------------------------------------------


def test_U44_block_of_another_pool(pool: BlockPoolAllocator, storage: MLXBlockStorage) -> None:
    """A block of another pool with the same id is refused, and nobody's rows are touched."""
    mine = one(pool)
    storage.write(mine, 0, rows(1, 1))
    foreign = one(make_pool(), owner=2)
    assert foreign.block_id == mine.block_id
    for call in (
        lambda: storage.write(foreign, 0, rows(1, 9)),
        lambda: storage.read(foreign),
        lambda: storage.buffer_for(foreign),
    ):
        with pytest.raises(ValueError, match="foreign"):
            call()
    assert column(storage.read(mine)) == [1]
    assert pool.rejected["foreign"] == 3


@pytest.mark.parametrize("reason", ["free", "foreign", "copied", "retired", "stale"])
def test_refused_blocks_change_nothing(
    pool: BlockPoolAllocator, storage: MLXBlockStorage, reason: str
) -> None:
    """Each kind of block that the books do not know is refused by name, counted, and harmless."""
    block = one(pool, owner=1)
    storage.write(block, 0, rows(1, 1))
    owner: int | None = None
    if reason == "foreign":
        block = Block(block.block_id, "kv", "fp16", 1, 1)
    elif reason == "copied":
        block = pickle.loads(pickle.dumps(block))
    else:
        pool.free_all(1)
    if reason == "retired":
        pool.shrink("k", 0)
    elif reason == "stale":
        one(pool, owner=2)
        owner = 1
    before = (storage.usage(), block.n_used, dict(pool.rejected))
    with pytest.raises(ValueError, match=f"refused as {reason}"):
        storage.write(block, 0, rows(2, 9), owner)
    with pytest.raises(ValueError, match=f"refused as {reason}"):
        storage.read(block, owner)
    with pytest.raises(ValueError, match=f"refused as {reason}"):
        storage.buffer_for(block, owner)
    assert (storage.usage(), block.n_used) == before[:2]
    assert pool.rejected[reason] == before[2].get(reason, 0) + 3


@pytest.mark.parametrize(
    ("offset", "shape"),
    [
        (0, (DIM,)),
        (0, (1, DIM, 1)),
        (0, (1, 1)),
        (0, (1, DIM - 1)),
        (0, (0, DIM)),
        (0, (SIZE + 1, DIM)),
        (SIZE - 1, (2, DIM)),
        (SIZE, (1, DIM)),
        (-1, (1, DIM)),
    ],
)
def test_wrong_shapes_and_offsets(
    pool: BlockPoolAllocator, storage: MLXBlockStorage, offset: int, shape: tuple[int, ...]
) -> None:
    """Nothing is broadcast, cut or wrapped around, and a refused write makes no buffer."""
    block = one(pool)
    with pytest.raises(ValueError, match=r"offset|shape"):
        storage.write(block, offset, mx.zeros(shape, mx.float16))
    assert block.n_used == 1
    assert storage.resident_bytes() == 0


def test_wrong_types(pool: BlockPoolAllocator, storage: MLXBlockStorage) -> None:
    """Arguments of a wrong type raise what is both a TypeError and a ValueError."""
    block = one(pool)
    for call in (
        lambda: storage.write(block, True, rows(1)),
        lambda: storage.write(block, 0.0, rows(1)),  # type: ignore[arg-type]
        lambda: storage.write(block, 0, [[1.0] * DIM]),  # type: ignore[arg-type]
        lambda: storage.write(block, 0, rows(1), validate=1),  # type: ignore[arg-type]
        lambda: storage.read(None),  # type: ignore[arg-type]
        lambda: storage.release(0),  # type: ignore[arg-type]
        lambda: MLXBlockStorage(None, DIM),  # type: ignore[arg-type]
        lambda: MLXBlockStorage(pool, True),
        lambda: MLXBlockStorage(pool, 8.0),  # type: ignore[arg-type]
        lambda: MLXBlockStorage(pool, DIM, validate="yes"),  # type: ignore[arg-type]
    ):
        with pytest.raises(ArgumentTypeError):
            call()
    with pytest.raises(ValueError, match="head_dim"):
        MLXBlockStorage(pool, 0)


# -- formats and values -------------------------------------------------------------------------


def test_U47_codes_must_be_uint8(pool: BlockPoolAllocator, storage: MLXBlockStorage) -> None:
    """Values that a cast would wrap (-1, 300.7, NaN, 1e9) are no codes and are refused."""
    block = one(pool, fmt="int8")
    for value, dtype in (
        (-1, mx.int8),
        (-1, mx.int32),
        (300.7, mx.float32),
        (float("nan"), mx.float16),
        (1e9, mx.float32),
        (1, mx.bool_),
    ):
        with pytest.raises(ValueError, match="uint8"):
            storage.write(block, 0, rows(1, value, dtype))
    assert storage.resident_bytes() == 0


@pytest.mark.parametrize("fmt", ["int4", "int2", "int1"])
def test_U47_code_range(pool: BlockPoolAllocator, fmt: str) -> None:
    """With `validate`, codes beyond the width of the format are refused; the largest one is not."""
    storage = MLXBlockStorage(pool, DIM, validate=True)
    block = one(pool, fmt=fmt)
    largest = 2 ** int(fmt[3:]) - 1
    storage.write(block, 0, rows(1, largest, mx.uint8))
    with pytest.raises(ValueError, match=f"{DIM} of {DIM} values"):
        storage.write(block, 0, rows(1, largest + 1, mx.uint8))
    assert column(storage.read(block)) == [largest]
    storage.write(block, 0, rows(1, 255, mx.uint8), validate=False)
    assert column(storage.read(block)) == [255]


@pytest.mark.parametrize(
    ("fmt", "value", "dtype", "largest"),
    [
        ("fp16", 1e6, mx.float32, 65504.0),
        ("fp16", -1e6, mx.bfloat16, -65504.0),
        ("fp16", 65519.0, mx.float32, 65504.0),
        ("fp16", float("inf"), mx.float32, 65504.0),
        ("bf16", 3.4e38, mx.float32, 3.3895313892515355e38),
    ],
)
def test_U47_floats_beyond_the_range(
    pool: BlockPoolAllocator,
    storage: MLXBlockStorage,
    fmt: str,
    value: float,
    dtype: mx.Dtype,
    largest: float,
) -> None:
    """A narrowing cast stores the largest finite value, and with `validate` is refused."""
    block = one(pool, fmt=fmt)
    with pytest.raises(ValueError, match="finite"):
        storage.write(block, 0, rows(1, value, dtype), validate=True)
    assert storage.resident_bytes() == 0
    storage.write(block, 0, rows(1, value, dtype))
    assert column(storage.read(block)) == [largest]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_U47_validate_refuses_what_is_not_finite(
    pool: BlockPoolAllocator, storage: MLXBlockStorage, value: float
) -> None:
    """Also without any cast, NaN and infinities are found and counted in the message."""
    block = one(pool)
    values = rows(2)
    values[1:2, 0:3] = mx.full((1, 3), value, dtype=mx.float16)
    with pytest.raises(ValueError, match=f"3 of {2 * DIM} values"):
        storage.write(block, 0, values, validate=True)


@pytest.mark.parametrize("fmt", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32])
def test_U47_floats_may_be_cast(
    pool: BlockPoolAllocator, storage: MLXBlockStorage, fmt: str, dtype: mx.Dtype
) -> None:
    """The three float dtypes go into each float format; others go into none."""
    block = one(pool, fmt=fmt)
    storage.write(block, 0, rows(1, 0.5, dtype), validate=True)
    assert storage.read(block).dtype == DTYPES[fmt]
    assert column(storage.read(block)) == [0.5]
    with pytest.raises(ValueError, match="takes float16"):
        storage.write(block, 0, rows(1, 1, mx.int32))
    with pytest.raises(ValueError, match="takes float16"):
        storage.write(block, 0, rows(1, 1, mx.complex64))


def test_U48_unknown_formats(pool: BlockPoolAllocator, storage: MLXBlockStorage) -> None:
    """The pool takes any tag; the storage refuses an unknown one by name, and knows bf16."""
    block = one(pool, fmt="fp8_x")
    for call in (
        lambda: storage.write(block, 0, rows(1)),
        lambda: storage.read(block),
        lambda: storage.buffer_for(block),
    ):
        with pytest.raises(ValueError, match=r"'fp8_x'.*bf16"):
            call()
    assert block.n_used == 1
    storage.write(one(pool, fmt="bf16"), 0, rows(1, 1, mx.bfloat16))


def test_U49_write_marks_used() -> None:
    """Ten rows written into a block allocated for one token are ten rows read, and counted."""
    pool = make_pool(block_size=16)
    storage = MLXBlockStorage(pool, DIM)
    block = one(pool, n=1)
    storage.write(block, 0, rows(10))
    assert block.n_used == 10
    assert storage.read(block).shape == (10, DIM)
    assert pool.stats.fragmentation() == 1 / 8
    storage.write(block, 10, rows(6))
    assert pool.stats.fragmentation() == 0


def test_U50_format_is_fixed_for_a_lease(
    pool: BlockPoolAllocator, storage: MLXBlockStorage
) -> None:
    """No assignment converts a block; the next holder's format decides, and starts from zeros."""
    block = one(pool, owner=1, fmt="int8")
    storage.write(block, 0, rows(1, 200, mx.uint8))
    with pytest.raises(AttributeError):
        block.format = "int4"  # type: ignore[misc]
    assert column(storage.read(block)) == [200]
    pool.free_all(1)
    for fmt, nbytes in (("int4", SIZE * DIM), ("fp32", SIZE * DIM * 4), ("int1", SIZE * DIM)):
        assert one(pool, owner=2, fmt=fmt) is block
        assert storage.read(block).dtype == DTYPES[fmt]
        assert column(storage.read(block)) == [0]
        storage.write(block, 0, rows(1, 1, DTYPES[fmt]))
        assert storage.resident_bytes() == nbytes
        assert storage.bytes_by_format()[fmt] == nbytes
        pool.free_all(2)


# -- bytes --------------------------------------------------------------------------------------


def test_U51_lazy_buffers_are_told_apart() -> None:
    """`read` makes no buffer; made, written and evaluated memory are counted separately."""
    n, size, dim = 64, 16, 128
    pool = make_pool(n, size)
    storage = MLXBlockStorage(pool, dim)
    blocks = pool.allocate("k", n * size, 1)
    each = size * dim * 2
    for block in blocks:
        storage.read(block)
    assert storage.resident_bytes() == 0
    gc.collect()
    active = mx.get_active_memory()
    for block in blocks:
        storage.buffer_for(block)
    assert storage.resident_bytes() == n * each
    assert storage.written_bytes() == 0
    values = mx.ones((size, dim), mx.float16)
    for block in blocks[: n // 2]:
        storage.write(block, 0, values)
    assert storage.written_bytes() == n // 2 * each
    assert storage.evaluated_bytes() == 0
    assert mx.get_active_memory() - active < each
    storage.evaluate()
    assert storage.evaluated_bytes() == n // 2 * each
    assert mx.get_active_memory() - active >= n // 2 * each
    assert storage.resident_bytes() == n * each


def test_A09_bytes_are_not_accounting_only() -> None:
    """Logical (packed), resident (arrays) and evaluated bytes of int4 blocks are three numbers."""
    size, dim, n_tokens = 16, 128, 160
    pool = make_pool(16, size)
    storage = MLXBlockStorage(pool, dim)
    blocks = pool.allocate("k", n_tokens, 1, "int4")
    gc.collect()
    active = mx.get_active_memory()
    for block in blocks:
        storage.write(block, 0, mx.ones((size, dim), mx.uint8))
    usage = storage.usage()
    assert usage.logical_bytes == n_tokens * dim * 4 // 8
    assert usage.resident_bytes == sum(storage.buffer_for(block).nbytes for block in blocks)
    assert usage.resident_bytes == n_tokens * dim
    assert usage.evaluated_bytes == 0
    storage.evaluate()
    usage = storage.usage()
    assert usage.evaluated_bytes == usage.resident_bytes
    assert usage.fp16_equivalent_bytes == 2 * usage.resident_bytes
    assert mx.get_active_memory() - active >= usage.resident_bytes


def test_A10_bytes_by_format_are_true() -> None:
    """The integer formats take the same room, one byte a code, and their bits say so."""
    pool = make_pool(64, 16)
    storage = MLXBlockStorage(pool, DIM)
    for fmt in ("int8", "int4", "int2", "int1"):
        for block in pool.allocate("k", 160, fmt, fmt):
            storage.write(block, 0, mx.zeros((16, DIM), mx.uint8))
    by_format = storage.bytes_by_format()
    assert by_format == {
        **dict.fromkeys(STORAGE_FORMATS, 0),
        **dict.fromkeys(("int8", "int4", "int2", "int1"), 160 * DIM),
    }
    assert sum(by_format.values()) == storage.resident_bytes()
    assert [STORAGE_FORMATS[fmt].bits for fmt in DTYPES] == [32, 16, 16, 8, 4, 2, 1]
    assert storage.usage().logical_bytes == 160 * DIM * (8 + 4 + 2 + 1) // 8


def test_B25_bytes_by_state(pool: BlockPoolAllocator, storage: MLXBlockStorage) -> None:
    """In use, free but cached, and gone with their ids: memory that stays is told apart."""
    blocks = pool.allocate("k", 4 * SIZE, 1)
    for block in blocks:
        storage.write(block, 0, rows(SIZE))
    pool.free(blocks[:1])
    usage = storage.usage()
    assert (usage.in_use_bytes, usage.free_cached_bytes) == (3 * FP16_BYTES, FP16_BYTES)
    assert usage.logical_bytes == 3 * FP16_BYTES
    pool.free_all(1)
    usage = storage.usage()
    assert (usage.in_use_bytes, usage.free_cached_bytes) == (0, 4 * FP16_BYTES)
    assert usage.logical_bytes == 0
    assert pool.shrink("k", 0) == 8
    assert storage.usage().resident_bytes == 0
    assert storage.retired_bytes() == 0


def test_B25_retired_array_kept_outside(pool: BlockPoolAllocator, storage: MLXBlockStorage) -> None:
    """A retired buffer that someone still refers to is counted until they let go."""
    block = one(pool)
    kept = storage.buffer_for(block)
    pool.free_all(1)
    pool.shrink("k", 0)
    assert storage.resident_bytes() == 0
    assert storage.usage().retired_bytes == FP16_BYTES
    del kept
    assert storage.usage().retired_bytes == 0


def test_a_block_taken_again_by_its_lease_is_in_use(
    pool: BlockPoolAllocator, storage: MLXBlockStorage
) -> None:
    """Freed singly and taken again under a lease that went on, its buffer counts once more."""
    block, other = pool.allocate("k", 2 * SIZE, 1)
    storage.write(block, 0, rows(SIZE))
    storage.write(other, 0, rows(SIZE))
    pool.free([block])
    assert storage.usage().in_use_bytes == FP16_BYTES
    assert one(pool, owner=1, n=SIZE) is block
    storage.read(block)
    usage = storage.usage()
    assert (usage.in_use_bytes, usage.logical_bytes) == (2 * FP16_BYTES, 2 * FP16_BYTES)
    pool.free_all(1)
    usage = storage.usage()
    assert (usage.in_use_bytes, usage.logical_bytes) == (0, 0)


def test_asking_for_bytes_is_bounded_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many owners ended, one reading makes a bounded number of checks; later ones finish."""
    n = 3 * SETTLE_ASKED
    pool = make_pool(n, 1)
    storage = MLXBlockStorage(pool, 1)
    value = mx.zeros((1, 1), mx.float16)
    for owner in range(n):
        storage.write(one(pool, owner), 0, value)
    for owner in range(n):
        pool.free_all(owner)
    left = [storage.usage().in_use_bytes // 2 for _ in range(3)]
    assert left == [2 * SETTLE_ASKED, SETTLE_ASKED, 0]


def test_watch_lists_stay_in_proportion(pool: BlockPoolAllocator, storage: MLXBlockStorage) -> None:
    """Thousands of owners that come and go unasked leave no trace in the books."""
    for owner in range(2000):
        storage.write(one(pool, owner), 0, rows(1))
        pool.free_all(owner)
    books = storage._table.books
    assert len(books._holdings) <= 8
    assert len(books._leases) + len(books._buffers) <= 16


def test_evaluate_empties_the_graph(pool: BlockPoolAllocator, storage: MLXBlockStorage) -> None:
    """Evaluated values stay in memory with the lazy writes, until `evaluate`."""
    block = one(pool)
    storage.evaluate()
    gc.collect()
    active = mx.get_active_memory()
    for i in range(200):
        values = rows(1, i % 7)
        mx.eval(values)
        storage.write(block, i % SIZE, values)
    del values
    assert storage.usage().pending_writes == 200
    assert mx.get_active_memory() - active > 200 * DIM * 2
    storage.evaluate()
    assert storage.usage().pending_writes == 0
    assert mx.get_active_memory() - active < 100 * DIM * 2
    assert column(storage.read(block)) == [(196 + i) % 7 for i in range(SIZE)]


def test_failed_evaluate_keeps_count(pool: BlockPoolAllocator, storage: MLXBlockStorage) -> None:
    """What another thread wrote lazily cannot be evaluated here, and stays pending."""
    block = one(pool)
    thread = threading.Thread(target=lambda: storage.write(block, 0, rows(1)))
    thread.start()
    thread.join()
    with pytest.raises(RuntimeError):
        storage.evaluate()
    usage = storage.usage()
    assert (usage.pending_writes, usage.evaluated_bytes) == (1, 0)
    # The next holder has nothing to do with it.
    pool.free_all(1)
    one(pool, owner=2)
    storage.buffer_for(block)
    storage.evaluate()
    assert column(storage.read(block)) == [0]


# -- threads, signals, copies -------------------------------------------------------------------


@pytest.mark.timeout(60)
def test_threads_never_see_each_other(pool: BlockPoolAllocator, storage: MLXBlockStorage) -> None:
    """Owners in several threads pass few blocks around; each reads zeros, then its own rows."""
    faults: list[object] = []
    done = threading.Event()

    def work(owner: int) -> None:
        try:
            for _ in range(60):
                blocks = pool.allocate("k", 2 * SIZE, owner)
                found = [column(storage.read(block, owner)) for block in blocks]
                for block in blocks:
                    storage.write(block, 1, rows(2, owner), owner)
                found += [column(storage.read(block, owner)) for block in blocks]
                if found != [[0] * SIZE] * 2 + [[0, owner, owner, 0]] * 2:
                    faults.append((owner, found))
                pool.free_all(owner)
        except BaseException as fault:
            faults.append(fault)
            raise

    def watch() -> None:
        while not done.wait(0.001):
            usage = storage.usage()
            if not 0 <= usage.in_use_bytes <= usage.resident_bytes <= 8 * FP16_BYTES:
                faults.append(usage)
            if storage.resident_bytes() % FP16_BYTES:
                faults.append("a torn count")

    watcher = threading.Thread(target=watch)
    workers = [threading.Thread(target=work, args=(owner,)) for owner in range(1, 5)]
    for thread in (watcher, *workers):
        thread.start()
    for thread in workers:
        thread.join()
    done.set()
    watcher.join()
    assert faults == []
    assert storage.usage().in_use_bytes == 0


class Strike:
    """Calls `action` at the `turn`-th function entry or C call inside the storage's own code.

    A signal or a garbage collection may strike there; unlike those this tries every point.
    """

    def __init__(self, turn: int, action: Callable[[], object]) -> None:
        self.turn, self.action = turn, action
        self.struck = False

    def __enter__(self) -> Self:
        sys.setprofile(self._profile)
        return self

    def __exit__(self, *error: object) -> None:
        sys.setprofile(None)

    def _profile(self, frame: FrameType, event: str, argument: object) -> None:
        if frame.f_code.co_filename.endswith(STORAGE_FILES) and event in {"call", "c_return"}:
            self.turn -= 1
            if self.turn < 0 and not self.struck:
                self.struck = True
                sys.setprofile(None)
                self.action()


STORAGE_FILES = ("buffer_table.py", "storage_books.py", "mlx_storage.py")


def strike_everywhere(
    work: Callable[[MLXBlockStorage], object], action: Callable[[MLXBlockStorage], object]
) -> Iterator[MLXBlockStorage]:
    """Run `work` once for each point at which `action` may strike; yields what is left."""
    for turn in range(10_000):
        storage = MLXBlockStorage(make_pool(), DIM)
        strike = Strike(turn, partial(action, storage))
        with suppress(KeyboardInterrupt), strike:
            work(storage)
        if not strike.struck:
            assert turn > 40
            return
        yield storage


def use_storage(storage: MLXBlockStorage) -> None:
    """Make, write, drop, replace, evaluate, count and retire buffers."""
    pool = storage.pool
    block, other = pool.allocate("k", 2 * SIZE, 1)
    storage.write(block, 0, rows(1))
    storage.write(other, 0, rows(SIZE))
    storage.read(block)
    storage.evaluate()
    storage.release(block)
    storage.buffer_for(block)
    pool.free_all(1)
    block = one(pool, owner=2)
    storage.write(block, 1, rows(1))
    storage.usage()
    pool.free_all(2)
    pool.shrink("k", 1)


def check_books(storage: MLXBlockStorage) -> None:
    """Every count is what a walk over the buffers finds."""
    usage = storage.usage()  # first, since it does the drops that an interrupt left undone
    buffers = list(storage._table._buffers.values())
    assert usage.n_buffers == len(buffers)
    assert usage.resident_bytes == sum(buffer.array.nbytes for buffer in buffers)
    assert usage.resident_bytes == sum(usage.bytes_by_format.values())
    assert usage.written_bytes == sum(buffer.nbytes for buffer in buffers if buffer.rows)
    assert usage.evaluated_bytes == sum(buffer.nbytes for buffer in buffers if buffer.evaluated)
    # A block freed singly and taken again by the same lease counts once it is touched.
    touched = [buffer for buffer in buffers if buffer.holding is not None]
    in_use = [buffer for buffer in touched if holds(buffer.block, buffer.lease)]
    assert usage.in_use_bytes == sum(buffer.nbytes for buffer in in_use)
    bits = sum(buffer.rows * buffer.array.shape[1] * buffer.spec.bits for buffer in in_use)
    assert usage.logical_bytes == math.ceil(bits / 8)
    assert usage.retired_bytes == 0


@pytest.mark.timeout(60)
def test_interrupts_leave_the_books_whole() -> None:
    """Ctrl-C at any point inside a call: the counts are still sums, and the storage works on."""

    def interrupt(storage: MLXBlockStorage) -> None:
        raise KeyboardInterrupt

    for storage in strike_everywhere(use_storage, interrupt):
        check_books(storage)
        pool = storage.pool
        for owner in (1, 2):
            pool.free_all(owner)
        assert storage.usage().in_use_bytes == 0
        block = one(pool, owner=3)
        assert column(storage.read(block)) == [0]
        storage.write(block, 0, rows(1, 3))
        storage.evaluate()
        assert column(storage.read(block)) == [3]
        check_books(storage)


@pytest.mark.timeout(60)
def test_signal_handlers_and_finalizers_inside_a_call() -> None:
    """A handler that counts and drops at any point never hangs, and finds whole numbers."""

    def handle(storage: MLXBlockStorage) -> None:
        usage = storage.usage()
        assert usage.in_use_bytes + usage.free_cached_bytes == usage.resident_bytes
        assert sum(usage.bytes_by_format.values()) == usage.resident_bytes
        storage.drop_retired(range(8))

    for storage in strike_everywhere(use_storage, handle):
        check_books(storage)
        assert storage.usage().in_use_bytes == 0


def test_calls_inside_a_call(pool: BlockPoolAllocator, storage: MLXBlockStorage) -> None:
    """Inside a change of the same thread rows are refused, counts answer and drops wait."""
    block = one(pool)
    storage.write(block, 0, rows(1))
    outer = storage.usage()

    def inside() -> int:
        with pytest.raises(PoolReentryError):
            storage.write(block, 0, rows(1, 9))
        with pytest.raises(PoolReentryError):
            storage.read(block)
        assert storage.usage() == outer
        storage.drop_retired([block.block_id])
        return storage.resident_bytes()

    assert storage._table.locked(inside) == FP16_BYTES
    assert storage.resident_bytes() == 0


@pytest.mark.timeout(60)
def test_a_thread_stuck_inside_stops_nobody(
    pool: BlockPoolAllocator, storage: MLXBlockStorage
) -> None:
    """Counts answer and drops wait while a finalizer inside a write waits for the pool's lock.

    A collector that has the pool's lock and asks the storage must not wait for it in turn.
    """
    block = one(pool)
    storage.write(block, 0, rows(1))
    before = storage.usage()
    inside = threading.Event()

    def finalize() -> None:
        inside.set()
        pool.free_all(1)

    thread = threading.Thread(target=lambda: storage._table.locked(finalize))
    with pool._lock:
        thread.start()
        assert inside.wait(30)
        assert storage.usage() == before
        storage.drop_retired([block.block_id])
        assert storage.resident_bytes() == FP16_BYTES
    thread.join()
    assert storage.resident_bytes() == 0
    assert storage.usage() != before


def test_a_release_that_waited_spares_the_next_holder(
    pool: BlockPoolAllocator, storage: MLXBlockStorage
) -> None:
    """A release queued inside a call drops what it meant, not the buffer made in the meantime."""
    block = one(pool, owner=1)
    storage.buffer_for(block)

    def inside() -> None:
        storage.release(block)
        pool.free_all(1)
        one(pool, owner=2)
        storage._open(block, block.lease, STORAGE_FORMATS["fp16"])

    storage._table.locked(inside)
    assert storage.resident_bytes() == FP16_BYTES
    storage.release(block)
    assert storage.resident_bytes() == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.timeout(60)
def test_fork_inside_a_call(pool: BlockPoolAllocator, storage: MLXBlockStorage) -> None:
    """A child forked while another thread is inside the storage can still count."""
    storage.write(one(pool), 0, rows(1))
    inside, leave = threading.Event(), threading.Event()

    def stay() -> None:
        inside.set()
        leave.wait(30)

    thread = threading.Thread(target=lambda: storage._table.locked(stay))
    thread.start()
    assert inside.wait(30)
    with warnings.catch_warnings():
        # Python 3.12 warns of every fork of a threaded process: that is what is tried here.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        # Where the child hangs after all, it ends by itself.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(20)
        os._exit(0 if storage.usage().in_use_bytes == FP16_BYTES else 1)
    status = os.waitpid(child, 0)[1]
    leave.set()
    thread.join()
    assert status == 0


def test_copies_and_pickles_name_the_fix(storage: MLXBlockStorage) -> None:
    """A storage cannot be copied; the error says what to do instead."""
    for duplicate in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="Share the storage"):
            duplicate(storage)


def test_a_dropped_storage_is_gone_at_once(pool: BlockPoolAllocator) -> None:
    """Nothing keeps a storage alive, neither the pool nor a cycle of its own."""
    storage = MLXBlockStorage(pool, DIM)
    block = one(pool)
    kept = storage.buffer_for(block)
    pool.free_all(1)
    pool.shrink("k", 4)
    ref = weakref.ref(storage)
    del storage
    assert ref() is None
    assert pool.shrink("k", 0) == 4
    assert kept.nbytes == FP16_BYTES


def test_without_mlx_the_extras_are_named() -> None:
    """The pool works; what needs MLX says what to install, also to `import *`."""
    code = (
        "import sys; sys.modules['mlx'] = sys.modules['mlx_lm'] = None\n"
        "import veloxquant_mlx.memory as memory\n"
        "memory.BlockPoolAllocator(); assert set(memory.__all__) <= set(dir(memory))\n"
        "for name in ('MLXBlockStorage', 'PoolBackedKVCache', 'build_pooled_caches'):\n"
        "    try: getattr(memory, name)\n"
        "    except ImportError as error: assert '[cpu]' in str(error) and name in str(error)\n"
        "    else: raise SystemExit(name)\n"
        "memory.PooledKVCache\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_memory_package_loads_mlx_only_when_asked() -> None:
    """Everything that telemetry needs of the storage imports without MLX."""
    code = (
        "import sys, veloxquant_mlx.memory.storage_books, veloxquant_mlx.memory.storage_format, "
        "veloxquant_mlx.memory.buffer_table; sys.exit('mlx' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# -- a numpy model ------------------------------------------------------------------------------


class StorageMachine(RuleBasedStateMachine):
    """Several owners against a dict of numpy rows: nobody reads what they did not write.

    An owner writes values that only it writes, so that a leak is seen even if the model shares
    the mistake.
    """

    @initialize(unified=st.booleans())
    def start(self, unified: bool) -> None:
        """Six blocks that are handed around."""
        self.pool = BlockPoolAllocator(
            PoolConfig(block_size=SIZE, n_blocks=6, separate_kv=not unified)
        )
        self.storage = MLXBlockStorage(self.pool, 2)
        self.model: dict[int, tuple[Lease, np.ndarray]] = {}
        self.held: list[Block] = []
        self.handles: list[tuple[Block, int]] = []

    def rows_of(self, block: Block) -> np.ndarray:
        """What the present lease of a block wrote."""
        lease, values = self.model.get(block.block_id, (None, None))
        if values is None or lease is not block.lease:
            values = np.zeros((SIZE, 2), np.float32)
        return values

    @rule(
        stream=st.sampled_from("kv"),
        owner=st.integers(1, 3),
        fmt=st.sampled_from(["fp16", "fp32", "bf16", "int8", "int1"]),
        n_tokens=st.integers(1, 2 * SIZE),
    )
    def allocate(self, stream: str, owner: int, fmt: str, n_tokens: int) -> None:
        """Take blocks if there are any."""
        if self.pool.n_free(stream) * SIZE >= n_tokens:
            blocks = self.pool.allocate(stream, n_tokens, owner, fmt)
            self.held += blocks
            self.handles += [(block, owner) for block in blocks]

    @precondition(lambda self: self.held)
    @rule(data=st.data(), offset=st.integers(0, SIZE - 1), n=st.integers(1, SIZE))
    def write(self, data: st.DataObject, offset: int, n: int) -> None:
        """Write rows that name their owner, or overshoot and be refused."""
        block = data.draw(st.sampled_from(self.held))
        assert isinstance(block.owner, int)
        is_code = block.format.startswith("int")
        value = 1 if block.format == "int1" else block.owner
        values = mx.full((n, 2), value, dtype=mx.uint8 if is_code else mx.float32)
        if offset + n > SIZE:
            with pytest.raises(ValueError, match="shape"):
                self.storage.write(block, offset, values)
            return
        fill = max(block.n_used, offset + n)
        self.storage.write(block, offset, values, block.owner)
        changed = self.rows_of(block).copy()
        changed[offset : offset + n] = value
        self.model[block.block_id] = (block.lease, changed)
        assert block.n_used == fill

    @precondition(lambda self: self.held)
    @rule(data=st.data(), n_used=st.integers(0, SIZE))
    def read(self, data: st.DataObject, n_used: int) -> None:
        """Read any fill, also one that was never written."""
        block = data.draw(st.sampled_from(self.held))
        self.pool.mark_used(block, n_used)
        got = np.array(self.storage.read(block, block.owner).astype(mx.float32))
        np.testing.assert_array_equal(got, self.rows_of(block)[:n_used])
        assert set(got.flat) <= {0, block.owner, 1 if block.format == "int1" else 0}

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def open_buffer(self, data: st.DataObject) -> None:
        """The raw array shows the same rows."""
        block = data.draw(st.sampled_from(self.held))
        got = np.array(self.storage.buffer_for(block).astype(mx.float32))
        np.testing.assert_array_equal(got, self.rows_of(block))
        self.model[block.block_id] = (block.lease, self.rows_of(block))

    @precondition(lambda self: self.handles)
    @rule(data=st.data())
    def misuse(self, data: st.DataObject) -> None:
        """A handle kept by an owner that no longer holds the block gets nothing."""
        block, owner = data.draw(st.sampled_from(self.handles))
        if block.owner != owner:
            with pytest.raises(ValueError, match="refused"):
                self.storage.read(block, owner)
            with pytest.raises(ValueError, match="refused"):
                self.storage.write(block, 0, mx.full((1, 2), 9.0), owner)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free_some(self, data: st.DataObject) -> None:
        """Free a few blocks, whoever's they are."""
        gone = data.draw(st.lists(st.sampled_from(self.held), unique=True, min_size=1))
        self.pool.free(gone)
        self.held = [block for block in self.held if block not in gone]

    @rule(owner=st.integers(1, 3))
    def free_all(self, owner: int) -> None:
        """End a request."""
        self.held = [block for block in self.held if block.owner != owner]
        self.pool.free_all(owner)

    @precondition(lambda self: self.handles)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        """Drop a buffer, of a held block or by a handle kept from before."""
        block, _ = data.draw(st.sampled_from(self.handles))
        self.storage.release(block)
        self.model.pop(block.block_id, None)

    @rule(stream=st.sampled_from("kv"), left=st.integers(1, 6))
    def shrink(self, stream: str, left: int) -> None:
        """Retire ids; their buffers go."""
        self.pool.shrink(stream, left)

    @rule()
    def evaluate(self) -> None:
        """Evaluating changes no row."""
        self.storage.evaluate()
        usage = self.storage.usage()
        assert usage.evaluated_bytes == usage.written_bytes
        assert usage.pending_writes == 0

    @invariant()
    def counts_are_sums(self) -> None:
        """The bytes of buffers, not of blocks, and never more buffers than blocks."""
        check_books(self.storage)
        assert self.storage.usage().n_buffers <= self.pool.stats.n_blocks


StorageMachine.TestCase.settings = settings(
    max_examples=80,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestStorageMachine = StorageMachine.TestCase
