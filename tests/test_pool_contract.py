"""The public page of the block pool, line by line, and what it leaves open as it was decided."""

from __future__ import annotations

import copy
import dataclasses
import gc
import inspect
import math
import pickle
import subprocess
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest

from veloxquant_mlx.core.exceptions import (
    ArgumentTypeError,
    BlockPoolExhaustedError,
    OwnerAlreadyActiveError,
    PoolError,
    PoolReentryError,
)
from veloxquant_mlx.memory import block_pool
from veloxquant_mlx.memory.block_pool import (
    AllocationStats,
    Block,
    BlockPoolAllocator,
    PoolConfig,
)

pytestmark = pytest.mark.timeout(60)

Ids = list[int]


def unified(n_blocks: int = 8, **options: Any) -> BlockPoolAllocator:
    """Return a pool with one free list."""
    return BlockPoolAllocator(PoolConfig(n_blocks=n_blocks, separate_kv=False, **options))


def separate(n_blocks: int = 8, **options: Any) -> BlockPoolAllocator:
    """Return a pool with a free list for k and one for v."""
    return BlockPoolAllocator(PoolConfig(n_blocks=n_blocks, **options))


def ids(blocks: list[Block]) -> Ids:
    """Return the ids of some blocks."""
    return [block.block_id for block in blocks]


def figures(pool: BlockPoolAllocator) -> tuple[object, ...]:
    """Return everything that a refused call must leave alone."""
    stats = pool.stats
    streams = ("k", "v") if pool.config.separate_kv else ("kv",)
    return (
        stats.n_blocks,
        stats.n_allocations,
        stats.n_frees,
        stats.n_reused,
        stats.n_grown,
        stats.n_retired,
        stats.peak_blocks_in_use,
        stats.blocks_in_use(),
        stats.fragmentation(),
        [pool.n_free(stream) for stream in streams],
        [[(*ids([b]), b.n_used, b.format) for b in pool.blocks_for(o)] for o in (1, 2, "1")],
        len(pool.history),
    )


# -- PoolConfig -----------------------------------------------------------------------------------


def test_config_defaults_and_positions() -> None:
    """PoolConfig has the page's five fields in the page's order, with its defaults."""
    config = PoolConfig()
    shown = (config.block_size, config.n_blocks, config.separate_kv)
    assert shown == (16, 1024, True)
    assert (config.grow_on_exhaustion, config.max_blocks) == (False, None)
    names = ["block_size", "n_blocks", "separate_kv", "grow_on_exhaustion", "max_blocks"]
    assert list(inspect.signature(PoolConfig).parameters) == names
    assert PoolConfig(8, 4, False, True, 9) == PoolConfig(
        block_size=8, n_blocks=4, separate_kv=False, grow_on_exhaustion=True, max_blocks=9
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("block_size", 0),
        ("block_size", -16),
        ("n_blocks", -1),
        ("max_blocks", -1),
    ],
)
def test_config_out_of_range(name: str, value: int) -> None:
    """A size below its minimum is a ValueError that names the field and the value."""
    with pytest.raises(ValueError, match=name) as caught:
        PoolConfig(**{name: value})  # type: ignore[arg-type]
    assert str(value) in str(caught.value)


def test_config_travels() -> None:
    """A config is a value: it can be copied, pickled, compared and hashed."""
    config = PoolConfig(block_size=4, n_blocks=3)
    assert copy.deepcopy(config) == config == pickle.loads(pickle.dumps(config))
    assert hash(config) == hash(PoolConfig(block_size=4, n_blocks=3))


def test_config_defaults_are_on_the_class() -> None:
    """As the page lists them; and a name that is no field is refused like one that is."""
    assert (PoolConfig.block_size, PoolConfig.n_blocks, PoolConfig.max_blocks) == (16, 1024, None)
    for name in ("n_blocks", "blocks"):
        with pytest.raises(AttributeError, match=name):
            setattr(PoolConfig(), name, 3)


def test_pool_shows_its_config() -> None:
    """`config` is the one given, the default one when none was."""
    config = PoolConfig(n_blocks=2)
    assert BlockPoolAllocator(config).config is config
    assert BlockPoolAllocator().config == PoolConfig()
    with pytest.raises(TypeError):
        BlockPoolAllocator(17)  # type: ignore[arg-type]


def test_max_blocks_is_ignored_without_growth() -> None:
    """A cap does not cut the initial blocks of a pool that never grows."""
    pool = unified(4, max_blocks=4)
    assert pool.stats.n_blocks == 4


# -- Block ----------------------------------------------------------------------------------------


def test_block_fields() -> None:
    """A block has the page's fields, in the page's order and with its defaults."""
    names = ["block_id", "stream", "format", "n_used", "owner", "ever_allocated"]
    assert list(inspect.signature(Block).parameters) == names
    block = Block(3)
    assert (block.block_id, block.stream, block.format) == (3, "kv", "fp16")
    assert (block.n_used, block.owner, block.ever_allocated) == (0, None, False)
    block = Block(5, "k", "int2", 7, 9, True)
    assert (block.block_id, block.stream, block.format) == (5, "k", "int2")
    assert (block.n_used, block.owner, block.ever_allocated) == (7, 9, True)


def test_block_says_what_it_holds() -> None:
    """The fields of a block follow what the pool's books say about it."""
    pool = separate()
    k_block = pool.allocate("k", 3, "req", format="int4")[0]
    assert (k_block.stream, k_block.format, k_block.n_used) == ("k", "int4", 3)
    assert (k_block.owner, k_block.ever_allocated) == ("req", True)
    pool.free([k_block])
    assert (k_block.owner, k_block.n_used, k_block.ever_allocated) == (None, 0, True)
    again = pool.allocate("k", 5, 2)[0]
    assert again is k_block, "one object an id, for the life of the pool"
    assert (k_block.owner, k_block.format, k_block.n_used) == (2, "fp16", 5)


def test_unified_blocks_are_kv() -> None:
    """A unified pool ignores the stream asked for: its blocks are always "kv"."""
    pool = unified()
    for stream in ("k", "v", "kv"):
        assert {b.stream for b in pool.allocate(stream, 20, 1)} == {"kv"}


@pytest.mark.parametrize(
    "name", ["block_id", "stream", "format", "n_used", "owner", "ever_allocated", "lease"]
)
def test_block_fields_are_read_only(name: str) -> None:
    """No field of a pool's block can be set or deleted from outside."""
    pool = unified()
    block = pool.allocate("k", 3, 1)[0]
    before = figures(pool)
    with pytest.raises(AttributeError):
        setattr(block, name, getattr(block, name))
    with pytest.raises(AttributeError):
        delattr(block, name)
    assert figures(pool) == before


def test_block_has_no_room_for_other_attributes() -> None:
    """A misspelt attribute is an error and not a silent note on the block."""
    block = unified().allocate("k", 3, 1)[0]
    with pytest.raises(AttributeError):
        block.n_user = 3  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "clone",
    [copy.copy, copy.deepcopy, lambda block: pickle.loads(pickle.dumps(block))],
    ids=["copy", "deepcopy", "pickle"],
)
def test_copies_of_a_block_are_detached_values(clone: Callable[[Block], Block]) -> None:
    """A copy keeps the fields of its moment and is nothing that a pool accepts."""
    pool = unified()
    block = pool.allocate("k", 3, 1, "int4")[0]
    value = clone(block)
    assert value is not block
    assert value != block
    pool.free_all(1)
    shown = (value.block_id, value.stream, value.format, value.n_used, value.owner)
    assert shown == (block.block_id, "kv", "int4", 3, 1)
    assert value.ever_allocated is True
    assert pool.refusal(value) == "copied"


def test_leases() -> None:
    """One unbroken holding of (owner, stream, format) is one lease; a dead one stays dead."""
    pool = separate(12)
    first, second = pool.allocate("k", 16, 1)[0], pool.allocate("k", 16, 1)[0]
    lease = first.lease
    assert second.lease is lease
    assert lease is not None
    assert (lease.live, lease.owner, lease.stream, lease.format) == (True, 1, "k", "fp16")
    others = [
        pool.allocate("v", 16, 1)[0],
        pool.allocate("k", 16, 2)[0],
        pool.allocate("k", 16, 1, "int4")[0],
    ]
    assert len({id(b.lease) for b in [first, *others]}) == 4
    pool.free([first])
    assert second.lease is lease
    assert lease.live, "a block is still held"
    pool.free([second])
    assert not lease.live
    third = pool.allocate("k", 16, 1)[0]
    assert third.lease is not lease
    assert not lease.live


# -- AllocationStats ------------------------------------------------------------------------------


def test_stats_fields() -> None:
    """AllocationStats can be built as the page says, and derives the rest."""
    names = [
        "n_blocks",
        "n_allocations",
        "n_frees",
        "n_reused",
        "n_exhausted",
        "n_grown",
        "n_retired",
        "peak_blocks_in_use",
        "_fragmented_count",
    ]
    assert list(inspect.signature(AllocationStats).parameters)[:9] == names
    stats = AllocationStats(8, 5, 2, 1, 1, 4, 3, 4, 2)
    assert [getattr(stats, name) for name in names[:-1]] == [8, 5, 2, 1, 1, 4, 3, 4]
    assert stats.blocks_in_use() == 3
    assert stats.fragmentation() == 0.25
    fresh = AllocationStats(n_blocks=7)
    assert [getattr(fresh, name) for name in names[1:-1]] == [0] * 7
    assert (fresh.blocks_in_use(), fresh.fragmentation()) == (0, 0.0)


def test_fragmentation_without_blocks() -> None:
    """No blocks, no fragmentation, no division by zero."""
    assert AllocationStats(0).fragmentation() == 0.0
    assert unified(0).stats.fragmentation() == 0.0
    assert "nan" not in unified(0).stats.to_prometheus().lower()


def test_a_lease_cannot_be_copied() -> None:
    """A copy would be live without standing for a holding."""
    pool = unified()
    block = pool.allocate("k", 16, 1)[0]
    for make in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="Lease cannot be copied"):
            make(block.lease)
    assert copy.copy(block).owner == 1, "a copied block has a lease of its own"


def test_blocks_in_use_of_a_kept_stats_object() -> None:
    """One number of one moment: it counts what was queued, as `snapshot` does."""
    pool = unified()
    live = pool.stats
    blocks = pool.allocate("k", 40, 1)
    pool.free_held_later(blocks, blocks[0].lease)
    assert live.blocks_in_use() == 0


def test_live_stats_can_be_replaced() -> None:
    """`dataclasses.replace` makes a value of it, as of any stats."""
    pool = unified()
    pool.allocate("k", 40, 1)
    changed = dataclasses.replace(pool.stats, n_frees=1)
    assert type(changed) is AllocationStats
    assert (changed.n_allocations, changed.n_frees, changed.blocks_in_use()) == (3, 1, 2)
    assert dataclasses.asdict(pool.stats)["n_allocations"] == 3
    assert pool.stats.n_frees == 0


def test_stats_is_live_and_snapshot_is_not() -> None:
    """`stats` is one live object; a snapshot keeps what it saw."""
    pool = unified()
    live = pool.stats
    assert isinstance(live, AllocationStats)
    before = live.snapshot()
    assert isinstance(before, AllocationStats)
    pool.allocate("k", 40, 1)
    assert pool.stats is live
    assert (live.n_allocations, live.blocks_in_use()) == (3, 3)
    assert (before.n_allocations, before.blocks_in_use()) == (0, 0)
    assert live.snapshot() is not live.snapshot()
    assert (before.snapshot().n_allocations, before.snapshot().n_blocks) == (0, 8)


def test_live_stats_of_a_dropped_pool() -> None:
    """The stats object may outlive its pool and then still tells its last figures."""
    pool = unified()
    stats = pool.stats
    pool.allocate("k", 40, 1)
    del pool
    gc.collect()
    assert (stats.n_allocations, stats.snapshot().n_allocations) == (3, 3)


def test_counters_of_one_life() -> None:
    """Every counter of the page, one event at a time."""
    pool = unified(4, grow_on_exhaustion=True, max_blocks=6)
    stats = pool.stats
    first = pool.allocate("k", 50, 1)
    assert (stats.n_allocations, stats.n_reused, stats.peak_blocks_in_use) == (4, 0, 4)
    assert stats.fragmentation() == 0.25
    pool.free(first[:1])
    assert (stats.n_frees, stats.blocks_in_use()) == (1, 3)
    pool.allocate("k", 33, 2)
    assert (stats.n_allocations, stats.n_reused, stats.n_grown, stats.n_blocks) == (7, 1, 2, 6)
    assert stats.peak_blocks_in_use == 6
    with pytest.raises(BlockPoolExhaustedError):
        pool.allocate("k", 1, 3)
    assert (stats.n_exhausted, stats.n_allocations, stats.n_blocks) == (1, 7, 6)
    pool.free_all(1)
    pool.free_all(2)
    assert (stats.n_frees, stats.blocks_in_use(), stats.fragmentation()) == (7, 0, 0.0)
    assert pool.shrink("k", 1) == 5
    assert (stats.n_retired, stats.n_blocks, stats.peak_blocks_in_use) == (5, 1, 6)


def test_fragmentation_counts_partly_filled_blocks() -> None:
    """Only 0 < n_used < block_size counts, over managed blocks."""
    pool = unified(8)
    blocks = pool.allocate("k", 16 * 3 + 1, 1)
    assert [b.n_used for b in blocks] == [16, 16, 16, 1]
    assert pool.stats.fragmentation() == 1 / 8
    for n_used, expected in ((0, 0.0), (15, 1 / 8), (16, 0.0), (1, 1 / 8)):
        pool.mark_used(blocks[-1], n_used)
        assert (blocks[-1].n_used, pool.stats.fragmentation()) == (n_used, expected)
    pool.shrink("k", 0)
    assert pool.stats.fragmentation() == 1 / 4


# -- history --------------------------------------------------------------------------------------


def test_history_is_a_new_deque_of_snapshots() -> None:
    """`history` is the caller's own deque of AllocationStats, oldest first."""
    pool = unified()
    assert pool.history == deque()
    pool.allocate("k", 20, 1)
    pool.free_all(1)
    history = pool.history
    assert isinstance(history, deque)
    assert all(isinstance(entry, AllocationStats) for entry in history)
    assert [entry.blocks_in_use() for entry in history] == [2, 0]
    history.clear()
    assert len(pool.history) == 2
    assert pool.history is not pool.history


def test_history_entries_are_frozen() -> None:
    """A record of the past cannot be rewritten."""
    pool = unified()
    pool.allocate("k", 20, 1)
    entry = pool.history[-1]
    with pytest.raises(AttributeError):
        entry.n_allocations = 0  # type: ignore[misc]
    assert pool.history[-1].n_allocations == 2


def test_history_keeps_the_newest_256() -> None:
    """Old records make room for new ones."""
    pool = unified()
    for _ in range(200):
        pool.allocate("k", 20, 1)
        pool.free_all(1)
    history = pool.history
    assert len(history) == 256
    assert [e.n_allocations + e.n_frees for e in history] == [2 * i for i in range(145, 401)]


def test_history_records_what_changed_or_failed() -> None:
    """Allocate, also a failed one, free, free_all and shrink enter; no-ops do not."""
    pool = unified(4)

    def n_new(call: Callable[[], object]) -> int:
        before = len(pool.history)
        call()
        return len(pool.history) - before

    def fail() -> None:
        with pytest.raises(BlockPoolExhaustedError):
            pool.allocate("k", 999, 2)

    blocks = pool.allocate("k", 40, 1)
    assert n_new(lambda: pool.allocate("k", 4, 1)) == 1
    assert n_new(fail) == 1
    assert pool.history[-1].n_exhausted == 1
    assert n_new(lambda: pool.free(blocks[:1])) == 1
    assert n_new(lambda: pool.shrink("k", 0)) == 1
    assert n_new(lambda: pool.mark_used(blocks[1], 3)) == 0
    assert n_new(lambda: pool.free([])) == 0
    assert n_new(lambda: pool.free(blocks[:1])) == 0
    assert n_new(lambda: pool.free_all("nobody")) == 0
    assert n_new(lambda: pool.shrink("k", 7)) == 0
    assert n_new(lambda: pool.register_owner("r")) == 0
    assert n_new(lambda: pool.release_owner("r")) == 0
    assert n_new(lambda: pool.n_free("k")) == 0
    assert n_new(lambda: pool.free_all(1)) == 1
    assert n_new(lambda: pool.free_all(1)) == 0


# -- to_prometheus --------------------------------------------------------------------------------

PROMETHEUS_NAMES = {
    "blocks_in_use": "gauge",
    "blocks_total": "gauge",
    "fragmentation": "gauge",
    "peak_blocks_in_use": "gauge",
    "allocations_total": "counter",
    "frees_total": "counter",
    "reused_total": "counter",
    "exhausted_total": "counter",
    "grown_total": "counter",
    "retired_total": "counter",
}


@pytest.mark.parametrize("prefix", ["veloxquant_block_pool", "my_pool"])
def test_prometheus_text(prefix: str) -> None:
    """The text has the ten contract metrics, each with its type line, newline-terminated."""
    stats = AllocationStats(8, 5, 2, 1, 7, 4, 3, 4, 2)
    text = stats.to_prometheus(prefix) if prefix == "my_pool" else stats.to_prometheus()
    assert text.endswith("\n")
    lines = text.splitlines()
    types = dict(line.split(" ")[2:] for line in lines if line.startswith("# TYPE "))
    assert types == {f"{prefix}_{name}": kind for name, kind in PROMETHEUS_NAMES.items()}
    samples = dict(line.split(" ") for line in lines if not line.startswith("#"))
    values = {name.removeprefix(f"{prefix}_"): float(v) for name, v in samples.items()}
    assert values == {
        "blocks_in_use": 3,
        "blocks_total": 8,
        "fragmentation": 0.25,
        "peak_blocks_in_use": 4,
        "allocations_total": 5,
        "frees_total": 2,
        "reused_total": 1,
        "exhausted_total": 7,
        "grown_total": 4,
        "retired_total": 3,
    }


# -- owners ---------------------------------------------------------------------------------------


def test_register_owner_guards_against_reuse() -> None:
    """An id that is registered, or holds blocks, cannot be registered again."""
    pool = unified()
    pool.register_owner(1)
    with pytest.raises(OwnerAlreadyActiveError, match="1"):
        pool.register_owner(1)
    pool.allocate("k", 16, 1)
    pool.allocate("k", 16, 1)
    pool.allocate("k", 16, 2)
    for owner in (1, 2):
        with pytest.raises(OwnerAlreadyActiveError):
            pool.register_owner(owner)


@pytest.mark.parametrize("n_tokens", [16, 20])
@pytest.mark.parametrize("warm", [False, True])
def test_registration_lasts_until_release_or_free_all(n_tokens: int, warm: bool) -> None:
    """Freeing the last block does not end an explicit registration."""
    pool = unified()
    if warm:
        pool.free(pool.allocate("k", 100, 2))
    pool.register_owner(1)
    pool.free(pool.allocate("k", n_tokens, 1))
    with pytest.raises(OwnerAlreadyActiveError):
        pool.register_owner(1)
    pool.release_owner(1)
    pool.register_owner(1)
    pool.allocate("k", n_tokens, 1)
    pool.free_all(1)
    pool.register_owner(1)
    pool.free_all(1)
    pool.free(pool.allocate("k", n_tokens, 1))
    pool.register_owner(1)


def test_an_allocating_owner_is_active_while_it_holds_blocks() -> None:
    """Without registration, the last block freed ends the owner's activity."""
    pool = unified()
    blocks = pool.allocate("k", 20, 1)
    pool.free(blocks[:1])
    with pytest.raises(OwnerAlreadyActiveError):
        pool.register_owner(1)
    pool.free(blocks[1:])
    pool.register_owner(1)


def test_release_owner_frees_nothing() -> None:
    """release_owner ends the registration; held blocks stay held and keep the id active."""
    pool = unified()
    pool.register_owner(1)
    blocks = pool.allocate("k", 20, 1)
    pool.release_owner(1)
    assert pool.blocks_for(1) == blocks
    with pytest.raises(OwnerAlreadyActiveError):
        pool.register_owner(1)
    pool.free(blocks)
    pool.register_owner(1)
    pool.release_owner("never seen")


def test_int_and_str_owners_are_told_apart() -> None:
    """1 and "1" are two owners; 0 and the like are owners as good as any."""
    pool = unified(16)
    for owner in (1, "1", 0, -1, 2**70):
        pool.register_owner(owner)
        block = pool.allocate("k", 16, owner)[0]
        assert pool.blocks_for(owner) == [block]
        assert (block.owner, type(block.owner)) == (owner, type(owner))
    pool.free_all("1")
    assert [len(pool.blocks_for(owner)) for owner in (1, "1", 0)] == [1, 0, 1]


def test_fresh_owner_is_unique() -> None:
    """Ids for callers that have none never repeat, also across pools."""
    one, other = unified(), separate()
    names = [pool.fresh_owner() for pool in (one, other) for _ in range(50)]
    assert len(set(names)) == 100
    assert all(isinstance(name, str) and name.startswith("anon-") for name in names)


def test_error_classes() -> None:
    """The errors are what callers of the page catch."""
    assert issubclass(BlockPoolExhaustedError, PoolError)
    assert issubclass(BlockPoolExhaustedError, RuntimeError)
    assert issubclass(OwnerAlreadyActiveError, PoolError)
    assert issubclass(OwnerAlreadyActiveError, ValueError)
    assert issubclass(PoolReentryError, PoolError)
    assert issubclass(PoolReentryError, RuntimeError)
    assert issubclass(ArgumentTypeError, TypeError)
    assert issubclass(ArgumentTypeError, ValueError)


# -- allocate -------------------------------------------------------------------------------------


def test_the_errors_are_found_beside_the_pool() -> None:
    """Where code written for the package of the same API looks for them."""
    assert block_pool.BlockPoolExhaustedError is BlockPoolExhaustedError
    assert block_pool.OwnerAlreadyActiveError is OwnerAlreadyActiveError


def test_page_example() -> None:
    """The example of the page runs as it stands there."""
    request_id = 7
    pool = BlockPoolAllocator(PoolConfig(block_size=16, n_blocks=256))
    blocks = pool.allocate(stream="k", n_tokens=40, owner=request_id, format="int2")
    assert [(b.stream, b.format, b.n_used, b.owner) for b in blocks] == [
        ("k", "int2", 16, 7),
        ("k", "int2", 16, 7),
        ("k", "int2", 8, 7),
    ]
    pool.free_all(owner=request_id)
    assert pool.n_free("k") == 128


@pytest.mark.parametrize(
    ("n_tokens", "fills"),
    [(1, [1]), (15, [15]), (16, [16]), (17, [16, 1]), (32, [16, 16]), (40, [16, 16, 8])],
)
def test_allocate_rounds_up(n_tokens: int, fills: Ids) -> None:
    """As many blocks as the tokens need, all full but the last."""
    assert [b.n_used for b in unified().allocate("k", n_tokens, 1)] == fills


def test_a_fresh_pool_hands_out_ascending_ids() -> None:
    """Blocks never handed out come by id; k owns the lower half, v the upper."""
    assert ids(unified().allocate("k", 16 * 8, 1)) == list(range(8))
    pool = separate(8)
    assert ids(pool.allocate("v", 33, 1)) == [4, 5, 6]
    assert ids(pool.allocate("k", 64, 1)) == [0, 1, 2, 3]


@pytest.mark.parametrize(("n_blocks", "n_k", "n_v"), [(0, 0, 0), (1, 1, 0), (2, 1, 1), (5, 3, 2)])
def test_the_odd_block_goes_to_k(n_blocks: int, n_k: int, n_v: int) -> None:
    """Separate streams share the blocks, k the larger half."""
    pool = separate(n_blocks)
    assert (pool.n_free("k"), pool.n_free("v")) == (n_k, n_v)
    if n_k:
        assert ids(pool.allocate("k", 16 * n_k, 1)) == list(range(n_k))
    if n_v:
        assert ids(pool.allocate("v", 16 * n_v, 1)) == list(range(n_k, n_blocks))


def test_streams_never_lend_to_each_other() -> None:
    """With separate streams, a free v block does not help k."""
    pool = separate(4)
    pool.allocate("k", 32, 1)
    with pytest.raises(BlockPoolExhaustedError):
        pool.allocate("k", 1, 1)
    assert pool.n_free("v") == 2


def test_freed_blocks_come_back_last_in_first_out() -> None:
    """A just-freed block is the next one handed out, before blocks never handed out."""
    pool = unified(8)
    blocks = pool.allocate("k", 16 * 5, 1)
    pool.free([blocks[1], blocks[4]])
    pool.free([blocks[2]])
    assert ids(pool.allocate("k", 16 * 4, 2)) == [2, 4, 1, 5]


def test_free_all_pushes_lease_by_lease() -> None:
    """free_all gives back an owner's leases one after the other, each in allocation order."""
    pool = unified(8)
    first = pool.allocate("k", 16, 1, "fp16")
    second = pool.allocate("k", 16, 1, "int4")
    third = pool.allocate("k", 32, 1, "fp16")
    assert ids(first + second + third) == [0, 1, 2, 3]
    pool.free_all(1)
    assert ids(pool.allocate("k", 16 * 4, 2)) == [1, 3, 2, 0]


def test_blocks_for_is_in_allocation_order() -> None:
    """k and v stand interleaved as they were allocated, freed ones drop out of the row."""
    pool = separate(12)
    rows = [pool.allocate(stream, 20, 1) for stream in ("k", "v", "k", "v")]
    expected = [block for row in rows for block in row]
    assert pool.blocks_for(1) == expected
    assert all(a is b for a, b in zip(pool.blocks_for(1), expected, strict=True))
    pool.free([expected[2], expected[5]])
    expected = [b for i, b in enumerate(expected) if i not in (2, 5)]
    expected += pool.allocate("v", 1, 1, "int2")
    assert pool.blocks_for(1) == expected
    assert pool.blocks_for("nobody") == []
    pool.blocks_for(1).clear()
    assert pool.blocks_for(1) == expected


def test_allocate_is_all_or_nothing() -> None:
    """Exhaustion allocates nothing, registers nobody and keeps no growth."""
    pool = unified(4, grow_on_exhaustion=True, max_blocks=5)
    pool.allocate("k", 40, 1)
    before = figures(pool)[:-1]
    with pytest.raises(BlockPoolExhaustedError) as caught:
        pool.allocate("k", 16 * 3, 2)
    assert figures(pool)[:-1] == before
    assert pool.stats.n_exhausted == 1
    assert "3" in str(caught.value), "the message says how many blocks were wanted"
    pool.register_owner(2)


def test_growth_adds_just_enough() -> None:
    """Growth appends ids at the end, only for the blocks missing, in the stream missing them."""
    pool = separate(4, grow_on_exhaustion=True)
    assert ids(pool.allocate("k", 16 * 5, 1)) == [0, 1, 4, 5, 6]
    assert (pool.stats.n_grown, pool.stats.n_blocks, pool.n_free("k")) == (3, 7, 0)
    assert pool.n_free("v") == 2
    assert ids(pool.allocate("v", 16 * 3, 1)) == [2, 3, 7]


def test_growth_cap_is_over_all_streams() -> None:
    """max_blocks bounds the managed blocks of both streams together; retired ones do not count."""
    pool = separate(4, grow_on_exhaustion=True, max_blocks=5)
    pool.allocate("k", 16 * 3, 1)
    with pytest.raises(BlockPoolExhaustedError):
        pool.allocate("v", 16 * 3, 1)
    assert (pool.stats.n_grown, pool.n_free("v")) == (1, 2)
    pool.shrink("v", 1)
    assert ids(pool.allocate("k", 16, 1)) == [5], "a retired id never comes back"
    with pytest.raises(BlockPoolExhaustedError):
        pool.allocate("k", 16, 1)


def test_an_empty_pool_can_grow() -> None:
    """n_blocks=0 is a pool that lives by growth."""
    pool = separate(0, grow_on_exhaustion=True)
    assert ids(pool.allocate("v", 20, 1)) == [0, 1]
    with pytest.raises(BlockPoolExhaustedError):
        separate(0).allocate("v", 20, 1)


@pytest.mark.parametrize("n_tokens", [0, -1, -(2**70)])
def test_allocate_needs_tokens(n_tokens: int) -> None:
    """n_tokens <= 0 is a ValueError that names the figure."""
    pool = unified()
    with pytest.raises(ValueError, match=str(n_tokens)):
        pool.allocate("k", n_tokens, 1)
    pool.register_owner(1)


@pytest.mark.parametrize("n_tokens", [2**55, sys.maxsize, 2**70])
@pytest.mark.parametrize("options", [{}, {"max_blocks": 9}, {"max_blocks": 2**80}])
def test_more_than_there_can_be(n_tokens: int, options: dict[str, int]) -> None:
    """Exhaustion, whether the pool, its limit or memory ends first; nothing is kept of it."""
    pool = unified(grow_on_exhaustion=bool(options), **options)
    for call in (lambda: pool.allocate("k", n_tokens, 1), lambda: pool.allocate_kv(n_tokens, 1)):
        with pytest.raises(BlockPoolExhaustedError):
            call()
    assert (pool.n_free(), pool.stats.n_grown, pool.stats.n_exhausted) == (8, 0, 2)
    pool.register_owner(1)


@pytest.mark.parametrize("n_tokens", [2**63, 2**70])
def test_growth_without_limit_ends_where_memory_does(n_tokens: int) -> None:
    """An error at once: not a process that eats all there is until it is killed."""
    pool = separate(grow_on_exhaustion=True)
    with pytest.raises(BlockPoolExhaustedError, match="memory"):
        pool.allocate_kv(n_tokens, 1)
    assert (pool.n_free("k"), pool.n_free("v"), pool.stats.n_grown) == (4, 4, 0)
    pool.allocate_kv(160, 1)


@pytest.mark.parametrize("n_tokens", [None, True, 1.0, math.nan, "16", [16]])
def test_allocate_needs_whole_tokens(n_tokens: Any) -> None:
    """A token count of another type is refused, before anything changes."""
    pool = unified()
    before = figures(pool)
    with pytest.raises(ArgumentTypeError):
        pool.allocate("k", n_tokens, 1)
    assert figures(pool) == before


@pytest.mark.parametrize("stream", ["", "K", "key", "kv ", None, 1, b"k", True])
@pytest.mark.parametrize("build", [unified, separate])
def test_unknown_streams(build: Callable[[], BlockPoolAllocator], stream: Any) -> None:
    """A stream that the pool does not have is a ValueError everywhere."""
    pool = build()
    before = figures(pool)
    for call in (
        lambda: pool.allocate(stream, 1, 1),
        lambda: pool.n_free(stream),
        lambda: pool.shrink(stream, 0),
    ):
        with pytest.raises(ValueError, match="stream"):
            call()
    assert figures(pool) == before


def test_kv_is_no_stream_of_a_separate_pool() -> None:
    """Only the one list of a unified pool goes by the name "kv"."""
    with pytest.raises(ValueError, match="kv"):
        separate().n_free("kv")
    assert unified(8).n_free("kv") == unified(8).n_free() == 8


@pytest.mark.parametrize("tag", ["fp16", "int2", "fp8_x", "x" * 64, "κ"])
def test_any_tag_is_a_format(tag: str) -> None:
    """A format is a tag: any text of 1 to 64 characters."""
    assert unified().allocate("k", 1, 1, tag)[0].format == tag


@pytest.mark.parametrize("tag", ["", "x" * 65])
def test_formats_out_of_range(tag: str) -> None:
    """An empty tag and an endless one are ValueErrors."""
    pool = unified()
    with pytest.raises(ValueError, match="format"):
        pool.allocate("k", 1, 1, tag)
    pool.register_owner(1)


@pytest.mark.parametrize("tag", [None, 16, True, b"fp16", ["fp16"]])
def test_formats_of_another_type(tag: Any) -> None:
    """A tag of another type is refused."""
    pool = unified()
    with pytest.raises(ArgumentTypeError):
        pool.allocate("k", 1, 1, tag)
    pool.register_owner(1)


# -- allocate_kv ----------------------------------------------------------------------------------


def test_allocate_kv() -> None:
    """One call for both streams; a unified pool serves both from its one list."""
    pool = separate(8)
    k_blocks, v_blocks = pool.allocate_kv(20, 1, "int4")
    assert (ids(k_blocks), ids(v_blocks)) == ([0, 1], [4, 5])
    assert {b.format for b in k_blocks + v_blocks} == {"int4"}
    assert pool.blocks_for(1) == k_blocks + v_blocks
    one = unified(8)
    k_blocks, v_blocks = one.allocate_kv(20, 1)
    assert sorted(ids(k_blocks + v_blocks)) == [0, 1, 2, 3]
    assert (len(k_blocks), len(v_blocks)) == (2, 2)
    assert {b.stream for b in k_blocks + v_blocks} == {"kv"}


def test_allocate_kv_is_one_record_of_history() -> None:
    """One call, one record, like any other allocation."""
    pool = separate(8)
    pool.allocate_kv(20, 1)
    assert [entry.n_allocations for entry in pool.history] == [4]


def test_free_all_is_one_record_of_history() -> None:
    """One call, one record, however many leases the owner has."""
    pool = separate(8)
    pool.allocate("k", 20, 1)
    pool.allocate("v", 20, 1)
    pool.free_all(1)
    assert [entry.n_frees for entry in pool.history] == [0, 0, 4]


@pytest.mark.parametrize("grow", [False, True])
def test_allocate_kv_is_all_or_nothing(grow: bool) -> None:
    """When one stream falls short, the other gives nothing and nothing grows."""
    pool = separate(8, grow_on_exhaustion=grow, max_blocks=10)
    pool.allocate("v", 16 * 3, 2)
    before = figures(pool)[:-1]
    with pytest.raises(BlockPoolExhaustedError):
        pool.allocate_kv(16 * 4, 1)
    assert figures(pool)[:-1] == before
    assert pool.stats.n_exhausted == 1
    pool.register_owner(1)


def test_allocate_kv_n_filled() -> None:
    """n_filled says how many of the slots hold tokens, 0 to n_tokens."""
    pool = separate(8)
    assert len(pool.allocate_kv(20, 1, n_filled=0)[0]) == 2
    assert len(pool.allocate_kv(20, 1, n_filled=20)[0]) == 2
    bad: list[Any] = [-1, 21, True, 1.0, "3"]
    for n_filled in bad:
        with pytest.raises(ValueError, match="n_filled"):
            pool.allocate_kv(20, 1, n_filled=n_filled)


# -- free -----------------------------------------------------------------------------------------


def test_free_takes_any_iterable() -> None:
    """Lists, tuples, sets and generators of blocks, in any order."""
    pool = unified(8)
    shapes: list[Callable[[list[Block]], Any]] = [
        list,
        tuple,
        set,
        reversed,
        lambda blocks: (b for b in blocks),
        dict.fromkeys,
    ]
    for shape in shapes:
        pool.free(shape(pool.allocate("k", 100, 1)))
        assert pool.stats.blocks_in_use() == 0


def test_free_of_a_generator_that_uses_the_pool() -> None:
    """The iterable is read before the pool is locked, so it may ask the pool."""
    pool = unified(8)
    blocks = pool.allocate("k", 100, 1)
    pool.free(b for b in blocks if pool.n_free("k") == 1)
    assert pool.n_free("k") == 8


def test_free_of_an_iterable_that_raises() -> None:
    """An error of the caller's own iterable reaches the caller; nothing was freed."""
    pool = unified(8)
    blocks = pool.allocate("k", 100, 1)

    def broken() -> Any:
        yield blocks[0]
        raise LookupError

    before = figures(pool)
    with pytest.raises(LookupError):
        pool.free(broken())
    assert figures(pool) == before


def test_free_with_owner_refuses_what_another_holds() -> None:
    """A handle kept past its release names the present holder; owner= protects that one."""
    pool = unified(8)
    old = pool.allocate("k", 40, 1)
    pool.free_all(1)
    new = pool.allocate("k", 40, 2)
    assert set(old) == set(new)
    pool.free(old, owner=1)
    assert pool.blocks_for(2) == new
    assert pool.rejected["stale"] == 3
    pool.free(old)
    assert pool.blocks_for(2) == [], "without owner= the call acts on the holder"


def test_rejected_is_by_reason() -> None:
    """Every refused block is counted under the reason of its refusal."""
    pool, other = unified(8), unified(8)
    held = pool.allocate("k", 40, 1)
    gone = pool.allocate("k", 1, 2)[0]
    pool.free([gone])
    pool.free([gone, copy.copy(held[0]), Block(0), other.allocate("k", 1, 1)[0]])
    assert pool.n_free("k") == 5
    pool.shrink("k", 0)
    pool.free([gone, held[0]], owner="someone else")
    counts = {reason: n for reason, n in pool.rejected.items() if n}
    assert counts == {"free": 1, "copied": 1, "foreign": 2, "retired": 1, "stale": 1}
    assert pool.stats.blocks_in_use() == 3


# -- free_all, free_held --------------------------------------------------------------------------


def test_free_all_of_a_stranger_is_nothing() -> None:
    """An owner that the pool never saw is no error."""
    pool = unified()
    before = figures(pool)
    assert pool.free_all("nobody") is None
    assert figures(pool) == before


def test_free_all_reaches_every_lease() -> None:
    """Blocks of both streams and of every format come back."""
    pool = separate(12)
    pool.allocate("k", 20, 1, "fp16")
    pool.allocate("v", 20, 1, "int4")
    pool.allocate_kv(5, 1, "int2")
    pool.allocate("k", 5, 2)
    pool.free_all(1)
    assert (pool.n_free("k"), pool.n_free("v")) == (5, 6)
    assert len(pool.blocks_for(2)) == 1


def test_free_held_frees_only_what_the_lease_holds() -> None:
    """Blocks that went to another lease meanwhile are left alone, without a count."""
    pool = unified(8)
    mine = pool.allocate("k", 40, 1)
    lease = mine[0].lease
    pool.free(mine[:1])
    theirs = pool.allocate("k", 16, 2)
    assert theirs == mine[:1]
    assert pool.free_held(mine, lease) == 2
    assert pool.free_held(mine, lease) == 0
    assert pool.free_held(mine) == 0
    assert pool.blocks_for(2) == theirs
    assert not any(pool.rejected.values())


def test_free_held_of_the_same_owner_come_back() -> None:
    """A later holding of the same owner, stream and format is another lease."""
    pool = unified(8)
    old = pool.allocate("k", 40, 1)
    lease = old[0].lease
    pool.free_all(1)
    new = pool.allocate("k", 40, 1)
    assert set(new) == set(old)
    assert pool.free_held(old, lease) == 0
    assert pool.blocks_for(1) == new


@pytest.mark.parametrize("how", ["n_free", "stats", "history", "blocks_for", "allocate"])
def test_free_held_later_is_done_at_the_next_call(how: str) -> None:
    """Whatever is asked next sees the queued blocks as free."""
    pool = unified(3)
    blocks = pool.allocate("k", 48, 1)
    pool.free_held_later(blocks, blocks[0].lease)
    asked: dict[str, Callable[[], object]] = {
        "n_free": lambda: pool.n_free("k") == 3,
        "stats": lambda: pool.stats.blocks_in_use() == 0 and pool.stats.n_frees == 3,
        "history": lambda: pool.history[-1].blocks_in_use() == 0,
        "blocks_for": lambda: pool.blocks_for(1) == [],
        "allocate": lambda: len(pool.allocate("k", 48, 2)) == 3,
    }
    assert asked[how]()


def test_queued_release_is_seen_by_a_kept_stats_object() -> None:
    """Fields of a stats object fetched before the queueing are not stale either."""
    pool = unified(3)
    stats = pool.stats
    blocks = pool.allocate("k", 48, 1)
    pool.free_held_later(blocks, blocks[0].lease)
    assert stats.snapshot().blocks_in_use() == 0


# -- n_free, shrink, mark_used, refusal -----------------------------------------------------------


def test_n_free_defaults_to_k() -> None:
    """n_free() is n_free("k")."""
    pool = separate(5)
    pool.allocate("k", 1, 1)
    assert (pool.n_free(), pool.n_free("k"), pool.n_free("v")) == (2, 2, 2)


def test_shrink_retires_free_blocks_only() -> None:
    """shrink goes down to target_free, says how many went, and never touches held blocks."""
    pool = separate(8)
    held = pool.allocate("k", 32, 1)
    assert pool.shrink("k", 1) == 1
    assert pool.shrink("k", 1) == 0
    assert pool.shrink("k", 9) == 0
    assert (pool.n_free("k"), pool.n_free("v"), pool.stats.n_blocks) == (1, 4, 7)
    assert pool.shrink("k", 0) == 1
    assert pool.blocks_for(1) == held
    pool.free_all(1)
    assert (pool.n_free("k"), pool.stats.n_retired) == (2, 2)


def test_shrink_keeps_the_hot_blocks_and_their_order() -> None:
    """Never-handed-out blocks go first, from the highest id; then those freed longest ago."""
    pool = unified(8)
    blocks = pool.allocate("k", 16 * 5, 1)
    pool.free([blocks[i] for i in (3, 0, 4, 1, 2)])
    pool.shrink("k", 6)
    assert ids(pool.allocate("k", 16 * 6, 2)) == [2, 1, 4, 0, 3, 5]
    pool.free([blocks[i] for i in (3, 0, 4, 1, 2)])
    pool.shrink("k", 3)
    assert ids(pool.allocate("k", 16 * 3, 3)) == [2, 1, 4]


@pytest.mark.parametrize("singly", [False, True])
def test_shrink_of_large_released_regions(singly: bool) -> None:
    """Whole requests that were released are retired from the oldest end, the rest stays LIFO."""
    pool = unified(60)
    for owner in (1, 2, 3):
        pool.allocate("k", 16 * 19, owner)
        last = pool.allocate("k", 16, owner)
        if singly:
            pool.free(last)
            pool.allocate("k", 16, owner)
    for owner in (1, 2, 3):
        pool.free_all(owner)
    assert pool.shrink("k", 25) == 35
    assert ids(pool.allocate("k", 16 * 25, 5)) == list(range(59, 34, -1))


@pytest.mark.parametrize("target", [-1, -(2**70)])
def test_shrink_target_out_of_range(target: int) -> None:
    """target_free < 0 is a ValueError."""
    pool = unified()
    before = figures(pool)
    with pytest.raises(ValueError, match="target_free"):
        pool.shrink("k", target)
    assert figures(pool) == before


class Listener:
    """Notes the retired ids, and asks the pool while it does."""

    def __init__(self, pool: BlockPoolAllocator) -> None:
        self.pool, self.seen = pool, list[list[int]]()

    def drop_retired(self, block_ids: list[int]) -> None:
        """Take the ids of one shrink."""
        self.seen.append(sorted(block_ids))
        assert self.pool.n_free("kv") == self.pool.stats.n_blocks


def test_retire_listener() -> None:
    """A listener hears the retired ids once, outside the lock, and is held weakly."""
    pool = unified(8)
    listener = Listener(pool)
    pool.add_retire_listener(listener)
    pool.shrink("k", 5)
    pool.shrink("k", 5)
    pool.shrink("k", 4)
    assert listener.seen == [[5, 6, 7], [4]]
    gone = weakref.ref(listener)
    del listener
    gc.collect()
    assert gone() is None
    assert pool.shrink("k", 0) == 4


def test_a_retire_listener_that_fails_keeps_none_from_hearing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The blocks are retired by then: shrink returns, each other listener hears every id."""

    class Failing:
        def drop_retired(self, block_ids: list[int]) -> None:
            block_ids.clear()
            raise OSError("listener")

    pool = unified(8)
    listeners: list[Failing | Listener] = [
        Failing(),
        Listener(pool),
        Failing(),
        Listener(pool),
        Failing(),
    ]
    for listener in listeners:
        pool.add_retire_listener(listener)
    assert pool.shrink("k", 6) == 2
    assert [x.seen for x in listeners if isinstance(x, Listener)] == [[[6, 7]], [[6, 7]]]
    assert caplog.text.count("a retire listener failed") == 3


def test_mark_used() -> None:
    """mark_used stores the fill of a held block and keeps fragmentation true."""
    pool = unified(4)
    block = pool.allocate("k", 16, 1)[0]
    assert pool.mark_used(block, 5) is None
    assert (block.n_used, pool.stats.fragmentation()) == (5, 0.25)
    pool.mark_used(block, 5)
    assert pool.stats.fragmentation() == 0.25
    pool.free([block])
    assert pool.stats.fragmentation() == 0.0


def test_mark_used_on_a_free_block() -> None:
    """The value is stored, the statistics stay, and the books count it."""
    pool = unified(4)
    block = pool.allocate("k", 16, 1)[0]
    pool.free([block])
    before = figures(pool)
    pool.mark_used(block, 7)
    assert block.n_used == 7
    assert figures(pool) == before
    assert pool.rejected["free"] == 1
    assert pool.allocate("k", 16, 2)[0] is block
    assert (block.n_used, pool.stats.fragmentation()) == (16, 0.0)


@pytest.mark.parametrize("n_used", [-1, 17, 2**70])
def test_mark_used_out_of_range(n_used: int) -> None:
    """Below 0 or above block_size is a ValueError; nothing changes."""
    pool = unified(4)
    block = pool.allocate("k", 3, 1)[0]
    before = figures(pool)
    with pytest.raises(ValueError, match=str(n_used)):
        pool.mark_used(block, n_used)
    assert figures(pool) == before


@pytest.mark.parametrize("bad", [None, 0, "block", object()])
def test_mark_used_and_refusal_need_a_block(bad: Any) -> None:
    """Anything but a Block is a mistake of the caller's code."""
    pool = unified(4)
    with pytest.raises(ArgumentTypeError):
        pool.mark_used(bad, 1)
    with pytest.raises(ArgumentTypeError):
        pool.refusal(bad)


def test_refusal() -> None:
    """refusal is None for a genuine held block, otherwise the reason, which it counts."""
    pool, other = unified(4), unified(4)
    block = pool.allocate("k", 3, 1)[0]
    assert pool.refusal(block) is None
    assert pool.refusal(block, owner=1) is None
    assert not any(pool.rejected.values())
    assert pool.refusal(block, owner=2) == "stale"
    assert pool.refusal(block, owner="1") == "stale"
    assert pool.refusal(copy.copy(block)) == "copied"
    assert pool.refusal(other.allocate("k", 3, 1)[0]) == "foreign"
    pool.free([block])
    assert pool.refusal(block) == "free"
    pool.shrink("k", 0)
    assert pool.refusal(block) == "retired"
    counts = {reason: n for reason, n in pool.rejected.items() if n}
    assert counts == {"stale": 2, "copied": 1, "foreign": 1, "free": 1, "retired": 1}


# -- token fill -----------------------------------------------------------------------------------


def n_tokens_in(pool: BlockPoolAllocator) -> int:
    """Return the token slots that the pool counts as filled."""
    n_slots = pool.stats.blocks_in_use() * pool.config.block_size
    return n_slots - sum(stream.slack for stream in pool._streams)


def test_token_fill_follows_the_calls() -> None:
    """Allocations fill what they ask for or say, mark_used and add_filled move it."""
    pool = separate(40)
    blocks = pool.allocate("k", 40, 1)
    assert n_tokens_in(pool) == 40
    k_blocks, v_blocks = pool.allocate_kv(40, 2, n_filled=5)
    assert n_tokens_in(pool) == 50
    pool.mark_used(blocks[0], 3)
    assert n_tokens_in(pool) == 37
    pool.add_filled(7, k_blocks[0].lease, v_blocks[0].lease)
    assert n_tokens_in(pool) == 51
    pool.add_filled(-2, k_blocks[0].lease)
    assert n_tokens_in(pool) == 49
    pool.free(blocks[:1])
    assert n_tokens_in(pool) == 46
    pool.free_all(2)
    assert n_tokens_in(pool) == 24
    pool.free_all(1)
    assert n_tokens_in(pool) == 0


def test_token_fill_stays_within_the_lease() -> None:
    """No call takes the fill below nothing or above the capacity; dead leases have none."""
    pool = unified(8)
    blocks = pool.allocate("k", 20, 1)
    other = pool.allocate("k", 16, 2)
    lease = blocks[0].lease
    pool.add_filled(10**9, lease)
    assert n_tokens_in(pool) == 48
    pool.free(blocks[:1])
    assert n_tokens_in(pool) == 32
    pool.add_filled(-(10**9), lease)
    assert n_tokens_in(pool) == 16
    pool.free(blocks)
    assert n_tokens_in(pool) == 16
    pool.add_filled(3, lease)
    assert n_tokens_in(pool) == 16
    pool.free(other)
    assert n_tokens_in(pool) == 0


@pytest.mark.parametrize("n_tokens", [None, True, 1.0, "3"], ids=repr)
def test_add_filled_needs_an_int(n_tokens: Any) -> None:
    """A fill of another type is refused."""
    pool = unified(8)
    lease = pool.allocate("k", 20, 1)[0].lease
    with pytest.raises(ArgumentTypeError):
        pool.add_filled(n_tokens, lease)
    assert n_tokens_in(pool) == 20


# -- wrong owners everywhere ----------------------------------------------------------------------

WRONG_OWNERS = [None, True, False, 1.0, math.nan, b"1", ("a",), [1], object()]


@pytest.mark.parametrize("owner", WRONG_OWNERS, ids=lambda owner: type(owner).__name__)
def test_owner_is_an_int_or_a_str(owner: Any) -> None:
    """Every call that takes an owner refuses other types, and changes nothing."""
    pool = unified(4)
    block = pool.allocate("k", 3, 1)[0]
    before = figures(pool)
    calls: list[Callable[[], object]] = [
        lambda: pool.allocate("k", 1, owner),
        lambda: pool.allocate_kv(1, owner),
        lambda: pool.register_owner(owner),
        lambda: pool.release_owner(owner),
        lambda: pool.free_all(owner),
        lambda: pool.blocks_for(owner),
    ]
    if owner is not None:  # which there means: whoever holds it
        calls += [
            lambda: pool.free([block], owner=owner),
        ]
    for call in calls:
        with pytest.raises(ArgumentTypeError, match="owner"):
            call()
        assert figures(pool) == before


@pytest.mark.parametrize("owner", WRONG_OWNERS[1:], ids=lambda owner: type(owner).__name__)
def test_refusal_checks_its_owner(owner: Any) -> None:
    """True must not pass for owner 1 here either."""
    pool = unified(4)
    block = pool.allocate("k", 3, 1)[0]
    with pytest.raises(ArgumentTypeError, match="owner"):
        pool.refusal(block, owner=owner)
    assert not any(pool.rejected.values())


# -- the module -----------------------------------------------------------------------------------


def test_importing_the_pool_imports_no_mlx() -> None:
    """The pool is plain Python: no mlx, no exporter, no HTTP comes with it."""
    code = (
        "import sys, veloxquant_mlx.memory.block_pool\n"
        "heavy = {'mlx', 'numpy', 'prometheus_client', 'opentelemetry', 'http'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        timeout=50,
        env={"PYTHONPATH": ":".join(p for p in sys.path if p)},
    )
    assert run.stdout.strip() == "[]"


def test_a_dropped_pool_goes_at_once() -> None:
    """A pool, its blocks and leases are no reference cycle: memory comes back without a GC."""
    gc.disable()
    try:
        pool = separate(64)
        kept = pool.allocate_kv(40, 1)[0][0]
        pool.stats.snapshot()
        pool.free_all(1)
        pool.allocate("k", 40, 2)
        gone = weakref.ref(pool)
        del pool
        assert gone() is None
        assert kept.block_id == 0
    finally:
        gc.enable()


def test_one_pool_serves_threads() -> None:
    """Calls from another thread wait for nobody but a call in progress."""
    pool = unified()
    seen: list[Ids] = []
    thread = threading.Thread(target=lambda: seen.append(ids(pool.allocate("k", 20, 1))))
    thread.start()
    thread.join()
    assert seen == [[0, 1]]
    pool.free_all(1)
    assert pool.n_free("k") == 8
