"""The pooled cache: what is charged, when it goes back, and what failures leave behind."""

from __future__ import annotations

import copy
import gc
import pickle
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from veloxquant_mlx.core.abstractions import KVCache
from veloxquant_mlx.core.exceptions import (
    ArgumentTypeError,
    BlockPoolExhaustedError,
    PoolError,
)
from veloxquant_mlx.memory import pooled_cache, token_charge
from veloxquant_mlx.memory.block_pool import Block, BlockPoolAllocator, PoolConfig
from veloxquant_mlx.memory.pooled_cache import PooledKVCache

if TYPE_CHECKING:
    from collections.abc import Callable

SIZE = 4
K = mx.array([1.0, 0.0])
V = mx.array([2.0, 3.0])


class VectorCache(KVCache):
    """Keeps the vectors in lists; fails when told to."""

    def __init__(self) -> None:
        self.keys: list[mx.array] = []
        self.values: list[mx.array] = []
        self.fault: BaseException | None = None

    def _check(self) -> None:
        if self.fault is not None:
            raise self.fault

    def append_key(self, k: mx.array) -> None:
        """Keep a key."""
        self._check()
        self.keys.append(k)

    def append_value(self, v: mx.array) -> None:
        """Keep a value."""
        self._check()
        self.values.append(v)

    def attend(self, q: mx.array) -> mx.array:
        """Softmax attention."""
        weights = mx.softmax(mx.stack(self.keys[: len(self)]) @ q)
        return weights @ mx.stack(self.values[: len(self)])

    def memory_bytes(self) -> int:
        """Bytes of all vectors."""
        return sum(array.nbytes for array in (*self.keys, *self.values))

    def reset(self) -> None:
        """Forget everything."""
        self.keys, self.values = [], []

    def __len__(self) -> int:
        return min(len(self.keys), len(self.values))


def make_pool(
    n_blocks: int = 16, *, separate: bool = True, grow: bool = False
) -> BlockPoolAllocator:
    """A pool of blocks of four tokens."""
    return BlockPoolAllocator(
        PoolConfig(
            block_size=SIZE, n_blocks=n_blocks, separate_kv=separate, grow_on_exhaustion=grow
        )
    )


@pytest.fixture
def pool() -> BlockPoolAllocator:
    """Eight blocks a stream."""
    return make_pool()


def append(cache: PooledKVCache, n: int) -> None:
    """Append `n` tokens."""
    for _ in range(n):
        cache.append(K, V)


def state(pool: BlockPoolAllocator, *owners: int | str) -> object:
    """Everything that a failed call must leave as it was; totals of blocks moved aside."""
    held = [[(b, b.n_used, b.lease) for b in pool.blocks_for(owner)] for owner in owners]
    stats = pool.stats
    return (
        held,
        stats.n_blocks,
        stats.blocks_in_use(),
        stats.fragmentation(),
        [pool.n_free("k"), pool.n_free("v")],
        [stream.slack for stream in pool._streams],
        list(pool._owners),
    )


# -- charging -----------------------------------------------------------------------------------


def test_a_block_is_taken_when_the_last_is_full(pool: BlockPoolAllocator) -> None:
    """One block a stream for every `block_size` tokens, and the fill is told to the pool."""
    cache = PooledKVCache(VectorCache(), pool, owner=7, format="int4")
    for n in range(1, 2 * SIZE + 2):
        cache.append(K, V)
        n_blocks = -(-n // SIZE)
        assert cache.n_blocks_held() == 2 * n_blocks
        for stream in "kv":
            blocks = [block for block in pool.blocks_for(7) if block.stream == stream]
            assert [block.n_used for block in blocks] == [SIZE] * (n_blocks - 1) + [
                n - (n_blocks - 1) * SIZE
            ]
            assert {block.format for block in blocks} == {"int4"}
        assert [stream.slack for stream in pool._streams] == [n_blocks * SIZE - n] * 2
    assert len(cache) == 2 * SIZE + 1


def test_keys_and_values_are_charged_apart(pool: BlockPoolAllocator) -> None:
    """Appending keys alone takes blocks of the key stream alone."""
    cache = PooledKVCache(VectorCache(), pool)
    for _ in range(SIZE + 1):
        cache.append_key(K)
    assert (pool.n_free("k"), pool.n_free("v")) == (6, 8)
    cache.append_value(V)
    assert (pool.n_free("k"), pool.n_free("v")) == (6, 7)
    assert len(cache) == 1
    append(cache, SIZE - 1)
    assert (pool.n_free("k"), pool.n_free("v")) == (6, 7)
    assert cache.n_blocks_held() == 3


def test_a_unified_pool_is_charged_both(pool: BlockPoolAllocator) -> None:
    """Keys and values come out of one free list."""
    shared = make_pool(4, separate=False)
    cache = PooledKVCache(VectorCache(), shared)
    append(cache, SIZE + 1)
    assert shared.n_free() == 0
    cache.release()
    assert shared.n_free() == 4


def test_the_wrapped_cache_does_the_work(pool: BlockPoolAllocator) -> None:
    """Attention, length and bytes are the wrapped cache's own."""
    inner = VectorCache()
    cache = PooledKVCache(inner, pool)
    append(cache, 3)
    assert cache.attend(K).tolist() == V.tolist()
    assert len(cache) == 3
    assert cache.memory_bytes() == inner.memory_bytes() > 0
    assert cache.inner is inner
    assert cache.pool is pool
    assert "3 keys and 3 values in 2 blocks" in repr(cache)


def test_tokens_held_before_are_charged(pool: BlockPoolAllocator) -> None:
    """A cache that is not empty is charged when it is wrapped, or refused whole."""
    inner = VectorCache()
    for _ in range(SIZE + 1):
        inner.append(K, V)
    cache = PooledKVCache(inner, pool)
    assert cache.n_blocks_held() == 4
    cache.append(K, V)
    assert [block.n_used for block in pool.blocks_for(cache.owner)] == [SIZE, 2, SIZE, 2]
    small = make_pool(3)
    with pytest.raises(BlockPoolExhaustedError):
        PooledKVCache(inner, small)
    assert small.stats.blocks_in_use() == 0


def test_wrong_arguments(pool: BlockPoolAllocator) -> None:
    """Mistakes show at construction, not at the first token."""
    with pytest.raises(ArgumentTypeError, match="append_key"):
        PooledKVCache([], pool)  # type: ignore[arg-type]
    with pytest.raises(ArgumentTypeError, match="pool"):
        PooledKVCache(VectorCache(), None)  # type: ignore[arg-type]
    with pytest.raises(ArgumentTypeError, match="owner"):
        PooledKVCache(VectorCache(), pool, owner=True)
    with pytest.raises(ArgumentTypeError, match="format"):
        PooledKVCache(VectorCache(), pool, format=16)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="format"):
        PooledKVCache(VectorCache(), pool, format="")


# -- giving back --------------------------------------------------------------------------------


def test_U58_caches_without_owner_are_apart(pool: BlockPoolAllocator) -> None:
    """No owner given: each cache has one of its own, and releases nobody else's blocks."""
    first, second = (PooledKVCache(VectorCache(), pool) for _ in range(2))
    append(first, 1)
    append(second, 1)
    assert first.owner != second.owner
    first.release()
    assert second.n_blocks_held() == 2
    assert pool.stats.blocks_in_use() == 2
    append(second, 1)


def test_U58_a_shared_owner_keeps_the_other_blocks(pool: BlockPoolAllocator) -> None:
    """Layers that share an owner release their own blocks only."""
    first, second = (PooledKVCache(VectorCache(), pool, owner="request") for _ in range(2))
    for _ in range(SIZE + 1):
        append(first, 1)
        append(second, 1)
    extra = pool.allocate("k", 1, "request")
    first.release()
    assert (first.n_blocks_held(), second.n_blocks_held()) == (0, 4)
    assert len(pool.blocks_for("request")) == 5
    append(second, 1)
    second.release()
    assert pool.blocks_for("request") == extra


@pytest.mark.parametrize("end", [PooledKVCache.release, PooledKVCache.reset])
def test_U69_release_then_append(
    pool: BlockPoolAllocator, end: Callable[[PooledKVCache], None]
) -> None:
    """After `release` or `reset` the cache is empty, holds nothing, and starts anew."""
    cache = PooledKVCache(VectorCache(), pool)
    append(cache, 20)
    end(cache)
    end(cache)
    assert (len(cache), cache.n_blocks_held(), pool.stats.blocks_in_use()) == (0, 0, 0)
    cache.append(K, V)
    assert len(cache) == 1
    assert [block.n_used for block in pool.blocks_for(cache.owner)] == [1, 1]


def test_free_all_behind_the_cache(pool: BlockPoolAllocator) -> None:
    """A cache whose blocks were freed says so, touches nobody else's, and restarts by reset."""
    cache = PooledKVCache(VectorCache(), pool, owner=1)
    append(cache, 1)
    pool.free_all(1)
    other = PooledKVCache(VectorCache(), pool, owner=2)
    append(other, 2)
    before = state(pool, 1, 2)
    calls: list[Callable[[], None]] = [lambda: cache.append(K, V), lambda: cache.append_key(K)]
    for call in calls:
        with pytest.raises(PoolError, match="freed by somebody else"):
            call()
    assert len(cache) == 1
    assert cache.n_blocks_held() == 0
    cache.release()
    assert state(pool, 1, 2) == before
    append(cache, 1)
    assert cache.n_blocks_held() == other.n_blocks_held() == 2


def test_a_dropped_cache_gives_back(pool: BlockPoolAllocator) -> None:
    """Blocks of a cache that is gone are free at the next look at the pool, and only those."""
    cache = PooledKVCache(VectorCache(), pool, owner=1)
    other = PooledKVCache(VectorCache(), pool, owner=1)
    append(cache, SIZE + 1)
    append(other, 1)
    del cache
    assert pool.stats.blocks_in_use() == other.n_blocks_held() == 2


def test_a_cache_dropped_inside_a_call_of_the_pool(pool: BlockPoolAllocator) -> None:
    """A garbage collection or a reset inside a pool call queues the blocks instead of hanging."""
    dropped, ended = (PooledKVCache(VectorCache(), pool) for _ in range(2))
    append(dropped, 1)
    append(ended, 1)
    cycle: list[object] = [dropped]
    cycle.append(cycle)
    del dropped, cycle
    with pool._lock:
        pool._busy = True
        gc.collect()
        ended.reset()
        pool._busy = False
    assert pool.stats.blocks_in_use() == 0


# -- failures -----------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", [ValueError("wrong shape"), KeyboardInterrupt()])
@pytest.mark.parametrize("n_before", [0, 1, SIZE - 1, SIZE, SIZE + 1])
@pytest.mark.parametrize("separate", [True, False])
def test_U69_the_wrapped_cache_raises(fault: BaseException, n_before: int, separate: bool) -> None:
    """Whether or not the token needed a block, nothing of its charge stays."""
    pool = make_pool(separate=separate)
    inner = VectorCache()
    cache = PooledKVCache(inner, pool, owner=1)
    append(cache, n_before)
    before = state(pool, 1)
    calls: list[Callable[[], None]] = [
        lambda: cache.append(K, V),
        lambda: cache.append_key(K),
        lambda: cache.append_value(V),
    ]
    for call in calls:
        inner.fault = fault
        with pytest.raises(type(fault)):
            call()
        assert state(pool, 1) == before
        assert len(cache) == n_before
    inner.fault = None
    append(cache, 1)
    assert len(cache) == n_before + 1
    assert cache.n_blocks_held() == 2 * (n_before // SIZE + 1)


@pytest.mark.parametrize("starved", ["k", "v"])
def test_U69_the_pool_is_exhausted(starved: str) -> None:
    """`append` that finds no block for one stream charges the other neither, and stores nothing."""
    pool = make_pool(4)
    cache = PooledKVCache(VectorCache(), pool, owner=1)
    append(cache, SIZE)
    pool.allocate(starved, 1, 2)
    before = (state(pool, 1, 2), pool.stats.n_allocations)
    with pytest.raises(BlockPoolExhaustedError):
        cache.append(K, V)
    # Not even taken and given back: one allocation of both streams, not two and an undo.
    assert (state(pool, 1, 2), pool.stats.n_allocations) == before
    assert len(cache) == SIZE
    assert cache.n_blocks_held() == 2
    pool.free_all(2)
    append(cache, 1)


class InterruptedPool(BlockPoolAllocator):
    """A Ctrl-C strikes just after the blocks were handed out, before anybody has noted them."""

    strikes = False

    def allocate_kv(  # noqa: D102 - as in the base class
        self, n_tokens: int, owner: int | str, format: str = "fp16", *, n_filled: int | None = None
    ) -> tuple[list[Block], list[Block]]:
        taken = super().allocate_kv(n_tokens, owner, format, n_filled=n_filled)
        if self.strikes:
            raise KeyboardInterrupt
        return taken


def test_U69_ctrl_c_between_the_pool_and_the_cache() -> None:
    """Blocks that were handed out to nobody's knowledge go back: no one else could free them."""
    pool = InterruptedPool(PoolConfig(block_size=SIZE, n_blocks=16))
    inner = VectorCache()
    cache = PooledKVCache(inner, pool)
    append(cache, SIZE)
    pool.strikes = True
    with pytest.raises(KeyboardInterrupt):
        cache.append(K, V)
    assert (pool.stats.blocks_in_use(), cache.n_blocks_held(), len(inner.keys)) == (2, 2, SIZE)
    pool.strikes = False
    append(cache, 1)
    assert (pool.stats.blocks_in_use(), cache.n_blocks_held()) == (4, 4)
    cache.release()
    assert pool.stats.blocks_in_use() == 0


def test_U69_ctrl_c_after_the_charge(monkeypatch: pytest.MonkeyPatch) -> None:
    """A token that was charged and never stored is charged no more."""

    def grow_and_strike(*arguments: Any) -> None:
        token_charge.grow(*arguments)
        raise KeyboardInterrupt

    pool = make_pool()
    cache = PooledKVCache(VectorCache(), pool, owner=1)
    append(cache, SIZE)
    before = state(pool, 1)
    monkeypatch.setattr(pooled_cache, "grow", grow_and_strike)
    with pytest.raises(KeyboardInterrupt):
        cache.append(K, V)
    monkeypatch.undo()
    assert (state(pool, 1), cache.n_blocks_held()) == (before, 2)
    append(cache, 1)
    assert cache.n_blocks_held() == 4


def test_U69_exhausted_in_append_value() -> None:
    """A value refused on its own leaves the key before it, and can be tried again."""
    pool = make_pool(2)
    inner = VectorCache()
    cache = PooledKVCache(inner, pool)
    pool.allocate("v", 1, "other")
    cache.append_key(K)
    with pytest.raises(BlockPoolExhaustedError):
        cache.append_value(V)
    assert (len(inner.keys), len(inner.values), len(cache)) == (1, 0, 0)
    assert cache.n_blocks_held() == 1
    pool.free_all("other")
    cache.append_value(V)
    assert len(cache) == 1


def test_a_reset_that_fails_keeps_the_blocks(pool: BlockPoolAllocator) -> None:
    """When the wrapped cache cannot be emptied, its tokens stay charged."""
    cache = PooledKVCache(VectorCache(), pool)
    append(cache, 1)

    def fail() -> None:
        raise OSError("no")

    cache.inner.reset = fail  # type: ignore[method-assign]
    with pytest.raises(OSError, match="no"):
        cache.reset()
    assert cache.n_blocks_held() == pool.stats.blocks_in_use() == 2


# -- copies -------------------------------------------------------------------------------------


def test_deepcopy_is_charged_for_itself(pool: BlockPoolAllocator) -> None:
    """A copy holds as many blocks, of its own, and lives on when the original is released."""
    cache = PooledKVCache(VectorCache(), pool, format="bf16")
    append(cache, SIZE + 1)
    cache.append_key(K)
    twin = copy.deepcopy(cache)
    assert twin.owner != cache.owner
    assert pool.stats.blocks_in_use() == 8
    cache.release()
    assert (len(cache), len(twin), twin.n_blocks_held()) == (0, SIZE + 1, 4)
    used = {block.stream: block.n_used for block in pool.blocks_for(twin.owner)}
    assert used == {"k": 2, "v": 1}
    twin.append_value(V)
    assert len(twin) == SIZE + 2


def test_deepcopy_keeps_a_given_owner(pool: BlockPoolAllocator) -> None:
    """Copies of a request's cache belong to the request."""
    cache = PooledKVCache(VectorCache(), pool, owner=5)
    append(cache, 1)
    twin = copy.deepcopy(cache)
    assert twin.owner == 5
    assert len(pool.blocks_for(5)) == 4
    pool.free_all(5)
    assert twin.n_blocks_held() == 0


@pytest.mark.parametrize("n_free", [0, 1, 3])
def test_deepcopy_without_room_changes_nothing(n_free: int) -> None:
    """Too few blocks for a copy of three keys' blocks and one value's: an error, and no charge."""
    pool = make_pool(4 + n_free, separate=False)
    cache = PooledKVCache(VectorCache(), pool, owner=1)
    for _ in range(2 * SIZE + 1):
        cache.append_key(K)
    cache.append_value(V)
    before = state(pool, 1)
    with pytest.raises(BlockPoolExhaustedError):
        copy.deepcopy(cache)
    assert state(pool, 1) == before


def test_other_copies_name_the_fix(pool: BlockPoolAllocator) -> None:
    """Two holders of one charge would free it twice: refused with what to do instead."""
    cache = PooledKVCache(VectorCache(), pool)
    for duplicate in (copy.copy, pickle.dumps):
        with pytest.raises(TypeError, match="deepcopy"):
            duplicate(cache)


def test_importing_needs_no_mlx() -> None:
    """A process without MLX can wrap caches of its own."""
    code = "import sys, veloxquant_mlx.memory.pooled_cache; sys.exit('mlx' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# -- a model ------------------------------------------------------------------------------------


class CacheMachine(RuleBasedStateMachine):
    """Caches with own and shared owners on a small pool, against plain token counts."""

    @initialize(separate=st.booleans(), grow=st.booleans())
    def start(self, separate: bool, grow: bool) -> None:
        """Four caches, two of them with one owner."""
        self.pool = make_pool(6, separate=separate, grow=grow)
        self.caches = [
            PooledKVCache(VectorCache(), self.pool, owner=owner) for owner in (None, 1, 1, "r")
        ]
        self.counts = [[0, 0] for _ in self.caches]

    @rule(i=st.integers(0, 3), what=st.integers(0, 2), fails=st.integers(0, 4))
    def append(self, i: int, what: int, fails: int) -> None:
        """A token, or half of one, that the wrapped cache now and then refuses."""
        cache = self.caches[i]
        inner = cache.inner
        assert isinstance(inner, VectorCache)
        inner.fault = ValueError() if fails == 0 else None
        calls: list[Callable[[], None]] = [
            lambda: cache.append(K, V),
            lambda: cache.append_key(K),
            lambda: cache.append_value(V),
        ]
        try:
            calls[what]()
        except (ValueError, BlockPoolExhaustedError):
            return
        finally:
            inner.fault = None
        self.counts[i][0] += what != 2
        self.counts[i][1] += what != 1

    @rule(i=st.integers(0, 3), drop=st.booleans())
    def end(self, i: int, drop: bool) -> None:
        """Release a cache, or drop it for a new one with the same kind of owner."""
        if drop:
            self.caches[i] = PooledKVCache(VectorCache(), self.pool, owner=[None, 1, 1, "r"][i])
        else:
            self.caches[i].release()
        self.counts[i] = [0, 0]

    @rule(i=st.integers(0, 3), j=st.integers(0, 3))
    def duplicate(self, i: int, j: int) -> None:
        """Put a copy of one cache in the place of another."""
        try:
            twin = copy.deepcopy(self.caches[i])
        except BlockPoolExhaustedError:
            return
        self.caches[j] = twin
        self.counts[j] = list(self.counts[i])

    @invariant()
    def everything_is_charged_once(self) -> None:
        """Blocks, lengths and fill are what the counts say, cache by cache and in sum."""
        n_blocks = n_tokens = 0
        for cache, (n_keys, n_values) in zip(self.caches, self.counts, strict=True):
            held = -(-n_keys // SIZE) + -(-n_values // SIZE)
            assert cache.n_blocks_held() == held
            assert len(cache) == min(n_keys, n_values)
            n_blocks += held
            n_tokens += n_keys + n_values
        assert self.pool.stats.blocks_in_use() == n_blocks
        slack = sum(stream.slack for stream in self.pool._streams)
        assert n_blocks * SIZE - slack == n_tokens


CacheMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
TestCacheMachine = CacheMachine.TestCase
