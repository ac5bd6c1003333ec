"""How the work of each call of the pool grows with blocks, counted and not timed.

Two counts, the same on every run: executed bytecodes, and the most bytes a call has allocated at
one time. The first sees loops in Python, the second copies made in C. That neither sees a search
through a list in C is why `benchmarks` measures time as well.
"""

from __future__ import annotations

import gc
import random
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from veloxquant_mlx.memory.block_pool import Block, BlockPoolAllocator, PoolConfig

pytestmark = pytest.mark.timeout(60)

SIZES = (64, 512, 4096)
Call = Callable[[], object]
Pool = type[BlockPoolAllocator]


# -- counting -------------------------------------------------------------------------------------


@contextmanager
def traced(count: Callable[[], None]) -> Iterator[None]:
    """Call `count` at every bytecode of this thread, by `sys.settrace`."""

    def trace(frame: Any, event: str, argument: object) -> Any:
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        if event == "opcode":
            count()
        return trace

    old = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(old)


@contextmanager
def monitored(count: Callable[[], None]) -> Iterator[None]:
    """The same by `sys.monitoring`: from 3.12 on, `settrace` may miss the first call."""
    monitoring: Any = sys.monitoring  # type: ignore[attr-defined, unused-ignore]
    tool, event = 4, monitoring.events.INSTRUCTION
    monitoring.use_tool_id(tool, "scaling")
    try:
        monitoring.register_callback(tool, event, lambda _code, _offset: count())
        monitoring.set_events(tool, event)
        yield
    finally:
        monitoring.set_events(tool, 0)
        monitoring.register_callback(tool, event, None)
        monitoring.free_tool_id(tool)


def bytecodes(call: Call) -> int:
    """Bytecodes that `call` executes."""
    n = 0

    def count() -> None:
        nonlocal n
        n += 1

    # A collection in between would count the finalizers of others.
    gc.disable()
    try:
        with (monitored if sys.version_info >= (3, 12) else traced)(count):
            call()
    finally:
        gc.enable()
    assert n > 20, "the counter is blind"
    return n


def peak_bytes(call: Call) -> int:
    """Most bytes that `call` has allocated at one time, of what it keeps and what it drops."""
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        kept = call()
        _, peak = tracemalloc.get_traced_memory()
        del kept
    finally:
        tracemalloc.stop()
    return peak - before


# -- calls that do not depend on blocks -----------------------------------------------------------

CONSTANT: dict[str, Callable[[Pool, int], Call]] = {}
LINEAR: dict[str, Callable[[Pool, int], Call]] = {}


def constant(build: Callable[[Pool, int], Call]) -> Callable[[Pool, int], Call]:
    """Enter a call that has to cost the same whatever n is."""
    CONSTANT[build.__name__] = build
    return build


def linear(build: Callable[[Pool, int], Call]) -> Callable[[Pool, int], Call]:
    """Enter a call that may cost n, and no more."""
    LINEAR[build.__name__] = build
    return build


def holding(pool_class: Pool, n: int) -> tuple[BlockPoolAllocator, list[Block]]:
    """A pool in which owner 1 holds n of 2n + 64 blocks, the others having been used before."""
    pool = pool_class(PoolConfig(n_blocks=2 * n + 64, separate_kv=False))
    pool.allocate("k", 16 * (n + 64), "before")
    blocks = pool.allocate("k", 16 * n - 5, 1)
    pool.free_all("before")
    return pool, blocks


@constant
def free_all(pool_class: Pool, n: int) -> Call:
    """Release of a plain owner."""
    pool, _ = holding(pool_class, n)
    return lambda: pool.free_all(1)


@constant
def free_all_after_a_single_free(pool_class: Pool, n: int) -> Call:
    """Release of an owner whose blocks are a dict."""
    pool, blocks = holding(pool_class, n)
    pool.free(blocks[3:5])
    return lambda: pool.free_all(1)


@constant
def free_all_of_a_registered_owner_with_two_formats(pool_class: Pool, n: int) -> Call:
    """Release of an owner with two leases."""
    pool = pool_class(PoolConfig(n_blocks=2 * n, separate_kv=False))
    pool.register_owner(1)
    pool.allocate("k", 16 * n, 1)
    pool.allocate("k", 16 * n - 1, 1, "int4")
    return lambda: pool.free_all(1)


@constant
def free_all_of_keys_and_values(pool_class: Pool, n: int) -> Call:
    """Release of an owner in two streams that took by turns."""
    pool = pool_class(PoolConfig(n_blocks=2 * n))
    for _ in range(n):
        pool.allocate("k", 16, 1)
        pool.allocate("v", 16, 1)
    return lambda: pool.free_all(1)


@constant
def free_all_in_a_large_pool(pool_class: Pool, n: int) -> Call:
    """Release of 64 blocks where others hold n."""
    pool, _ = holding(pool_class, n)
    pool.allocate("k", 16 * 64, 2)
    return lambda: pool.free_all(2)


@constant
def grow_by_one_block(pool_class: Pool, n: int) -> Call:
    """A decode step of a long request."""
    pool, _ = holding(pool_class, n)
    pool.allocate("k", 16, 1)  # a list that has just been filled moves at its first append
    return lambda: pool.allocate("k", 16, 1)


@constant
def one_block_for_a_new_owner(pool_class: Pool, n: int) -> Call:
    """A short request beside a long one."""
    pool, _ = holding(pool_class, n)
    return lambda: pool.allocate("k", 3, 2)


@constant
def one_block_of_keys_and_values(pool_class: Pool, n: int) -> Call:
    """A decode step of a long request in both streams."""
    pool = pool_class(PoolConfig(n_blocks=2 * n + 64))
    pool.allocate_kv(16 * n, 1)
    pool.allocate_kv(1, 1)
    return lambda: pool.allocate_kv(1, 1)


@constant
def mark_used(pool_class: Pool, n: int) -> Call:
    """A token more, in a full and in a partial block."""
    pool, blocks = holding(pool_class, n)

    def mark() -> None:
        pool.mark_used(blocks[0], 4)
        pool.mark_used(blocks[0], 5)
        pool.mark_used(blocks[-1], 16)

    return mark


@constant
def add_filled(pool_class: Pool, n: int) -> Call:
    """Tokens more, told by lease."""
    pool, blocks = holding(pool_class, n)
    return lambda: pool.add_filled(-5, blocks[0].lease)


@constant
def registration(pool_class: Pool, n: int) -> Call:
    """An owner that comes and goes beside a long request."""
    pool, _ = holding(pool_class, n)

    def register() -> None:
        pool.register_owner(2)
        pool.release_owner(2)
        pool.fresh_owner()

    return register


@constant
def free_one_block(pool_class: Pool, n: int) -> Call:
    """A single free of an owner that had one before."""
    pool, blocks = holding(pool_class, n)
    pool.free(blocks[:1])
    return lambda: pool.free(blocks[n // 2 : n // 2 + 1])


@constant
def reading(pool_class: Pool, n: int) -> Call:
    """What a scrape asks."""
    pool, blocks = holding(pool_class, n)

    def read() -> None:
        pool.n_free("k")
        pool.stats.snapshot().fragmentation()
        pool.stats.to_prometheus()
        pool.refusal(blocks[0], owner=2)
        repr(pool)

    return read


@linear
def allocate(pool_class: Pool, n: int) -> Call:
    """A prefill of n blocks."""
    pool, _ = holding(pool_class, n)
    return lambda: pool.allocate("k", 16 * n, 2)


@linear
def free_in_order(pool_class: Pool, n: int) -> Call:
    """A list from the front."""
    pool, blocks = holding(pool_class, n)
    return lambda: pool.free(blocks)


@linear
def free_reversed(pool_class: Pool, n: int) -> Call:
    """A list from the back."""
    pool, blocks = holding(pool_class, n)
    return lambda: pool.free(blocks[::-1])


@linear
def free_shuffled(pool_class: Pool, n: int) -> Call:
    """A list in no order, of an owner with two formats."""
    pool, blocks = holding(pool_class, n)
    blocks += pool.allocate("k", 16 * n, 1, "int4")
    random.Random(n).shuffle(blocks)
    return lambda: pool.free(blocks)


@linear
def blocks_for(pool_class: Pool, n: int) -> Call:
    """What an owner holds, in two formats that it took by turns."""
    pool, _ = holding(pool_class, n)
    for _ in range(n // 8):
        pool.allocate("k", 16 * 4, 1, "int4")
        pool.allocate("k", 16 * 4, 1)
    return lambda: pool.blocks_for(1)


@linear
def shrink(pool_class: Pool, n: int) -> Call:
    """All free blocks go."""
    pool, _ = holding(pool_class, n)
    return lambda: pool.shrink("k", 0)


# -- the guards -----------------------------------------------------------------------------------


def assert_constant(build: Callable[[Pool, int], Call], pool_class: Pool) -> None:
    """Fail if the call does more for more blocks."""
    steps = [bytecodes(build(pool_class, n)) for n in SIZES]
    assert max(steps) <= 1.05 * min(steps), f"bytecodes grow with blocks: {steps}"
    peaks = [peak_bytes(build(pool_class, n)) for n in SIZES]
    assert max(peaks) <= min(peaks) + 2048, f"bytes grow with blocks: {peaks}"


def assert_linear(build: Callable[[Pool, int], Call], pool_class: Pool) -> None:
    """Fail if the call does more than proportional to blocks."""
    steps = [bytecodes(build(pool_class, n)) for n in SIZES]
    for (n, few), (m, many) in zip(
        zip(SIZES, steps, strict=True), zip(SIZES[1:], steps[1:], strict=False), strict=False
    ):
        assert many <= 1.05 * m / n * few, f"bytecodes grow faster than blocks: {steps}"


@pytest.mark.parametrize("name", CONSTANT)
def test_work_that_does_not_depend_on_blocks(name: str) -> None:
    """Everything but allocate, free(list), blocks_for and shrink costs the same at any size."""
    assert_constant(CONSTANT[name], BlockPoolAllocator)


@pytest.mark.parametrize("name", LINEAR)
def test_work_that_grows_with_blocks_at_most(name: str) -> None:
    """Those four are linear in the blocks they are about, in any order."""
    assert_linear(LINEAR[name], BlockPoolAllocator)


def test_what_released_owners_leave_does_not_pile_up() -> None:
    """Blocks that stay free keep their last lease, but not the order of everything it was part of."""
    pool = BlockPoolAllocator(PoolConfig(n_blocks=1200))
    gc.disable()
    tracemalloc.start()
    try:
        left = []
        for n in range(500, 300, -10):  # so that each request leaves blocks of the one before
            for _ in range(n):
                pool.allocate("k", 16, n)
                pool.allocate("v", 16, n)
            pool.free_all(n)
            pool.free(pool.allocate("k", 17, "next"))
            left.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
        gc.enable()
    # An order of 800 turns takes 8 kB, a lease less than 1; from 3.13 on, a list that shrinks item by
    # item keeps its 4 kB.
    assert left[-1] - left[4] < 15 * 5000, left


# -- that the guards see --------------------------------------------------------------------------


class Visiting(BlockPoolAllocator):
    """A pool with a release that visits each block, in Python."""

    __slots__ = ()

    def free_all(self, owner: int | str) -> None:
        """Look at each block, then release."""
        for block in self._owners[owner]._blocks:
            block._fill = 0
        super().free_all(owner)


class Copying(BlockPoolAllocator):
    """A pool with a release that copies the list of blocks, in C."""

    __slots__ = ()

    def free_all(self, owner: int | str) -> None:
        """Copy, then release."""
        held = list(self._owners[owner]._blocks)
        super().free_all(owner)
        del held


class Scanning(BlockPoolAllocator):
    """A pool with a growth step that looks at every free block."""

    __slots__ = ()

    def allocate(
        self, stream: str, n_tokens: int, owner: int | str, format: str = "fp16"
    ) -> list[Block]:
        """Look at each free block, then allocate."""
        assert all(block._fill >= 0 for block in self._streams[0].top)
        return super().allocate(stream, n_tokens, owner, format)


class Searching(BlockPoolAllocator):
    """A pool with a list free that searches for each block from the front, in Python."""

    __slots__ = ()

    def free(self, blocks: Any, *, owner: int | str | None = None) -> None:
        """Search, then free."""
        held = self.blocks_for(1)
        for block in blocks:
            next((i for i, candidate in enumerate(held) if candidate is block), None)
        super().free(blocks, owner=owner)


@pytest.mark.parametrize(
    ("name", "pool_class", "message"),
    [
        ("free_all", Visiting, "bytecodes grow with"),
        ("free_all", Copying, "bytes grow with"),
        ("free_all_in_a_large_pool", Copying, None),
        ("grow_by_one_block", Scanning, "bytecodes grow with"),
    ],
)
def test_the_guard_sees_a_planted_fault(name: str, pool_class: Pool, message: str | None) -> None:
    """A release or a growth step that visits, copies or scans blocks is caught, by its count."""
    if message is None:  # a copy of what the owner holds is constant in the size of the pool
        assert_constant(CONSTANT[name], pool_class)
        return
    with pytest.raises(AssertionError, match=message):
        assert_constant(CONSTANT[name], pool_class)


def test_the_guard_sees_a_quadratic_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search from the front of the list, for each block of a reversed list, is caught."""
    monkeypatch.setattr(sys.modules[__name__], "SIZES", (32, 64, 128))
    with pytest.raises(AssertionError, match="faster than blocks"):
        assert_linear(LINEAR["free_reversed"], Searching)
