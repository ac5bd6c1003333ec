"""MLXBlockStorage: write, read and reuse of blocks, on the CPU and on the GPU where there is one.

Wall time: MLX computes on threads of its own, or on a device.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

mx = pytest.importorskip("mlx.core", reason="an MLX backend is an extra")

from veloxquant_mlx.memory.block_pool import BlockPoolAllocator, PoolConfig  # noqa: E402
from veloxquant_mlx.memory.mlx_storage import MLXBlockStorage  # noqa: E402

SIZE, HEAD_DIM = 16, 128
BLOCKS = (64, 1024)
DEVICES = ["cpu", "gpu"] if mx.is_available(mx.gpu) else ["cpu"]


@pytest.fixture(params=DEVICES)
def device(request: Any) -> Iterator[str]:
    """Make this device MLX's default meanwhile."""
    before = mx.default_device()
    mx.set_default_device(mx.Device(getattr(mx, request.param)))
    yield request.param
    mx.set_default_device(before)


class Store:
    """A pool with its storage, one owner's blocks, and rows to write."""

    def __init__(self, n_blocks: int, fmt: str = "fp16") -> None:
        self.pool = BlockPoolAllocator(PoolConfig(SIZE, n_blocks, separate_kv=False))
        self.storage = MLXBlockStorage(self.pool, HEAD_DIM)
        self.fmt, self.n_blocks = fmt, n_blocks
        self.rows = mx.ones((SIZE, HEAD_DIM), dtype=mx.float16)
        mx.eval(self.rows)
        self.blocks = self.take()

    def take(self) -> list[Any]:
        """All blocks of the pool, for one owner."""
        return self.pool.allocate("kv", SIZE * self.n_blocks, 1, self.fmt)

    def write(self) -> None:
        """Every block once, evaluated."""
        for block in self.blocks:
            self.storage.write(block, 0, self.rows)
        self.storage.evaluate()

    def retake(self) -> None:
        """Give all back and take all again: buffers go to a new holder as zeros."""
        self.pool.free_all(1)
        self.blocks = self.take()


@pytest.mark.parametrize("n_blocks", BLOCKS)
@pytest.mark.benchmark(group="storage: write")
def test_write(measure: Any, device: str, n_blocks: int) -> None:
    """First write of every block: makes its buffer."""
    store = Store(n_blocks)
    measure(
        store.write,
        setup=store.retake,
        check=lambda: bool(mx.all(store.storage.read(store.blocks[-1]) == 1).item()),
        n_blocks=n_blocks,
        rounds=7,
    )


@pytest.mark.parametrize("n_blocks", BLOCKS)
@pytest.mark.benchmark(group="storage: overwrite")
def test_overwrite(measure: Any, device: str, n_blocks: int) -> None:
    """Writing blocks that have their buffers."""
    store = Store(n_blocks)
    store.write()
    measure(
        store.write,
        check=lambda: bool(mx.all(store.storage.read(store.blocks[0]) == 1).item()),
        n_blocks=n_blocks,
        rounds=7,
    )


@pytest.mark.parametrize("n_blocks", BLOCKS)
@pytest.mark.benchmark(group="storage: read")
def test_read(measure: Any, device: str, n_blocks: int) -> None:
    """Reading every block's rows, evaluated together."""
    store = Store(n_blocks)
    store.write()
    seen: list[Any] = []

    def read() -> None:
        seen[:] = [store.storage.read(block) for block in store.blocks]
        mx.eval(seen)

    measure(
        read,
        check=lambda: len(seen) == n_blocks and bool(mx.all(seen[-1] == 1).item()),
        n_blocks=n_blocks,
        rounds=7,
    )


@pytest.mark.parametrize("n_blocks", BLOCKS)
@pytest.mark.benchmark(group="storage: one token")
def test_one_token(measure: Any, device: str, n_blocks: int) -> None:
    """One row into the last block of a long owner, and its rows read: a decode step."""
    store = Store(n_blocks)
    store.write()
    last, row = store.blocks[-1], mx.full((1, HEAD_DIM), 2.0, dtype=mx.float16)
    mx.eval(row)

    def step() -> None:
        store.storage.write(last, 0, row)
        mx.eval(store.storage.read(last))

    measure(
        step,
        check=lambda: bool(mx.all(store.storage.read(last)[0] == 2).item()),
        n_blocks=1,
    )


@pytest.mark.benchmark(group="storage: usage")
@pytest.mark.parametrize("n_blocks", BLOCKS)
def test_usage(measure: Any, device: str, n_blocks: int) -> None:
    """The byte counts that a scrape asks for."""
    store = Store(n_blocks)
    store.write()
    seen: list[int] = []

    def ask() -> None:
        seen[:] = [store.storage.usage().resident_bytes for _ in range(64)]

    measure(
        ask,
        check=lambda: seen[0] == store.storage.resident_bytes() > 0,
        n_blocks=0,
        calls=64,
    )
