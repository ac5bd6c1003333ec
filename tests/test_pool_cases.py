"""Faults met in other allocators and in the existing package, each named after its case."""

from __future__ import annotations

import copy
import logging
import math
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from veloxquant_mlx.core.exceptions import (
    ArgumentTypeError,
    BlockPoolExhaustedError,
    OwnerAlreadyActiveError,
    PoolReentryError,
)
from veloxquant_mlx.memory.block_pool import (
    AllocationStats,
    Block,
    BlockPoolAllocator,
    PoolConfig,
)

pytestmark = pytest.mark.timeout(60)


def unified(n_blocks: int = 8, **options: Any) -> BlockPoolAllocator:
    """Return a pool with one free list."""
    return BlockPoolAllocator(PoolConfig(n_blocks=n_blocks, separate_kv=False, **options))


def ids(blocks: list[Block]) -> list[int]:
    """Return the ids of some blocks."""
    return [block.block_id for block in blocks]


def assert_whole(pool: BlockPoolAllocator, held: dict[Any, list[Block]]) -> None:
    """The books add up, and the owners hold exactly these blocks."""
    stats = pool.stats
    streams = ("k", "v") if pool.config.separate_kv else ("kv",)
    n_held = sum(len(blocks) for blocks in held.values())
    assert stats.blocks_in_use() == stats.n_allocations - stats.n_frees == n_held
    assert sum(pool.n_free(s) for s in streams) + n_held == stats.n_blocks
    assert pool.config.n_blocks + stats.n_grown - stats.n_retired == stats.n_blocks
    for owner, blocks in held.items():
        assert pool.blocks_for(owner) == blocks
        assert all(block.owner == owner for block in blocks)


# -- from allocators ------------------------------------------------------------------------------


def test_A02_counters_count_blocks() -> None:
    """One call for ten blocks counts ten blocks, and one record of history."""
    pool = unified(16)
    blocks = pool.allocate("k", 160, 1)
    assert (pool.stats.n_allocations, len(pool.history)) == (10, 1)
    pool.free(blocks[:4])
    assert (pool.stats.n_frees, len(pool.history)) == (4, 2)
    pool.free_all(1)
    assert (pool.stats.n_frees, len(pool.history)) == (10, 3)
    assert pool.stats.blocks_in_use() == 0


def test_B02_same_block_twice_in_one_list() -> None:
    """A repeated block comes back once, a copy never; the pool cannot hand out one too many."""
    pool = unified(4)
    (block,) = pool.allocate("k", 16, 1)
    pool.free([block, block])
    assert pool.n_free("k") == 4
    assert pool.rejected["repeated"] + pool.rejected["free"] == 1
    (block,) = pool.allocate("k", 16, 1)
    pool.free([block, copy.copy(block)])
    assert pool.n_free("k") == 4
    assert pool.rejected["copied"] == 1
    assert len(set(ids(pool.allocate("k", 64, 2)))) == 4
    with pytest.raises(BlockPoolExhaustedError):
        pool.allocate("k", 1, 3)


@pytest.mark.parametrize("clone", [copy.copy, copy.deepcopy])
def test_B02_a_copy_alone_frees_nothing(clone: Callable[[Block], Block]) -> None:
    """The copy of a held block is not the block."""
    pool = unified(4)
    blocks = pool.allocate("k", 64, 1)
    pool.free([clone(b) for b in blocks])
    assert_whole(pool, {1: blocks})
    assert pool.rejected["copied"] == 4


def test_B04_one_call_with_every_kind_of_block(caplog: pytest.LogCaptureFixture) -> None:
    """The valid blocks come back, the rest is counted by reason; the log does not flood."""
    pool, other = unified(8), unified(8)
    kept, good, second = pool.allocate("k", 48, 1)
    freed, retired = pool.allocate("k", 32, 2)
    pool.free([retired])
    pool.shrink("k", 0)
    pool.free([freed])
    foreign = other.allocate("k", 16, 1)[0]
    bad = [freed, retired, foreign, copy.copy(kept), Block(kept.block_id)]
    with caplog.at_level(logging.DEBUG):
        for _ in range(50):
            pool.free([*bad, good, good, second])
    assert_whole(pool, {1: [kept], 2: []})
    assert other.blocks_for(1) == [foreign]
    counts = dict(pool.rejected)
    assert counts.pop("repeated", 0) + counts.pop("free") == 50 + 1 + 49 * 3
    assert {r: n for r, n in counts.items() if n} == {"retired": 50, "foreign": 100, "copied": 50}
    lines = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(lines) == 1, "one line a minute"


def test_B04_a_block_with_a_hash_of_its_own() -> None:
    """A hand-made subclass is foreign; that its hash calls the pool changes nothing."""
    pool = BlockPoolAllocator(PoolConfig(n_blocks=8, separate_kv=False))
    calls = []

    class Odd(Block):
        def __hash__(self) -> int:
            calls.append(pool.allocate("k", 1, "inner"))
            return 1

    block = pool.allocate("k", 16, 1)[0]
    odd = Odd(2)
    pool.free([odd, block, odd])
    assert (pool.n_free(), pool.rejected["foreign"], calls) == (8, 2, [])


def test_B04_None_inside_frees_nothing() -> None:
    """One thing that is no block, and the whole list is refused."""
    pool = unified(8)
    blocks = pool.allocate("k", 48, 1)
    for position in range(4):
        given: list[Any] = list(blocks)
        given.insert(position, None)
        with pytest.raises(TypeError):
            pool.free(given)
        assert_whole(pool, {1: blocks})
    assert len(pool.history) == 1
    assert not any(pool.rejected.values())


@pytest.mark.parametrize("call", ["free", "free_held", "free_held_later"])
def test_B04_a_block_without_fields_frees_nothing(call: str) -> None:
    """`Block.__new__` alone gives one on which a free would stumble after its first block."""
    pool = unified()
    held = pool.allocate("kv", 64, 1)
    lease = () if call == "free" else (held[0].lease,)
    with pytest.raises(ArgumentTypeError, match=r"blocks\[2\] must be a Block that .* without its"):
        getattr(pool, call)([*held[:2], Block.__new__(Block), held[2]], *lease)
    assert_whole(pool, {1: held})
    getattr(pool, call)(held, *lease)
    assert_whole(pool, {})


def test_B04_what_only_says_that_it_is_a_block_frees_nothing() -> None:
    """The books read a block's own fields, which no stand-in has."""

    class Liar:
        __class__ = Block  # type: ignore[assignment]

    pool = unified()
    held = pool.allocate("kv", 64, 1)
    with pytest.raises(ArgumentTypeError, match=r"blocks\[1\] must be a Block, got"):
        pool.free([held[0], Liar()])  # type: ignore[list-item]
    assert_whole(pool, {1: held})


def test_B04_the_log_line_of_one_pool_leaves_another_its_own(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A second pool with the same trouble is heard too."""
    with caplog.at_level(logging.WARNING):
        for pool in (unified(2), unified(2)):
            (block,) = pool.allocate("k", 16, 1)
            pool.free([block, block])
    assert len(caplog.records) == 2


COPIERS: list[Callable[[Any], Any]] = [copy.copy, copy.deepcopy, pickle.dumps]


@pytest.mark.parametrize("clone", COPIERS, ids=["copy", "deepcopy", "pickle"])
def test_B23_a_pool_cannot_be_copied(clone: Callable[[Any], Any]) -> None:
    """Two pools with one set of blocks would be wrong; the error says what to do instead."""
    pool = unified(8)
    blocks = pool.allocate("k", 48, 1)
    with pytest.raises(TypeError) as caught:
        clone(pool)
    message = str(caught.value)
    assert "BlockPoolAllocator" in message
    assert "_thread.lock" not in message
    assert any(fix in message for fix in ("share", "config", "snapshot"))
    assert_whole(pool, {1: blocks})


@pytest.mark.parametrize(
    "clone",
    [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))],
    ids=["copy", "deepcopy", "pickle"],
)
def test_B23_blocks_and_snapshots_can_be_copied(clone: Callable[[Any], Any]) -> None:
    """What a caller passes around comes out of a copy as a value with the same figures."""
    pool = unified(8)
    (block,) = pool.allocate("k", 3, 1, "int4")
    value = clone(block)
    assert isinstance(value, Block)
    assert (value.block_id, value.format, value.n_used, value.owner) == (0, "int4", 3, 1)
    pool.mark_used(block, 9)
    assert value.n_used == 3
    for stats in (pool.stats.snapshot(), pool.history[-1]):
        twin = clone(stats)
        assert isinstance(twin, AllocationStats)
        assert (twin.n_allocations, twin.n_blocks) == (1, 8)
        assert twin.fragmentation() == stats.fragmentation()


@pytest.mark.parametrize(
    "clone",
    [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))],
    ids=["copy", "deepcopy", "pickle"],
)
def test_B23_a_list_of_blocks_and_live_stats(clone: Callable[[Any], Any]) -> None:
    """A copy of the live stats keeps the figures of its moment, like a snapshot."""
    pool = unified(8)
    pool.allocate("k", 40, 1)
    twin = clone(pool.stats)
    pool.free_all(1)
    assert isinstance(twin, AllocationStats)
    assert (twin.n_allocations, twin.n_frees, twin.blocks_in_use()) == (3, 0, 3)


PUBLIC_CALLS = {
    "add_filled": "changes no block",
    "add_retire_listener": "changes no block",
    "allocate": "+",
    "allocate_kv": "+",
    "blocks_for": "reads",
    "free": "-",
    "free_all": "-",
    "free_held": "-",
    "free_held_later": "-",
    "fresh_owner": "changes no block",
    "mark_cached": "changes no block",
    "mark_used": "changes no block",
    "n_free": "reads",
    "refusal": "reads",
    "register_owner": "changes no block",
    "release_owner": "changes no block",
    "shrink": "retires",
}


def test_B26_every_public_call_is_accounted_for() -> None:
    """A new way to move blocks must be added here, and below, before it passes."""
    found = {
        name
        for name in dir(BlockPoolAllocator)
        if not name.startswith("_") and callable(getattr(BlockPoolAllocator, name))
    }
    assert found == set(PUBLIC_CALLS)


@pytest.mark.parametrize("path", sorted(n for n, kind in PUBLIC_CALLS.items() if kind in "+-"))
def test_B26_every_path_moves_the_counters(path: str) -> None:
    """Whatever path blocks take, the counters move by as many blocks."""
    pool = BlockPoolAllocator(PoolConfig(n_blocks=16))
    k_blocks, v_blocks = pool.allocate_kv(40, 1)
    blocks = k_blocks + v_blocks
    leases = (k_blocks[0].lease, v_blocks[0].lease)
    before = pool.stats.snapshot()
    paths: dict[str, Callable[[], object]] = {
        "allocate": lambda: pool.allocate("k", 40, 2),
        "allocate_kv": lambda: pool.allocate_kv(40, 2),
        "free": lambda: pool.free(blocks),
        "free_all": lambda: pool.free_all(1),
        "free_held": lambda: pool.free_held(blocks, *leases),
        "free_held_later": lambda: pool.free_held_later(blocks, *leases),
    }
    paths[path]()
    after = pool.stats.snapshot()
    taken, given = after.n_allocations - before.n_allocations, after.n_frees - before.n_frees
    expected = {"allocate": (3, 0), "allocate_kv": (6, 0)}.get(path, (0, 6))
    assert (taken, given) == expected
    assert (pool.history[-1].n_allocations, pool.history[-1].n_frees) == (
        after.n_allocations,
        after.n_frees,
    )
    assert pool.n_free("k") + pool.n_free("v") == 16 - after.blocks_in_use()


def test_B27_double_frees_are_counted() -> None:
    """Also one at a time, and also when the block was handed out and came back meanwhile."""
    pool = unified(4)
    (block,) = pool.allocate("k", 16, 1)
    for _ in range(3):
        pool.free([block])
    pool.free(pool.allocate("k", 16, 2))
    pool.free([block])
    assert pool.rejected["free"] + pool.rejected["repeated"] == 3
    assert pool.stats.n_frees == 2


# -- ownership and free list ----------------------------------------------------------------------


def test_U04_a_foreign_block_outside_the_pool() -> None:
    """A foreign id that this pool does not even have is refused at free, not at allocate."""
    big, small = unified(10), unified(2)
    foreign = big.allocate("k", 160, 1)
    small.free([foreign[9]])
    assert small.rejected["foreign"] == 1
    assert small.n_free("k") == 2
    assert ids(small.allocate("k", 32, 1)) == [0, 1]
    assert_whole(big, {1: foreign})


def test_U04_a_foreign_block_with_an_id_of_the_pool() -> None:
    """A foreign block whose id is held here is refused as well."""
    big, small = unified(10), unified(2)
    foreign = big.allocate("k", 160, 1)
    mine = small.allocate("k", 32, 1)
    small.free(foreign)
    assert small.rejected["foreign"] == 10
    assert_whole(small, {1: mine})
    assert_whole(big, {1: foreign})


def test_U05_a_k_block_freed_into_a_unified_pool() -> None:
    """The origin keeps its block whole and can free it afterwards."""
    pair, one = BlockPoolAllocator(PoolConfig(n_blocks=4)), unified(4)
    blocks = pair.allocate("k", 16, 1)
    one.free(blocks)
    assert_whole(one, {})
    assert_whole(pair, {1: blocks})
    pair.free(blocks)
    assert_whole(pair, {1: []})


def test_U07_the_owner_cannot_be_set_from_outside() -> None:
    """No field of a handle reaches the books."""
    pool = unified(4)
    (block,) = pool.allocate("k", 16, 1)
    for name, value in (("owner", None), ("stream", "v"), ("block_id", 3), ("n_used", 0)):
        with pytest.raises(AttributeError):
            setattr(block, name, value)
        with pytest.raises((AttributeError, TypeError)):
            object.__setattr__(block, name, value)
    pool.free_all(1)
    assert_whole(pool, {1: []})


@pytest.mark.parametrize("shape", [list, tuple, iter], ids=["list", "tuple", "iterator"])
def test_U09_what_is_no_iterable_of_blocks(shape: Callable[[list[Any]], Any]) -> None:
    """A None inside, or a lone block, is a TypeError that frees nothing."""
    pool = unified(8)
    good, other = pool.allocate("k", 32, 1)
    for intruder in (None, 0, "block", object(), [good]):
        with pytest.raises(TypeError):
            pool.free(shape([good, intruder, other]))
    for alone in (good, None, 0):
        with pytest.raises(TypeError):
            pool.free(alone)  # type: ignore[arg-type]
    assert_whole(pool, {1: [good, other]})
    assert len(pool.history) == 1


class ShiftingHash:
    """An owner that cannot be found again."""

    def __init__(self) -> None:
        self.turn = 0

    def __hash__(self) -> int:
        self.turn += 1
        return self.turn


@pytest.mark.parametrize(
    "owner",
    [True, 1.0, math.nan, None, (1,), ShiftingHash()],
    ids=["bool", "float", "nan", "None", "tuple", "shifting hash"],
)
def test_U10_owners_that_would_merge_or_get_lost(owner: Any) -> None:
    """Only int and str own blocks, so 1, True and 1.0 never meet."""
    pool = unified(8)
    blocks = pool.allocate("k", 32, 1)
    for call in (
        lambda: pool.allocate("k", 16, owner),
        lambda: pool.free_all(owner),
        lambda: pool.blocks_for(owner),
        lambda: pool.register_owner(owner),
    ):
        with pytest.raises(ArgumentTypeError):
            call()
    assert_whole(pool, {1: blocks})


def test_U12_registration_outlives_the_last_block() -> None:
    """An explicit registration is not ended by a free of the last block."""
    pool = unified(4)
    pool.register_owner(1)
    pool.free(pool.allocate("k", 16, 1))
    with pytest.raises(OwnerAlreadyActiveError):
        pool.register_owner(1)
    pool.free_all(1)
    pool.register_owner(1)


def test_U15_a_bool_is_no_token_count() -> None:
    """True is refused where a number of tokens belongs."""
    pool = unified(4)
    with pytest.raises(ArgumentTypeError, match="n_tokens"):
        pool.allocate("k", True, 1)
    assert_whole(pool, {1: []})
    pool.register_owner(1)


@pytest.mark.parametrize("n_used", [None, "3", math.nan, 2.0, True, [3]], ids=repr)
def test_U16_a_bad_fill_never_costs_blocks(n_used: Any) -> None:
    """mark_used refuses first and stores after; free_all does not depend on the fill."""
    pool = unified(4)
    blocks = pool.allocate("k", 64, 1)
    with pytest.raises(ValueError, match="n_used"):
        pool.mark_used(blocks[1], n_used)
    assert [b.n_used for b in blocks] == [16] * 4
    pool.free_all(1)
    assert_whole(pool, {1: []})
    assert pool.n_free("k") == 4


def test_U18_mark_used_on_blocks_that_are_not_held() -> None:
    """Free: stored and counted. Retired, foreign or copied: counted, nothing else."""
    pool, other = unified(4), unified(4)
    (free, retired) = pool.allocate("k", 32, 1)
    pool.free([retired])
    pool.shrink("k", 0)
    pool.free([free])
    foreign = other.allocate("k", 16, 1)[0]
    detached = copy.copy(foreign)
    for block in (free, retired, foreign, detached):
        pool.mark_used(block, 7)
    assert [b.n_used for b in (free, retired, foreign, detached)] == [7, 0, 16, 16]
    assert (pool.stats.fragmentation(), other.stats.fragmentation()) == (0.0, 0.0)
    counts = {reason: n for reason, n in pool.rejected.items() if n}
    assert counts == {"free": 1, "retired": 1, "foreign": 1, "copied": 1}
    assert not any(other.rejected.values())
    pool.allocate("k", 16, 2)
    assert (free.n_used, pool.stats.fragmentation()) == (16, 0.0)


def test_U20_the_config_is_frozen() -> None:
    """Nothing about a pool's shape changes under it."""
    config = PoolConfig(n_blocks=4)
    pool = BlockPoolAllocator(config)
    pool.allocate("k", 20, 1)
    for target in (config, pool.config):
        for name, value in (("block_size", 4), ("separate_kv", False), ("n_blocks", 1)):
            with pytest.raises(AttributeError):
                setattr(target, name, value)
    with pytest.raises(AttributeError):
        pool.config = PoolConfig(block_size=4)  # type: ignore[misc]
    pool.free_all(1)
    assert pool.stats.fragmentation() == 0.0


def test_U21_blocks_are_told_apart_by_identity() -> None:
    """Blocks go into sets and dicts, and equal nothing but themselves."""
    one, other = unified(4), unified(4)
    first, second = one.allocate("k", 16, 1)[0], other.allocate("k", 16, 1)[0]
    assert first != second
    assert Block(0) != Block(0)
    assert len({first, second, first}) == 2
    notes = {first: "mine"}
    before = hash(first)
    one.free([first])
    assert hash(first) == before, "the hash does not move with the fields"
    assert notes[one.allocate("k", 16, 2)[0]] == "mine"


# -- growth, shrink, config -----------------------------------------------------------------------


def test_U24_unbounded_growth_in_one_call() -> None:
    """A request far larger than the pool is served, ids in a row, and comes back whole."""
    pool = unified(4, grow_on_exhaustion=True)
    n = 20_000
    blocks = pool.allocate("k", 16 * n - 1, 1)
    assert ids(blocks) == list(range(n))
    assert (pool.stats.n_grown, pool.stats.n_blocks) == (n - 4, n)
    assert (blocks[-1].n_used, pool.stats.fragmentation()) == (15, 1 / n)
    pool.free(blocks[::-1])
    assert (pool.n_free("k"), pool.shrink("k", 4)) == (n, n - 4)


def test_U26_one_block_for_two_streams() -> None:
    """k gets it; asking for v is an exhaustion like any other."""
    pool = BlockPoolAllocator(PoolConfig(n_blocks=1))
    assert (pool.n_free("k"), pool.n_free("v")) == (1, 0)
    with pytest.raises(BlockPoolExhaustedError):
        pool.allocate("v", 1, 1)
    with pytest.raises(BlockPoolExhaustedError):
        pool.allocate_kv(1, 1)
    assert (pool.stats.n_exhausted, pool.n_free("k")) == (2, 1)
    pool.register_owner(1)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_blocks", 4.5),
        ("max_blocks", True),
        ("max_blocks", "4"),
        ("n_blocks", True),
        ("n_blocks", 2.5),
        ("n_blocks", None),
        ("block_size", 1.5),
        ("block_size", math.nan),
        ("block_size", None),
        ("block_size", True),
        ("separate_kv", "no"),
        ("separate_kv", 1),
        ("separate_kv", None),
        ("grow_on_exhaustion", 0),
        ("grow_on_exhaustion", "yes"),
    ],
)
def test_U27_config_types(name: str, value: Any) -> None:
    """Every field of the config is type-checked when it is built."""
    with pytest.raises(ArgumentTypeError, match=name):
        PoolConfig(**{name: value})


@pytest.mark.parametrize("target", [True, math.nan, 1.5, None, "1"], ids=repr)
def test_U28_shrink_targets(target: Any) -> None:
    """A target that is no int is refused, and nothing is retired."""
    pool = unified(4)
    with pytest.raises(ArgumentTypeError, match="target_free"):
        pool.shrink("k", target)
    assert (pool.n_free("k"), pool.stats.n_retired) == (4, 0)


@pytest.mark.parametrize("stream", ["garbage", "K", "keys", ""])
def test_U28_streams_of_a_unified_pool(stream: str) -> None:
    """A unified pool takes k, v and kv, and sees typos."""
    pool = unified(4)
    for call in (
        lambda: pool.allocate(stream, 16, 1),
        lambda: pool.n_free(stream),
        lambda: pool.shrink(stream, 1),
    ):
        with pytest.raises(ValueError, match="stream"):
            call()
    assert_whole(pool, {1: []})


# -- stats and text -------------------------------------------------------------------------------


def test_U30_calls_and_blocks() -> None:
    """n_allocations is a number of blocks: in use is what came out less what came back."""
    pool = unified(16)
    pool.allocate("k", 160, 1)
    assert pool.stats.n_allocations == pool.stats.blocks_in_use() == 10


def test_U32_an_empty_held_block_is_not_fragmented() -> None:
    """Only 0 < n_used < block_size is fragmentation."""
    pool = unified(4)
    (block,) = pool.allocate("k", 5, 1)
    pool.mark_used(block, 0)
    assert pool.stats.fragmentation() == 0.0
    pool.free([block])
    assert pool.stats.fragmentation() == 0.0


def test_U35_the_text_is_plain_prometheus() -> None:
    """One type line and one unlabelled sample a metric, in lines that end with a newline."""
    pool = unified(4)
    pool.allocate("k", 5, 1)
    text = pool.stats.to_prometheus()
    lines = text.splitlines()
    assert text == "\n".join(lines) + "\n"
    names = [line.split(" ")[0] for line in lines if not line.startswith("#")]
    typed = [line.split(" ")[2] for line in lines if line.startswith("# TYPE ")]
    assert names == typed
    assert len(set(names)) == len(names) == 10
    assert "{" not in text


def test_U36_a_small_fragmentation_is_not_rounded_away() -> None:
    """One partial block in four million is a figure above zero."""
    stats = AllocationStats(4_000_000, 1, 0, 0, 0, 0, 0, 1, 1)
    lines = dict(line.split(" ") for line in stats.to_prometheus().splitlines() if line[0] != "#")
    assert float(lines["veloxquant_block_pool_fragmentation"]) == stats.fragmentation() == 2.5e-7


# -- locking --------------------------------------------------------------------------------------


class NosyOwner(str):
    """A str whose hash and equality ask the pool."""

    pool: BlockPoolAllocator | None = None
    n_asked = 0

    def _ask(self) -> None:
        if self.pool is not None:
            NosyOwner.n_asked += 1
            assert self.pool.n_free("k") >= 0

    def __hash__(self) -> int:
        self._ask()
        return str.__hash__(self)

    def __eq__(self, other: object) -> bool:
        self._ask()
        return str.__eq__(self, other)


def test_U40_an_owner_that_calls_the_pool_back() -> None:
    """A subclass of str with a mind of its own is refused, or served without a hang."""
    pool = unified(8)
    owner = NosyOwner("request")
    owner.pool = pool
    try:
        blocks = pool.allocate("k", 40, owner)
    except (ArgumentTypeError, PoolReentryError):
        assert_whole(pool, {"request": []})
        return
    assert pool.blocks_for("request") == blocks
    pool.free_all(owner)
    assert_whole(pool, {"request": []})


class NosyNumber(int):
    """An int whose arithmetic asks the pool."""

    pool: BlockPoolAllocator

    def __neg__(self) -> int:
        return -int(self) + 0 * self.pool.n_free("k")

    def __add__(self, other: int) -> int:
        return int(self) + other + 0 * self.pool.n_free("k")

    __radd__ = __add__

    def __index__(self) -> int:
        return int(self) + 0 * self.pool.n_free("k")


def test_U40_a_token_count_that_calls_the_pool_back() -> None:
    """The same with numbers."""
    pool = unified(8)
    n_tokens = NosyNumber(40)
    n_tokens.pool = pool
    try:
        blocks = pool.allocate("k", n_tokens, 1)
    except (ArgumentTypeError, PoolReentryError):
        blocks = []
    assert len(blocks) in (0, 3)
    assert_whole(pool, {1: blocks})


def test_U40_an_iterable_that_calls_the_pool_back() -> None:
    """free reads its iterable outside the lock, so the iterable may free and allocate."""
    pool = unified(8)
    first, second = pool.allocate("k", 32, 1)

    def meddling() -> Iterator[Block]:
        yield first
        pool.free([second])
        yield pool.allocate("k", 16, 2)[0]
        yield second

    pool.free(meddling())
    assert_whole(pool, {1: [], 2: []})


def test_U38_a_reader_on_another_thread_is_served() -> None:
    """n_free from a second thread returns while the first one goes on allocating."""
    pool = unified(64)
    stop = threading.Event()
    seen: list[int] = []

    def work() -> None:
        while not stop.is_set():
            pool.allocate("k", 16 * 64, 1)
            pool.free_all(1)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        while len(seen) < 200:
            seen.append(pool.n_free("k"))
    finally:
        stop.set()
        thread.join()
    assert set(seen) <= {0, 64}
    assert_whole(pool, {1: []})
