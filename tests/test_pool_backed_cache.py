"""PoolBackedKVCache: mlx-lm's own behaviour beside the stock cache, and the charge it keeps."""

from __future__ import annotations

import copy
import gc
import pickle
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from mlx_lm.models import cache as _cache

from veloxquant_mlx.core.exceptions import (
    ArgumentTypeError,
    BlockPoolExhaustedError,
    OwnerAlreadyActiveError,
)
from veloxquant_mlx.memory import pool_backed_cache as _pooled
from veloxquant_mlx.memory.block_pool import BlockPoolAllocator, PoolConfig
from veloxquant_mlx.memory.pool_backed_cache import PooledCaches

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

# mlx-lm has no annotations, nor has what is inherited from it.
stock: Any = _cache
PoolBackedKVCache: Any = _pooled.PoolBackedKVCache

HEADS, K_DIM, V_DIM = 2, 32, 64


def tokens(n: int, *, start: int = 0, batch: int = 1, dtype: Any = mx.float32) -> Any:
    """Keys and values of `n` tokens, each filled with its own number."""
    ids = mx.arange(start, start + n).astype(dtype)[None, None, :, None]
    return (
        mx.broadcast_to(ids, (batch, HEADS, n, K_DIM)),
        mx.broadcast_to(-ids, (batch, HEADS, n, V_DIM)),
    )


def held_ids(cache: Any) -> list[int]:
    """The token numbers that a cache holds, by its keys; its values must agree."""
    if cache.keys is None:
        return []
    keys, values = cache.keys_and_values()
    assert mx.all(keys[..., :1] == -values[..., :1]).item()
    return [int(x) for x in keys[0, 0, :, 0].tolist()]


def filled(pool: BlockPoolAllocator) -> list[int]:
    """Token slots of each stream that hold tokens, by the pool's books."""
    size = pool.config.block_size
    return [(s.managed - s.n_free) * size - s.slack for s in pool._streams]


def check_charge(pool: BlockPoolAllocator, caches: Iterable[Any]) -> None:
    """The pool holds out exactly the charge and the fill that these caches stand for."""
    size = pool.config.block_size
    blocks = fill = 0
    for cache in caches:
        if cache.keys is not None:
            batch, _, capacity, _ = cache.keys.shape
            blocks += batch * -(-capacity // size)
            fill += batch * cache.offset
    assert pool.stats.blocks_in_use() == 2 * blocks
    assert sum(filled(pool)) == 2 * fill
    if pool.config.separate_kv:
        assert filled(pool) == [fill, fill]


def new_pool(**config: Any) -> BlockPoolAllocator:
    """A pool with room for everything here, unless the test says otherwise."""
    return BlockPoolAllocator(PoolConfig(**{"n_blocks": 4096, **config}))


# -- mlx-lm's own behaviour, side by side ----------------------------------------------------------


def plain(value: Any) -> Any:
    """Arrays, tuples and caches as something that `==` compares whole."""
    if isinstance(value, mx.array):
        return [str(value.dtype), value.shape, value.tolist()]
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if hasattr(value, "offset"):
        kept = None if value.keys is None else value.keys_and_values()
        return [plain(kept), plain(value.offset), value.empty(), value.size()]
    return value


def feed(caches: list[Any], n: int, start: int = 0, batch: int = 1) -> list[Any]:
    """Append the same tokens to every layer."""
    return [c.update_and_fetch(*tokens(n, start=start, batch=batch)) for c in caches]


def appending(caches: list[Any], tmp_path: Path) -> Any:
    """Prefill, decode, prefill again: what comes back, and what the arrays weigh."""
    seen: list[Any] = []
    for start, n in [(0, 5), (5, 1), (6, 300), (306, 1), (307, 206), (513, 0), (513, 600)]:
        seen.append(feed(caches, n, start))
        seen.append([(c.offset, c.nbytes, c.size(), c.empty(), c.is_trimmable()) for c in caches])
    return seen


def nothing_yet(caches: list[Any], tmp_path: Path) -> Any:
    """A14: everything that may be read of an empty cache."""
    mx.eval([c.state for c in caches])
    return [(c.state, c.nbytes, c.size(), c.empty(), c.trim(3), c.offset) for c in caches]


def trimming(caches: list[Any], tmp_path: Path) -> Any:
    """Trim by a part, by more than there is, to a multiple of the step; and go on from there."""
    feed(caches, 600)
    seen = [[c.trim(50) for c in caches], plain(caches)]
    seen += [stock.trim_prompt_cache(caches, 38), stock.can_trim_prompt_cache(caches)]
    seen += [caches[0].trim(0), caches[1].trim(0), plain(caches), feed(caches, 400, 512)]
    seen += [[c.trim(10**6) for c in caches], plain(caches), feed(caches, 7)]
    return [*seen, [c.nbytes for c in caches]]


def masks(caches: list[Any], tmp_path: Path) -> Any:
    """The masks that the models ask for."""
    feed(caches, 9)
    asked: list[dict[str, Any]] = [
        {"return_array": False, "window_size": None},
        {"return_array": True, "window_size": None},
        {"return_array": True, "window_size": 4},
    ]
    return [caches[0].make_mask(n, **kwargs) for n in (1, 3) for kwargs in asked]


def stating(caches: list[Any], tmp_path: Path) -> Any:
    """From state to a cache of the same type, and on; and set back to an earlier state."""
    feed(caches, 20)
    early = [c.state for c in caches]
    feed(caches, 290, 20)
    made = [type(c).from_state(c.state) for c in caches]
    seen = [plain(made), feed(made, 3, 310)]
    for cache, state in zip(caches, early, strict=True):
        cache.state = state
    return [*seen, plain(caches), feed(caches, 4, 20)]


def saving(caches: list[Any], tmp_path: Path) -> Any:
    """U60: save_prompt_cache and load_prompt_cache, with and without tokens."""
    seen: list[Any] = []
    for n in (0, 44):
        feed(caches, n) if n else None
        file = str(tmp_path / f"{n}.safetensors")
        stock.save_prompt_cache(file, caches, {"model": "tiny"})
        loaded, metadata = stock.load_prompt_cache(file, return_metadata=True)
        assert [type(c) for c in loaded] == [type(c) for c in caches]
        seen += [plain(loaded), metadata, feed(loaded, 300, n), plain(loaded)]
    return seen


def copying(caches: list[Any], tmp_path: Path) -> Any:
    """B23: copies go their own way."""
    feed(caches, 30)
    deep = copy.deepcopy(caches)
    seen = [feed(deep, 5, 30), [c.trim(1) for c in deep]]
    feed(caches, 3, 50)
    return [*seen, plain(deep), plain(caches), plain(copy.copy(caches[0]))]


def prompt_caching(caches: list[Any], tmp_path: Path) -> Any:
    """LRUPromptCache: exact, shorter and longer hits, a miss, and eviction."""
    feed(caches, 40)
    lru = stock.LRUPromptCache(max_size=2)
    lru.insert_cache("m", list(range(40)), caches)
    seen: list[Any] = []
    for wanted in (list(range(40)), list(range(45)), list(range(30)), [7, 7]):
        found, rest = lru.fetch_nearest_cache("m", wanted)
        seen += [rest, plain(found)]
        if found is not None:
            seen.append(feed(found, 4, 100))
            lru.insert_cache("m", [*wanted, 1, 1], found)
    return [*seen, len(lru), lru.nbytes]


def quantizing(caches: list[Any], tmp_path: Path) -> Any:
    """U67: to_quantized, empty and filled, and on from there."""
    empty = [c.to_quantized(group_size=32, bits=4) for c in caches]
    feed(caches, 33)
    made = [c.to_quantized(group_size=32, bits=8) for c in caches]
    seen = [[type(q).__name__ for q in empty + made], empty[0].empty(), plain(made[0].state)]
    seen += [made[1].update_and_fetch(*tokens(2, start=33)), made[1].nbytes]
    return [*seen, plain(caches), feed(caches, 1, 33)]


def merging(caches: list[Any], tmp_path: Path) -> Any:
    """A batch of caches of several lengths, decoded, filtered and taken apart again."""
    feed(caches[:1], 12)
    feed(caches[1:], 5)
    batch = type(caches[0]).merge(caches)
    seen = [type(batch).__name__, plain(batch.state)]
    seen.append(batch.update_and_fetch(*tokens(1, start=50, batch=2)))
    seen += [plain(batch.extract(0)), plain(batch.extract(1))]
    empty = type(caches[0]).merge([type(caches[0]).from_state((None, None, 0))] * 2)
    return [*seen, empty.empty(), plain(caches)]


SCENARIOS: list[Callable[[list[Any], Any], Any]] = [
    appending,
    nothing_yet,
    trimming,
    masks,
    stating,
    saving,
    copying,
    prompt_caching,
    quantizing,
    merging,
]


@pytest.mark.parametrize("kind", ["separate", "unified", "unbound"])
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda f: f.__name__)
def test_does_what_the_stock_cache_does(
    scenario: Callable[[list[Any], Any], Any], kind: str, tmp_path: Path
) -> None:
    """The same calls on two layers give the same answers; the charge is right before and after."""
    expected = scenario([stock.KVCache(), stock.KVCache()], tmp_path)
    pool = new_pool(separate_kv=kind == "separate")
    if kind == "unbound":
        caches = [PoolBackedKVCache.from_state((None, None, 0)) for _ in range(2)]
    else:
        caches = [PoolBackedKVCache(pool, "request") for _ in range(2)]
    got = scenario(caches, tmp_path)
    assert plain(got) == plain(expected)
    check_charge(pool, caches if kind != "unbound" else [])
    caches[0].release()
    del caches
    assert pool.stats.blocks_in_use() == 0
    assert filled(pool) == [0] * len(pool._streams)


def test_an_array_put_in_place_by_a_model_is_kept() -> None:
    """Pipelined models assign `cache.keys = mx.depends(cache.keys, ...)`."""
    pool = new_pool()
    cache = PoolBackedKVCache(pool)
    cache.update_and_fetch(*tokens(3))
    assert cache.keys is not None
    cache.keys = mx.depends(cache.keys, mx.zeros(1))
    cache.update_and_fetch(*tokens(300, start=3))
    assert held_ids(cache) == list(range(303))
    check_charge(pool, [cache])


def test_state_is_cut_to_offset() -> None:
    """Room that is not used yet is neither saved nor evaluated."""
    cache = PoolBackedKVCache(new_pool())
    cache.update_and_fetch(*tokens(42))
    keys, values, offset = cache.state
    assert keys is not None
    assert values is not None
    assert (keys.shape[2], values.shape[2], offset) == (42, 42, 42)


# -- the charge ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("block_size", "step"), [(16, 256), (256, 256), (512, 512), (24, 256)])
def test_A07_default_step_is_never_below_256(block_size: int, step: int) -> None:
    """Growth by single blocks cost 8-10 % of decode speed; only who asks gets a smaller step."""
    pool = new_pool(block_size=block_size)
    cache = PoolBackedKVCache(pool)
    cache.update_and_fetch(*tokens(1))
    assert cache.step == step
    assert cache.keys is not None
    assert cache.keys.shape[2] == step
    check_charge(pool, [cache])
    assert PoolBackedKVCache(pool, step=16).step == 16


def test_U65_charge_is_what_the_arrays_hold() -> None:
    """20 x 200 tokens are charged by capacity, and a step of 1 does not take a block a token."""
    pool = new_pool()
    cache = PoolBackedKVCache(pool)
    for turn in range(20):
        cache.update_and_fetch(*tokens(200, start=200 * turn))
        check_charge(pool, [cache])
    assert cache.keys is not None
    assert pool.stats.blocks_in_use() == 2 * -(-cache.keys.shape[2] // 16)
    single = PoolBackedKVCache(fresh := new_pool(), step=1)
    for turn in range(160):
        single.update_and_fetch(*tokens(1, start=turn))
    assert fresh.stats.blocks_in_use() == 2 * 10
    assert filled(fresh) == [160, 160]


@pytest.mark.parametrize("step", [0, -5, 2.5, True, "16"])
def test_U65_step_is_checked_at_construction(step: Any) -> None:
    """A bad step never waits for the first token."""
    with pytest.raises(ValueError, match="step"):
        PoolBackedKVCache(new_pool(), step=step)


@pytest.mark.parametrize(
    ("args", "wrong"),
    [((None,), "pool"), (("pool",), "pool"), (({}, 1.5), "owner"), (({}, True), "owner")],
)
def test_arguments_of_a_wrong_type_are_named(args: tuple[Any, ...], wrong: str) -> None:
    """A TypeError that says which argument, before anything is charged."""
    given = [new_pool() if arg == {} else arg for arg in args]
    with pytest.raises(TypeError, match=wrong):
        PoolBackedKVCache(*given)


def test_U64_a_batch_is_charged_by_its_size() -> None:
    """Eight sequences hold eight times the memory of one."""
    pool = new_pool()
    one, eight = PoolBackedKVCache(pool, "one"), PoolBackedKVCache(pool, "eight")
    one.update_and_fetch(*tokens(20))
    eight.update_and_fetch(*tokens(20, batch=8))
    assert len(pool.blocks_for("eight")) == 8 * len(pool.blocks_for("one"))
    check_charge(pool, [one, eight])
    eight.update_and_fetch(*tokens(300, start=20, batch=8))
    eight.trim(11)
    check_charge(pool, [one, eight])


@pytest.mark.parametrize(
    ("dtype", "tag"),
    [(mx.float16, "fp16"), (mx.bfloat16, "bf16"), (mx.float32, "fp32"), (mx.uint8, "uint8")],
)
def test_blocks_carry_the_format_of_the_arrays(dtype: Any, tag: str) -> None:
    """The pool can say what its blocks hold."""
    pool = new_pool()
    cache = PoolBackedKVCache(pool, 7)
    cache.update_and_fetch(*tokens(3, dtype=dtype))
    assert {block.format for block in pool.blocks_for(7)} == {tag}


def test_trim_lowers_the_fill_and_never_the_charge() -> None:
    """The arrays keep their room, so the blocks stay."""
    pool = new_pool()
    cache = PoolBackedKVCache(pool)
    cache.update_and_fetch(*tokens(100))
    before = pool.stats.blocks_in_use()
    assert cache.trim(60) == 60
    assert pool.stats.blocks_in_use() == before
    assert filled(pool) == [40, 40]
    with pytest.raises(ValueError, match="-1"):
        cache.trim(-1)
    assert cache.offset == 40


@pytest.mark.parametrize("n", [1.5, 100.0, True, "1", None])
def test_a_trim_by_what_is_no_int_changes_nothing(n: Any) -> None:
    """A float would become the offset before the pool refused it."""
    pool = new_pool()
    cache = PoolBackedKVCache(pool)
    cache.update_and_fetch(*tokens(10))
    with pytest.raises(ArgumentTypeError, match="n must be an int"):
        cache.trim(n)
    assert held_ids(cache) == list(range(10))
    assert type(cache.offset) is int
    check_charge(pool, [cache])


def test_to_quantized_gives_the_charge_back() -> None:
    """U67: the quantised cache is mlx-lm's; the other layers of the request stay charged."""
    pool = new_pool()
    caches = [PoolBackedKVCache(pool, 3) for _ in range(3)]
    for cache in caches:
        cache.update_and_fetch(*tokens(40))
    quantized = caches[0].to_quantized(group_size=32, bits=4)
    assert type(quantized) is stock.QuantizedKVCache
    check_charge(pool, caches[1:])
    caches[0].update_and_fetch(*tokens(1, start=40))
    check_charge(pool, caches)


def test_a_refused_to_quantized_keeps_the_charge() -> None:
    """MLX refuses a group size that does not divide the head; nothing was changed."""
    pool = new_pool()
    cache = PoolBackedKVCache(pool)
    cache.update_and_fetch(*tokens(40))
    with pytest.raises(ValueError, match="group"):
        cache.to_quantized(group_size=128, bits=4)
    check_charge(pool, [cache])


def test_merge_leaves_the_charge_with_its_sources() -> None:
    """The batch is mlx-lm's and not charged; the sources are until they are dropped."""
    pool = new_pool()
    caches = [PoolBackedKVCache(pool, name) for name in "ab"]
    for cache in caches:
        cache.update_and_fetch(*tokens(8))
    batch = PoolBackedKVCache.merge(caches)
    assert type(batch) is stock.BatchKVCache
    check_charge(pool, caches)
    extracted = batch.extract(0)
    assert type(extracted) is stock.KVCache
    del caches, cache
    assert pool.stats.blocks_in_use() == 0
    assert held_ids(extracted) == list(range(8))


# -- nothing changes on an error -------------------------------------------------------------------

GOOD = (1, HEADS, 5, K_DIM), (1, HEADS, 5, V_DIM)
BAD_SHAPES = {
    "U61_values_shorter": ((1, HEADS, 5, K_DIM), (1, HEADS, 4, V_DIM)),
    "U61_values_of_one_token": ((1, HEADS, 5, K_DIM), (1, HEADS, 1, V_DIM)),
    "U61_other_key_dim": ((1, HEADS, 5, K_DIM + 1), (1, HEADS, 5, V_DIM)),
    "U61_other_value_dim": ((1, HEADS, 5, K_DIM), (1, HEADS, 5, V_DIM + 1)),
    "U61_more_heads": ((1, HEADS + 1, 5, K_DIM), (1, HEADS + 1, 5, V_DIM)),
    "U61_other_heads_in_values": ((1, HEADS, 5, K_DIM), (1, HEADS + 1, 5, V_DIM)),
    "U61_other_batch": ((2, HEADS, 5, K_DIM), (2, HEADS, 5, V_DIM)),
    "U61_three_dimensions": ((HEADS, 5, K_DIM), (HEADS, 5, V_DIM)),
    "U62_one_key_dim": ((1, HEADS, 5, 1), (1, HEADS, 5, V_DIM)),
    "U62_one_value_dim": ((1, HEADS, 5, K_DIM), (1, HEADS, 5, 1)),
    "U62_one_head": ((1, 1, 5, K_DIM), (1, 1, 5, V_DIM)),
}


def grown(shape: tuple[int, ...], n: int) -> tuple[int, ...]:
    """`shape` with `n` more tokens."""
    return (*shape[:-2], shape[-2] + n, shape[-1])


@pytest.mark.parametrize("growth", [0, 600], ids=["within", "growing"])
@pytest.mark.parametrize("shapes", BAD_SHAPES.values(), ids=BAD_SHAPES.keys())
def test_U61_U62_shapes_are_checked_before_anything(
    shapes: tuple[tuple[int, ...], tuple[int, ...]], growth: int
) -> None:
    """What mlx-lm would broadcast or break on is refused, with or without growth."""
    pool = new_pool()
    cache = PoolBackedKVCache(pool)
    cache.update_and_fetch(*tokens(10))
    before = (cache.keys, cache.values, cache.offset, repr(pool), filled(pool))
    keys, values = (mx.zeros(grown(shape, growth)) for shape in shapes)
    with pytest.raises(ValueError, match="keys"):
        cache.update_and_fetch(keys, values)
    assert cache.keys is before[0]
    assert cache.values is before[1]
    assert (cache.offset, repr(pool), filled(pool)) == before[2:]
    cache.update_and_fetch(*tokens(2, start=10))
    assert held_ids(cache) == list(range(12))


def test_U61_a_refused_first_input_leaves_the_cache_empty() -> None:
    """Nothing is charged for keys and values that do not belong together."""
    pool = new_pool()
    cache = PoolBackedKVCache(pool)
    with pytest.raises(ValueError, match="keys"):
        cache.update_and_fetch(mx.zeros((1, 2, 5, 8)), mx.zeros((1, 2, 6, 8)))
    assert (cache.empty(), cache.offset, pool.stats.blocks_in_use()) == (True, 0, 0)
    cache.update_and_fetch(mx.zeros((3, 1, 5, 8)), mx.zeros((3, 1, 5, 0)))
    check_charge(pool, [cache])


@pytest.mark.parametrize("separate_kv", [True, False])
@pytest.mark.parametrize("n_blocks", [0, 31, 63, 95])
def test_exhaustion_changes_nothing(n_blocks: int, separate_kv: bool) -> None:
    """One block short in one stream, at the first and at a later growth: k and v, or neither."""
    pool = new_pool(n_blocks=n_blocks, separate_kv=separate_kv)
    cache = PoolBackedKVCache(pool, "r")
    room = 256 * (n_blocks // 32)
    for start in range(0, room, 256):
        cache.update_and_fetch(*tokens(256, start=start))
    before = (cache.keys, cache.values, cache.offset, repr(pool), filled(pool))
    with pytest.raises(BlockPoolExhaustedError):
        cache.update_and_fetch(*tokens(1, start=room))
    assert cache.keys is before[0]
    assert cache.values is before[1]
    assert (cache.offset, repr(pool), filled(pool)) == before[2:]
    assert pool.stats.n_exhausted == 1
    check_charge(pool, [cache])
    if room:
        cache.trim(1)
        cache.update_and_fetch(*tokens(1, start=room - 1))
        assert held_ids(cache) == list(range(room))


def test_a_failure_of_mlx_after_the_charge_gives_it_back() -> None:
    """MLX refuses an array longer than int32, after the pool had agreed to one huge block."""
    pool = BlockPoolAllocator(PoolConfig(block_size=2**31, n_blocks=8))
    cache = PoolBackedKVCache(pool)
    with pytest.raises((TypeError, ValueError, OverflowError)):
        cache.update_and_fetch(*tokens(4))
    assert (cache.empty(), cache.offset, pool.stats.blocks_in_use()) == (True, 0, 0)
    assert filled(pool) == [0, 0]
    assert pool.stats.n_allocations == 2


def test_a_failure_of_mlx_within_the_room_there_is_changes_nothing() -> None:
    """The keys are written already when MLX sees that the values are no array."""

    class NoArray:
        shape = (1, HEADS, 5, V_DIM)

    pool = new_pool()
    cache = PoolBackedKVCache(pool)
    cache.update_and_fetch(*tokens(10))
    with pytest.raises((TypeError, ValueError)):
        cache.update_and_fetch(tokens(5)[0], NoArray())
    assert held_ids(cache) == list(range(10))
    check_charge(pool, [cache])


@pytest.mark.parametrize(
    "state",
    [
        (mx.zeros((1, 2, 4, 8)), mx.zeros((1, 2, 3, 8)), 3),
        (mx.zeros((1, 2, 4, 8)), mx.zeros((1, 2, 4, 8)), 5),
        (mx.zeros((1, 2, 4, 8)), mx.zeros((1, 2, 4, 8)), -1),
        (mx.zeros((2, 4, 8)), mx.zeros((2, 4, 8)), 2),
        (mx.zeros((1, 2, 4, 8)), None, 2),
        (None, None, 2),
    ],
)
def test_a_state_that_does_not_fit_together_is_refused(state: Any) -> None:
    """Neither set nor loaded, and nothing changes."""
    pool = new_pool()
    cache = PoolBackedKVCache(pool)
    cache.update_and_fetch(*tokens(10))
    with pytest.raises(ValueError, match=r"state|offset"):
        cache.state = state
    with pytest.raises(ValueError, match=r"state|offset"):
        PoolBackedKVCache.from_state(state)
    assert held_ids(cache) == list(range(10))
    check_charge(pool, [cache])


@pytest.mark.parametrize("offset", [20.0, True, "20", None])
def test_a_state_whose_offset_is_no_int_changes_nothing(offset: Any) -> None:
    """Neither the arrays nor the charge, which the longer arrays would have raised."""
    pool = new_pool(n_blocks=256)
    cache = PoolBackedKVCache(pool)
    cache.update_and_fetch(*tokens(10))
    with pytest.raises(ArgumentTypeError, match="offset must be an int"):
        cache.state = (*tokens(600), offset)
    with pytest.raises(ArgumentTypeError, match="offset must be an int"):
        PoolBackedKVCache.from_state((*tokens(600), offset))
    assert held_ids(cache) == list(range(10))
    check_charge(pool, [cache])


def test_U62_a_state_of_another_shape_is_what_later_input_must_fit() -> None:
    """Shapes that fitted before the assignment are looked at again."""
    cache = PoolBackedKVCache(new_pool())
    cache.update_and_fetch(*tokens(10))
    cache.state = mx.zeros((1, HEADS + 1, 10, K_DIM)), mx.zeros((1, HEADS + 1, 10, V_DIM)), 5
    with pytest.raises(ValueError, match="keys"):
        cache.update_and_fetch(*tokens(10))


def test_a_state_is_charged_up_and_down() -> None:
    """By the arrays that are set; one that the pool cannot hold changes nothing."""
    pool = new_pool(n_blocks=64)
    cache = PoolBackedKVCache(pool)
    for n in (100, 300, 20, 0, 50):
        cache.state = (*tokens(n), n) if n else (None, None, 0)
        assert held_ids(cache) == list(range(n))
        check_charge(pool, [cache])
    with pytest.raises(BlockPoolExhaustedError):
        cache.state = (*tokens(600), 600)
    assert held_ids(cache) == list(range(50))
    check_charge(pool, [cache])


# -- owners and requests ---------------------------------------------------------------------------


def test_U58_caches_without_an_owner_never_share_one() -> None:
    """Releasing one leaves the other alone."""
    pool = new_pool()
    a, b = PoolBackedKVCache(pool), PoolBackedKVCache(pool)
    assert a.owner != b.owner
    for cache in (a, b):
        cache.update_and_fetch(*tokens(10))
    a.release()
    check_charge(pool, [b])
    assert held_ids(b) == list(range(10))


@pytest.mark.parametrize("charged", [(True, True), (False, True)])
def test_release_of_any_layer_ends_the_request(charged: tuple[bool, ...]) -> None:
    """All blocks come back and every layer is empty, whichever layer was asked."""
    pool = new_pool()
    layers = [PoolBackedKVCache(pool, "r") for _ in charged]
    other = PoolBackedKVCache(pool, "other")
    for layer, charge in zip([*layers, other], [*charged, True], strict=True):
        if charge:
            layer.update_and_fetch(*tokens(20))
    layers[0].release()
    check_charge(pool, [other])
    assert [(c.empty(), c.offset, c.nbytes) for c in layers] == [(True, 0, 0)] * 2
    layers[0].release()
    layers[1].update_and_fetch(mx.zeros((2, 1, 4, 8)), mx.zeros((2, 1, 4, 8)))
    check_charge(pool, [other, *layers])
    layers[0].release()
    check_charge(pool, [other])


@pytest.mark.parametrize("how", ["release", "del"])
def test_a_later_request_with_the_same_owner_id_is_left_alone(how: str) -> None:
    """Neither a late release nor a late finalizer touches what the id's next holder holds."""
    pool = new_pool()
    old = [PoolBackedKVCache(pool, 7) for _ in range(2)]
    for cache in old:
        cache.update_and_fetch(*tokens(20))
    pool.free_all(7)
    new = [PoolBackedKVCache(pool, 7) for _ in range(2)]
    for cache in new:
        cache.update_and_fetch(*tokens(30))
    if how == "release":
        old[0].release()
        assert old[1].empty()
    else:
        del old, cache
        gc.collect()
    assert [held_ids(cache) for cache in new] == [list(range(30))] * 2
    check_charge(pool, new)


def test_a_later_registration_of_the_same_owner_id_is_left_alone() -> None:
    """It was freed and registered again, so it is not the released request's any more."""
    pool = new_pool()
    old = PoolBackedKVCache(pool, 7)
    old.update_and_fetch(*tokens(20))
    pool.free_all(7)
    pool.register_owner(7)
    old.release()
    with pytest.raises(OwnerAlreadyActiveError):
        pool.register_owner(7)


def test_layers_of_several_formats_are_one_request() -> None:
    """Each format is held apart; one that was given back does not hide the other."""
    pool = new_pool()
    layers = [PoolBackedKVCache(pool, 7) for _ in range(2)]
    layers[0].update_and_fetch(*tokens(20, dtype=mx.float16))
    layers[0].update_and_fetch(*tokens(300, start=20, dtype=mx.float32))
    layers[1].update_and_fetch(*tokens(20, dtype=mx.float32))
    check_charge(pool, layers)
    formats = [block.format for block in pool.blocks_for(7)]
    assert (formats.count("fp16"), formats.count("fp32")) == (2 * -(-(20 + 512) // 16), 2 * 16)
    layers[1].to_quantized(group_size=32, bits=4)
    check_charge(pool, layers[:1])
    layers[1].release()
    assert pool.stats.blocks_in_use() == 0


def test_a_request_never_charged_ends_its_registration_but_frees_nothing() -> None:
    """An owner registered for a request that failed before its first token can come again."""
    pool = new_pool()
    pool.register_owner("r")
    early = PoolBackedKVCache(pool, "r")
    early.release()
    pool.register_owner("r")
    pool.allocate("k", 16, "r")
    early.release()
    assert len(pool.blocks_for("r")) == 1


def test_a_request_quantised_whole_ends_its_registration() -> None:
    """Its layers gave their blocks back one by one, so that nothing is left to free."""
    pool = new_pool()
    pool.register_owner("r")
    caches = PooledCaches([PoolBackedKVCache(pool, "r") for _ in range(2)])
    for cache in caches:
        cache.update_and_fetch(*tokens(20))
        cache.to_quantized(group_size=32, bits=4)
    assert pool.stats.blocks_in_use() == 0
    caches.release()
    pool.register_owner("r")


def test_an_owner_freed_behind_the_caches_back_is_charged_again() -> None:
    """The cache keeps its tokens and its memory, so the next update charges for all of it."""
    pool = new_pool()
    cache = PoolBackedKVCache(pool, 1)
    cache.update_and_fetch(*tokens(20))
    pool.free_all(1)
    check_charge(pool, [])
    assert repr(cache) == "<PoolBackedKVCache owner=1 offset=20 blocks=2x0>"
    cache.trim(2)
    cache.update_and_fetch(*tokens(1, start=18))
    assert held_ids(cache) == list(range(19))
    check_charge(pool, [cache])


def test_U60_a_loaded_cache_is_charged_from_attach_on(tmp_path: Path) -> None:
    """Unbound until then; attach charges all of it or nothing, once."""
    pool = new_pool(n_blocks=64)
    cache = PoolBackedKVCache(pool, "r", step=32)
    cache.update_and_fetch(*tokens(70))
    stock.save_prompt_cache(str(tmp_path / "c.safetensors"), [cache] * 2)
    loaded = stock.load_prompt_cache(str(tmp_path / "c.safetensors"))
    assert [(c.pool, c.owner, held_ids(c)) for c in loaded] == [(None, None, list(range(70)))] * 2
    check_charge(pool, [cache])
    for layer in loaded:
        layer.attach(pool, "again")
    check_charge(pool, [cache, *loaded])
    with pytest.raises(ValueError, match="again"):
        loaded[0].attach(pool, "r")
    full = PoolBackedKVCache.from_state((*tokens(600), 600))
    with pytest.raises(BlockPoolExhaustedError):
        full.attach(pool)
    assert full.pool is None
    assert full.update_and_fetch(*tokens(1, start=600))[0].shape[2] == 601
    loaded[1].release()
    check_charge(pool, [cache])


def test_B23_a_copied_request_has_one_new_owner() -> None:
    """Layers copied together share it, requests copied together stay two."""
    pool = new_pool()
    a = [PoolBackedKVCache(pool, "a") for _ in range(2)]
    b = [PoolBackedKVCache(pool, "b", step=64)]
    for cache in a + b:
        cache.update_and_fetch(*tokens(20))
    copied = copy.deepcopy(PooledCaches([*a, *b]))
    owners = [c.owner for c in copied]
    assert owners[0] == owners[1] != owners[2]
    assert not {"a", "b"}.intersection(owners)
    assert [c.step for c in copied] == [256, 256, 64]
    check_charge(pool, [*a, *b, *copied])
    copied[1].release()
    check_charge(pool, [*a, *b, copied[2]])
    copied.release()
    check_charge(pool, a + b)


def test_B23_a_shallow_copy_is_a_copy() -> None:
    """Two caches cannot share one charge, nor, as stock ones do, overwrite each other's tokens."""
    pool = new_pool()
    cache = PoolBackedKVCache(pool)
    cache.update_and_fetch(*tokens(20))
    copied = copy.copy(cache)
    cache.update_and_fetch(*tokens(5, start=50))
    assert held_ids(copied) == list(range(20))
    assert copied.owner != cache.owner
    check_charge(pool, [cache, copied])


def test_B23_a_copy_is_whole_or_not_at_all() -> None:
    """The pool has room for one more layer of the two."""
    pool = new_pool(n_blocks=2 * 16 * 3)
    layers = [PoolBackedKVCache(pool, "r") for _ in range(2)]
    for layer in layers:
        layer.update_and_fetch(*tokens(20))
    with pytest.raises(BlockPoolExhaustedError) as caught:
        copy.deepcopy(layers)
    check_charge(pool, layers)
    assert caught.value.stream == "k"
    assert [held_ids(c) for c in layers] == [list(range(20))] * 2


def test_B23_pickling_a_bound_cache_says_what_to_do_instead() -> None:
    """Its blocks belong to this process; an unbound one goes through."""
    pool = new_pool()
    cache = PoolBackedKVCache(pool)
    cache.update_and_fetch(*tokens(20))
    with pytest.raises(TypeError, match="save_prompt_cache"):
        pickle.dumps(cache)
    loaded = pickle.loads(pickle.dumps(PoolBackedKVCache.from_state(cache.state)))
    loaded.attach(pool)
    assert held_ids(loaded) == list(range(20))
    check_charge(pool, [cache, loaded])


class FreedInBetween(BlockPoolAllocator):
    """A pool on which another thread frees an owner just before it allocates, once."""

    __slots__ = ("victims",)

    def __init__(self) -> None:
        super().__init__(PoolConfig(n_blocks=4096))
        self.victims: list[int] = []

    def allocate_kv(self, *args: Any, **kwargs: Any) -> Any:
        """First free the victim."""
        if self.victims:
            self.free_all(self.victims.pop())
        return super().allocate_kv(*args, **kwargs)


def test_an_owner_freed_during_growth_is_charged_again() -> None:
    """The growth alone would be too small a charge."""
    pool = FreedInBetween()
    cache = PoolBackedKVCache(pool, 1)
    cache.update_and_fetch(*tokens(20))
    pool.victims.append(1)
    cache.update_and_fetch(*tokens(300, start=20))
    assert held_ids(cache) == list(range(320))
    check_charge(pool, [cache])


def test_release_inside_a_pool_call_is_queued() -> None:
    """A signal handler releases while its thread is in the pool; nothing raises, nothing is lost."""
    pool = new_pool()
    pool.register_owner("unused")
    used, unused = PoolBackedKVCache(pool, "used"), PoolBackedKVCache(pool, "unused")
    used.update_and_fetch(*tokens(20))
    pool._busy = True
    for cache in (used, unused):
        cache.release()
    pool._busy = False
    used.update_and_fetch(*tokens(3))
    assert held_ids(used) == [0, 1, 2]
    check_charge(pool, [used])


# -- every way out ---------------------------------------------------------------------------------


def test_B10_a_with_block_releases_on_every_exit() -> None:
    """A cache and a list of caches, left by an exception that is no Exception."""
    pool = new_pool()
    layers = [PoolBackedKVCache(pool) for _ in range(3)]

    def interrupted() -> None:
        with layers[0], PooledCaches([layers[1], stock.CacheList(layers[2])]):
            for layer in layers:
                layer.update_and_fetch(*tokens(3))
            check_charge(pool, layers)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert pool.stats.blocks_in_use() == 0


def test_B10_a_dropped_cache_gives_its_charge_back() -> None:
    """Without release, alone or as a layer of a request that lives on, and in a cycle."""
    pool = new_pool()
    layers = [PoolBackedKVCache(pool, "r") for _ in range(2)]
    for layer in layers:
        layer.update_and_fetch(*tokens(256))
    del layer, layers[0]
    assert pool.stats.blocks_in_use() == 2 * 16
    cycle: list[Any] = [PoolBackedKVCache(pool)]
    cycle[0].update_and_fetch(*tokens(3))
    cycle.append(cycle)
    del cycle
    gc.collect()
    check_charge(pool, layers)


@pytest.mark.timeout(60)
def test_a_finalizer_does_not_wait_for_the_lock() -> None:
    """A cache is collected while another thread is inside the pool."""
    pool = new_pool()
    cache = PoolBackedKVCache(pool)
    cache.update_and_fetch(*tokens(3))
    inside, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with pool._lock:
            inside.set()
            leave.wait(20)

    thread = threading.Thread(target=hold)
    thread.start()
    assert inside.wait(20)
    del cache
    assert thread.is_alive()
    leave.set()
    thread.join()
    assert pool.stats.blocks_in_use() == 0


@pytest.mark.timeout(60)
def test_interpreter_shutdown_is_silent() -> None:
    """Caches that outlive everything else are dropped without a word."""
    script = """if True:
        import mlx.core as mx
        from veloxquant_mlx.memory import BlockPoolAllocator, PoolBackedKVCache
        pool = BlockPoolAllocator()
        caches = [PoolBackedKVCache(pool) for _ in range(3)]
        for cache in caches:
            cache.update_and_fetch(mx.zeros((1, 1, 3, 4)), mx.zeros((1, 1, 3, 4)))
        caches.append(caches)
        import builtins
        builtins.kept = [caches[0], caches[1]]
        print(pool.stats.blocks_in_use())
    """
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        check=False,
        capture_output=True,
        text=True,
        env={"PYTHONPATH": ":".join(sys.path)},
    )
    assert (done.stdout, done.stderr, done.returncode) == ("96\n", "", 0)


def test_no_array_is_evaluated() -> None:
    """64 MiB a growth would show in MLX's active memory."""
    pool = new_pool()
    shape = (1, 64, 300, 256)
    gc.collect()
    before = mx.get_active_memory()
    cache = PoolBackedKVCache(pool)
    cache.update_and_fetch(mx.zeros(shape), mx.zeros(shape))
    cache.update_and_fetch(mx.zeros(shape), mx.zeros(shape))
    cache.trim(10)
    copied = copy.deepcopy(cache)
    made = PoolBackedKVCache.from_state(cache.state)
    made.attach(pool)
    quantized = made.to_quantized(64, 4)
    with pytest.raises(ValueError, match="keys"):
        cache.update_and_fetch(mx.zeros(shape), mx.zeros((1, 1, 1, 1)))
    assert repr(cache) != repr(copied)
    assert mx.get_active_memory() - before < 2**20
    mx.eval(quantized.keys[0][0, 0, :1])
    assert mx.get_active_memory() - before > 2**20


def test_repr_tells_owner_offset_and_blocks() -> None:
    """Enough to see what a cache is worth in a log."""
    cache = PoolBackedKVCache(new_pool(), "r")
    cache.update_and_fetch(*tokens(20))
    assert repr(cache) == "<PoolBackedKVCache owner='r' offset=20 blocks=2x16>"
    assert "unbound offset=0" in repr(PoolBackedKVCache.from_state((None, None, 0)))


# -- any history -----------------------------------------------------------------------------------


class AnyHistory(RuleBasedStateMachine):
    """Requests of two layers each, against lists of token numbers and the charge by formula."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPoolAllocator(PoolConfig(block_size=4, n_blocks=700))
        self.requests: list[list[Any]] = []
        self.ids: list[list[int]] = []
        self.free: set[int] = set()  # requests whose owner was freed behind their backs
        self.next_id = 0

    def _pick(self, data: st.DataObject) -> int:
        return data.draw(st.integers(0, len(self.requests) - 1))

    @rule(step=st.sampled_from([1, 3, 8, None]), batch=st.integers(1, 2))
    @precondition(lambda self: len(self.requests) < 4)
    def start(self, step: int | None, batch: int) -> None:
        """A new request of two empty layers."""
        owner = self.pool.fresh_owner()
        self.requests.append([PoolBackedKVCache(self.pool, owner, step) for _ in range(2)])
        self.ids.append([])

    @rule(data=st.data(), n=st.integers(0, 40))
    @precondition(lambda self: self.requests)
    def append(self, data: st.DataObject, n: int) -> None:
        """The same tokens to both layers; a refusal is undone by trimming the first."""
        i = self._pick(data)
        for done, layer in enumerate(self.requests[i]):
            try:
                layer.update_and_fetch(*tokens(n, start=self.next_id))
            except BlockPoolExhaustedError:
                for earlier in self.requests[i][:done]:
                    earlier.trim(n)
                return
        self.ids[i] += range(self.next_id, self.next_id + n)
        self.next_id += n

    @rule(data=st.data(), n=st.integers(0, 50))
    @precondition(lambda self: self.requests)
    def trim(self, data: st.DataObject, n: int) -> None:
        """Some or all tokens off."""
        i = self._pick(data)
        for layer in self.requests[i]:
            layer.trim(n)
        del self.ids[i][max(0, len(self.ids[i]) - n) :]

    @rule(data=st.data())
    @precondition(lambda self: 0 < len(self.requests) < 4)
    def copy(self, data: st.DataObject) -> None:
        """Both layers, or none."""
        i = self._pick(data)
        try:
            copied = copy.deepcopy(self.requests[i])
        except BlockPoolExhaustedError:
            return
        self.requests.append(copied)
        self.ids.append(list(self.ids[i]))

    @rule(data=st.data())
    @precondition(lambda self: self.requests)
    def cut(self, data: st.DataObject) -> None:
        """Set each layer to its own state, which drops the unused room."""
        i = self._pick(data)
        for layer in self.requests[i]:
            try:
                layer.state = layer.state
            except BlockPoolExhaustedError:
                return

    @rule(data=st.data())
    @precondition(lambda self: self.requests)
    def release(self, data: st.DataObject) -> None:
        """By either layer."""
        i = self._pick(data)
        self.requests[i][data.draw(st.integers(0, 1))].release()
        self.ids[i] = []

    @rule(data=st.data())
    @precondition(lambda self: self.requests)
    def drop(self, data: st.DataObject) -> None:
        """Without release."""
        i = self._pick(data)
        del self.requests[i], self.ids[i]

    @rule(data=st.data())
    @precondition(lambda self: self.requests)
    def free_behind_its_back(self, data: st.DataObject) -> None:
        """By the owner, as a server does."""
        self.pool.free_all(self.requests[self._pick(data)][0].owner)

    @rule(data=st.data())
    @precondition(lambda self: self.requests)
    def quantize(self, data: st.DataObject) -> None:
        """One layer; it goes on as it was."""
        i = self._pick(data)
        self.requests[i][0].to_quantized(group_size=32, bits=8)

    @invariant()
    def holds_the_tokens(self) -> None:
        """Every layer, whatever the pool did."""
        for layers, ids in zip(self.requests, self.ids, strict=True):
            for layer in layers:
                assert held_ids(layer) == ids

    @invariant()
    def is_charged_by_the_formula(self) -> None:
        """All that was not freed behind its back or given back, and nothing else."""
        charged = [c for layers in self.requests for c in layers if c._charge.live]
        check_charge(self.pool, charged)


def test_any_history_keeps_tokens_and_charge() -> None:
    """Appending, trimming, copying, releasing, dropping and freeing in any order."""
    run_state_machine_as_test(
        AnyHistory,
        settings=settings(
            max_examples=40,
            stateful_step_count=25,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
