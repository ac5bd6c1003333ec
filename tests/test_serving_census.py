"""The census: every kind of cache, however it came to be, by its shapes and without evaluating it."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from veloxquant_mlx.serving.census import Census, kind_of
from veloxquant_mlx.serving.watch import Watch
from veloxquant_mlx.telemetry.program import CacheCensus
from veloxquant_mlx.telemetry.program_values import CACHE_KINDS

mx = pytest.importorskip("mlx.core")
lm = pytest.importorskip("mlx_lm.models.cache")


@pytest.fixture
def census() -> Iterator[Callable[[], Mapping[str, CacheCensus]]]:
    """Counts what is made in the test, and nothing of before."""
    gc.collect()
    watch = Watch()
    watch.start()
    yield lambda: watch.snapshot().caches or {}
    watch.stop()


def filled(cache: Any, n: int, rows: int = 1, heads: int = 2, dim: int = 32) -> Any:
    """The cache, with `n` more tokens a row."""
    keys = mx.zeros((rows, heads, n, dim), mx.float16)
    cache.update_and_fetch(keys, keys)
    return cache


def array_cache() -> Any:
    """A recurrent state, which has bytes but no slots."""
    cache = lm.ArraysCache(2)
    cache[0] = mx.zeros((1, 4, 8), mx.float32)
    return cache


# By kind: a cache, the slots it holds, and those that its arrays have room for.
MADE: dict[str, tuple[Callable[[], Any], int, int]] = {
    "KVCache": (lambda: filled(lm.KVCache(), 300), 300, 512),
    "RotatingKVCache": (lambda: filled(filled(lm.RotatingKVCache(64), 100), 1), 64, 64),
    "QuantizedKVCache": (lambda: filled(lm.QuantizedKVCache(32, 4), 10), 10, 256),
    "ConcatenateKVCache": (lambda: filled(lm.ConcatenateKVCache(), 7), 7, 7),
    "ChunkedKVCache": (lambda: filled(lm.ChunkedKVCache(128), 20), 20, 256),
    "BatchKVCache": (lambda: filled(lm.BatchKVCache([0, 2, 4]), 9, rows=3), 27, 768),
    "BatchRotatingKVCache": (lambda: filled(lm.BatchRotatingKVCache(32, [0, 0]), 5, 2), 10, 10),
    "ArraysCache": (array_cache, 0, 0),
}


@pytest.mark.parametrize("kind", MADE)
def test_a_cache_of_each_kind_is_counted_by_its_shapes(census: Any, kind: str) -> None:
    """Objects, slots held, room and bytes; and it is gone when it is gone."""
    make, held, room = MADE[kind]
    cache = make()
    n_bytes = cache.nbytes
    found = census()[kind]
    assert (found.n_objects, found.slots_held, found.slots_capacity) == (1, held, room)
    assert found.n_bytes == n_bytes > 0
    assert found.waste_bytes == (n_bytes * (room - held) // room if room else 0)
    del cache
    assert census()[kind] == CacheCensus()


def test_a_list_counts_as_an_object_and_its_caches_by_themselves(census: Any) -> None:
    """So that no byte counts twice."""
    cache = lm.CacheList(filled(lm.KVCache(), 5), array_cache())
    found = census()
    assert found["CacheList"] == CacheCensus(n_objects=1)
    assert sum(one.n_bytes for one in found.values()) == cache.nbytes


def test_copies_are_counted_however_they_are_made(census: Any) -> None:
    """deepcopy, copy, pickle, from_state, merge and extract pass no constructor of ours."""
    one, two = filled(lm.KVCache(), 5), filled(lm.KVCache(), 9)
    deep, flat = copy.deepcopy(one), copy.copy(one)
    stated = lm.KVCache.from_state(two.state)
    batch = lm.KVCache.merge([one, two])
    row = batch.extract(1)
    split = copy.deepcopy(batch)
    split.filter([0])
    empty = pickle.loads(pickle.dumps(lm.KVCache()))
    found = census()
    single = [one, two, deep, flat, stated, row, empty]
    assert found["KVCache"].n_objects == len(single)
    assert found["KVCache"].n_bytes == sum(cache.nbytes for cache in single)
    assert found["BatchKVCache"].n_objects == 2
    assert found["BatchKVCache"].n_bytes == batch.nbytes + split.nbytes
    assert found["BatchKVCache"].slots_held == 2 * 9 + 1 * 5


def test_a_class_of_the_programs_counts_as_its_nearest_of_mlx_lm(census: Any) -> None:
    """What derives from none of them is `other`, and told by its own `nbytes`."""

    class Mine(lm.KVCache):  # type: ignore[misc, name-defined]
        pass

    class Odd(lm._BaseCache):  # type: ignore[misc, name-defined]
        nbytes = 12

    class Broken(lm._BaseCache):  # type: ignore[misc, name-defined]
        @property
        def nbytes(self) -> int:
            raise RuntimeError

    kept = [filled(Mine(), 4), Odd(), Broken()]
    found = census()
    assert found["KVCache"].slots_held == 4
    assert (found["other"].n_objects, found["other"].n_bytes) == (2, 12)
    assert kind_of(Mine) == "KVCache" and kind_of(int) == "other"
    assert len(kept) == 3


def test_nothing_is_evaluated(census: Any) -> None:
    """What was lazy before the count is lazy after it: no memory was taken."""
    cache = filled(lm.KVCache(), 1000, heads=64, dim=128)
    batch = filled(lm.BatchKVCache([0] * 4), 1000, rows=4, heads=64, dim=128)
    before = mx.get_active_memory()
    found = census()
    assert found["KVCache"].n_bytes == cache.nbytes > 10_000_000
    assert found["BatchKVCache"].n_bytes == batch.nbytes
    assert mx.get_active_memory() - before < 1_000_000
    mx.eval(cache.state)
    assert mx.get_active_memory() - before > 10_000_000


def test_all_kinds_are_always_there(census: Any) -> None:
    """At 0 before there is one: no series comes and goes."""
    assert set(census()) == set(CACHE_KINDS)


def test_constructors_take_what_they_took_before(census: Any) -> None:
    """And refuse what they refused."""
    with pytest.raises(TypeError, match="takes no arguments"):
        lm._BaseCache(1)
    with pytest.raises(TypeError):
        lm.KVCache(1)
    with pytest.raises(TypeError):
        lm.RotatingKVCache()
    assert lm.RotatingKVCache(8, keep=2).keep == 2


def test_an_object_may_be_born_and_die_while_it_is_counted() -> None:
    """Ids are used again: a late end of the one before does not take the new one away."""
    census = Census()

    class Thing:
        keys = None

    things = [Thing() for _ in range(50)]
    for thing in things:
        census.on_cache_created(thing)
    del things[::2], thing
    for _ in range(200):
        census.on_cache_created(Thing())
    assert census.count()["other"].n_objects == 25


def test_ten_thousand_caches_take_no_time_to_speak_of(census: Any) -> None:
    """All are found; how long it takes is for benchmarks/bench_serving.py to say."""
    keys = mx.zeros((1, 1, 4, 8))
    caches = [lm.KVCache() for _ in range(10_000)]
    for cache in caches:
        cache.keys = cache.values = keys
        cache.offset = 3
    found = census()["KVCache"]
    assert (found.n_objects, found.slots_held) == (10_000, 30_000)
    assert found.n_bytes == 10_000 * caches[0].nbytes
