"""Caches: a decode step, growth over many steps, and the release of a request. Wall time."""

from __future__ import annotations

from typing import Any

import pytest

mx = pytest.importorskip("mlx.core", reason="an MLX backend is an extra")
pytest.importorskip("mlx_lm", reason="the caches are mlx-lm's")

from mlx_lm.models.cache import KVCache  # noqa: E402

from veloxquant_mlx.memory.block_pool import BlockPoolAllocator, PoolConfig  # noqa: E402
from veloxquant_mlx.memory.pool_backed_cache import PoolBackedKVCache  # noqa: E402

SIZE, HEADS, HEAD_DIM = 16, 2, 64
TOKENS = (256, 4096)


def pool_for(n_tokens: int, n_layers: int = 1) -> BlockPoolAllocator:
    """Room for keys and values of `n_tokens`, rounded up to growth steps, in each layer."""
    return BlockPoolAllocator(PoolConfig(SIZE, n_layers * 2 * (n_tokens // SIZE + 64)))


def rows(n: int) -> Any:
    """Keys or values of `n` tokens, evaluated."""
    found = mx.ones((1, HEADS, n, HEAD_DIM), dtype=mx.float16)
    mx.eval(found)
    return found


@pytest.mark.parametrize("kind", ["stock", "pooled"])
@pytest.mark.parametrize("n_tokens", TOKENS)
@pytest.mark.benchmark(group="caches: decode step")
def test_decode_step(measure: Any, kind: str, n_tokens: int) -> None:
    """One token more in a cache that holds `n_tokens`, evaluated."""
    pool = pool_for(n_tokens + 512)
    cache: Any = KVCache() if kind == "stock" else PoolBackedKVCache(pool, 1)
    many, one = rows(n_tokens), rows(1)
    cache.update_and_fetch(many, many)

    def step() -> None:
        mx.eval(cache.update_and_fetch(one, one))

    measure(step, check=lambda: cache.offset > n_tokens, n_blocks=n_tokens // SIZE, rounds=50)


@pytest.mark.parametrize("kind", ["stock", "pooled"])
@pytest.mark.benchmark(group="caches: growth")
def test_growth(measure: Any, kind: str) -> None:
    """512 tokens, one by one, into an empty cache of one layer: two growth steps."""
    one = rows(1)
    made: list[Any] = []

    def setup() -> None:
        for cache in made:
            getattr(cache, "release", lambda: None)()
        pool = pool_for(512)
        made[:] = [KVCache() if kind == "stock" else PoolBackedKVCache(pool, 1)]

    def grow() -> None:
        for _ in range(512):
            mx.eval(made[0].update_and_fetch(one, one))

    measure(grow, setup=setup, check=lambda: made[0].offset == 512, n_blocks=1, calls=512, rounds=5)


@pytest.mark.parametrize("n_tokens", TOKENS)
@pytest.mark.benchmark(group="caches: release")
def test_release(measure: Any, n_tokens: int) -> None:
    """The end of a request of 8 layers that share an owner."""
    pool = pool_for(n_tokens, 8)
    many = rows(n_tokens)
    free = pool.n_free("k")
    made: list[PoolBackedKVCache] = []

    def setup() -> None:
        made[:] = [PoolBackedKVCache(pool, 1) for _ in range(8)]
        for cache in made:
            cache.update_and_fetch(many, many)

    def release() -> None:
        for cache in made:
            cache.release()

    measure(
        release,
        setup=setup,
        check=lambda: pool.n_free("k") == free,
        n_blocks=8 * 2 * n_tokens // SIZE,
    )
