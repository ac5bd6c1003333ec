"""What hits a pool in the middle of a call: threads, forks, signals, finalizers, Ctrl-C.

Most of it is done twice: once by the real thing in numbers (timers, threads, the collector), and
once by the book: a trace function walks a call of the pool and strikes at one point after the
other, so that no point depends on luck.
"""

from __future__ import annotations

import dis
import functools
import gc
import itertools
import logging
import os
import random
import signal
import sys
import threading
import time
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Self

import pytest

import veloxquant_mlx.memory.block_pool
from veloxquant_mlx.core.exceptions import BlockPoolExhaustedError, PoolReentryError
from veloxquant_mlx.memory.audit import audit
from veloxquant_mlx.memory.block_pool import Block, BlockPoolAllocator, PoolConfig

# A thread-method timeout: the signal method uses the timer that these tests use themselves.
pytestmark = pytest.mark.timeout(100, method="thread")

POOL_FILES = str(Path(veloxquant_mlx.memory.block_pool.__file__).parent)
OWNERS = (1, 2, "victim", "late")

unix = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs POSIX signals and fork")


# Instructions, by the start of their names: after which signals are looked at; that make containers.
LOOKERS = ("CALL", "JUMP_BACKWARD", "RESUME")
MAKERS = ("BUILD_", "CALL", "BINARY_SLICE", "GET_ITER", "FOR_ITER", "LIST_TO", "MAKE_")

# -- striking at a chosen point -------------------------------------------------------------------


class Strike:
    """Calls `action` at the `turn`-th point inside the pool's own code.

    Points are where CPython looks at signals and lets threads switch: at the entry of a function,
    after a call into C, at the end of a loop's turn. With `finalizers`, also where it makes a
    container, since up to 3.11 the collector may run there, and finalizers with it.
    """

    def __init__(self, turn: int, action: Callable[[], object], *, finalizers: bool) -> None:
        self.turn, self.action, self.finalizers = turn, action, finalizers
        self.n_points = 0
        self.struck = False
        self.where = "nowhere"
        self._previous: dict[FrameType, int | None] = {}
        self._thread = 0

    def __enter__(self) -> Self:
        if sys.version_info >= (3, 13):
            # There settrace misses the instructions of code that it did not see before.
            self._thread = threading.get_ident()
            monitoring, events = sys.monitoring, sys.monitoring.events
            monitoring.use_tool_id(monitoring.DEBUGGER_ID, "strike")
            for event, callback in {
                events.INSTRUCTION: lambda code, _: self._monitor(code, "opcode"),
                events.PY_RETURN: lambda code, *_: self._monitor(code, "return"),
                events.PY_UNWIND: lambda code, *_: self._monitor(code, "return"),
            }.items():
                monitoring.register_callback(monitoring.DEBUGGER_ID, event, callback)
            monitoring.set_events(
                monitoring.DEBUGGER_ID, events.INSTRUCTION | events.PY_RETURN | events.PY_UNWIND
            )
        else:
            self._old = sys.gettrace()
            # In 3.12 settrace looks whether any frame asked for single instructions before.
            sys._getframe().f_trace_opcodes = True
            sys.settrace(self._trace)
        return self

    def __exit__(self, *error: object) -> None:
        if sys.version_info >= (3, 13):
            sys.monitoring.set_events(sys.monitoring.DEBUGGER_ID, 0)
            sys.monitoring.free_tool_id(sys.monitoring.DEBUGGER_ID)
        else:
            sys.settrace(self._old)
        self._previous.clear()

    def _monitor(self, code: CodeType, event: str) -> None:
        if threading.get_ident() == self._thread and code.co_filename.startswith(POOL_FILES):
            self._step(sys._getframe(2), event, None)

    def _trace(self, frame: FrameType, event: str, argument: object) -> Any:
        if self.struck or not frame.f_code.co_filename.startswith(POOL_FILES):
            return None
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        return self._step

    def _step(self, frame: FrameType, event: str, argument: object) -> Any:
        if self.struck:
            return None
        if event == "return":
            self._previous.pop(frame, None)
            if frame.f_back is not None:
                # Returning to Python code is no such point: forget the call that led here.
                self._previous[frame.f_back] = None
        elif event == "opcode":
            if self._is_point(frame):
                self.n_points += 1
                if self.n_points > self.turn:
                    self.struck = True
                    self.where = f"{frame.f_code.co_qualname}, line {frame.f_lineno}"
                    self.action()
            self._previous[frame] = frame.f_lasti
        return self._step

    def _is_point(self, frame: FrameType) -> bool:
        code = frame.f_code
        if self.finalizers and _makes(code, frame.f_lasti, self._previous.get(frame)):
            return True
        if frame not in self._previous:
            return True
        last = self._previous[frame]
        if last is None or not dis.opname[code.co_code[last]].startswith(LOOKERS):
            return False
        # A signal strikes at the end of the call, this at the instruction after it: only where
        # both stand under the same handlers is it the same.
        return _handler(code, last) == _handler(code, frame.f_lasti)


@functools.cache
def _appends(code: CodeType) -> frozenset[int]:
    """Where `list.append` is called: it makes no object that the collector would count."""
    offsets, method = set(), ""
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_METHOD", "LOAD_ATTR", "LOAD_GLOBAL"):
            method = str(instruction.argval)
        elif instruction.opname == "CALL" and method == "append":
            offsets.add(instruction.offset)
    return frozenset(offsets)


def _makes(code: CodeType, offset: int, previous: int | None) -> bool:
    """Whether the instruction makes a container; a subscript does only when it is a slice."""
    if offset in _appends(code):
        return False
    name = dis.opname[code.co_code[offset]]
    if name == "BINARY_SUBSCR" and previous is not None:
        return dis.opname[code.co_code[previous]] == "BUILD_SLICE"
    return name.startswith(MAKERS)


def _handler(code: CodeType, offset: int) -> int | None:
    for entry in dis._parse_exception_table(code):  # type: ignore[attr-defined]
        if entry.start <= offset < entry.end:
            target: int = entry.target
            return target
    return None


def interrupt() -> None:
    """Do what Ctrl-C does."""
    raise KeyboardInterrupt


# -- the books ------------------------------------------------------------------------------------


def assert_books(pool: BlockPoolAllocator) -> None:
    """Everything adds up, recounted from what the owners hold."""
    held = {owner: pool.blocks_for(owner) for owner in OWNERS}
    blocks = [block for mine in held.values() for block in mine]
    stats = pool.stats.snapshot()
    assert len(set(blocks)) == len(blocks) == stats.blocks_in_use()
    n_free = sum(pool.n_free(stream) for stream in streams_of(pool))
    assert n_free + len(blocks) == stats.n_blocks
    assert pool.config.n_blocks + stats.n_grown - stats.n_retired == stats.n_blocks
    size = pool.config.block_size
    partial = sum(0 < block.n_used < size for block in blocks)
    assert stats.fragmentation() == (partial / stats.n_blocks if stats.n_blocks else 0.0)
    assert stats.blocks_in_use() <= stats.peak_blocks_in_use
    assert audit(pool) == []
    for owner, mine in held.items():
        assert all(b.owner == owner and b.lease.live for b in mine)
        assert all(b.lease.owner == owner for b in mine)


def assert_usable(pool: BlockPoolAllocator) -> None:
    """No owner haunts the pool, and every block can be had once more, once."""
    for owner in OWNERS:
        if not pool.blocks_for(owner):
            pool.release_owner(owner)
            pool.register_owner(owner)  # raises if the books think that it holds something
        pool.free_all(owner)
        assert pool.blocks_for(owner) == []
        pool.register_owner(owner)
        pool.release_owner(owner)
    assert pool.stats.blocks_in_use() == 0
    taken: list[Block] = []
    for stream in streams_of(pool):
        n = pool.n_free(stream)
        if n:
            taken += pool.allocate(stream, n * pool.config.block_size, 1)
    assert len({b.block_id for b in taken}) == len(taken) == pool.stats.n_blocks
    assert_books(pool)
    pool.free_all(1)
    assert_books(pool)


def assert_unlocked(pool: BlockPoolAllocator) -> None:
    """Another thread gets an answer."""
    seen: list[int] = []

    def ask() -> None:
        seen.append(len(pool.history) + len(pool.blocks_for(1)))

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(10)
    assert seen, "the lock was left held"


def streams_of(pool: BlockPoolAllocator) -> tuple[str, ...]:
    """Return the pool's own streams."""
    return ("k", "v") if pool.config.separate_kv else ("kv",)


# -- the calls that are struck --------------------------------------------------------------------

Call = Callable[[], object]
Scenario = Callable[[], tuple[BlockPoolAllocator, Call]]
SCENARIOS: dict[str, Scenario] = {}


def scenario(build: Scenario) -> Scenario:
    """Enter a scenario under its function's name."""
    SCENARIOS[build.__name__] = build
    return build


def unified(n_blocks: int = 40, **options: Any) -> BlockPoolAllocator:
    """Return a pool with one free list, in which a bystander and a victim hold blocks."""
    pool = BlockPoolAllocator(
        PoolConfig(block_size=4, n_blocks=n_blocks, separate_kv=False, **options)
    )
    pool.allocate("k", 6, 1)
    pool.allocate("k", 6, "victim")
    return pool


def separate(n_blocks: int = 40, **options: Any) -> BlockPoolAllocator:
    """Return the same with two free lists."""
    pool = BlockPoolAllocator(PoolConfig(block_size=4, n_blocks=n_blocks, **options))
    pool.allocate_kv(6, 1)
    pool.allocate_kv(6, "victim")
    return pool


@scenario
def one_block_for_a_new_owner() -> tuple[BlockPoolAllocator, Call]:
    """The shortest path."""
    pool = unified()
    return pool, lambda: pool.allocate("k", 3, 2)


@scenario
def one_block_more() -> tuple[BlockPoolAllocator, Call]:
    """A decode step."""
    pool = unified()
    pool.free(pool.allocate("k", 4, 2)[:1])
    pool.allocate("k", 3, 2)
    return pool, lambda: pool.allocate("k", 3, 2)


@scenario
def one_full_block_more() -> tuple[BlockPoolAllocator, Call]:
    """A decode step that takes a whole block, one that was used before."""
    pool = unified()
    pool.allocate("k", 40, "late")
    pool.free_all("late")
    pool.allocate("k", 4, 2)
    return pool, lambda: pool.allocate("k", 4, 2)


@scenario
def one_block_more_of_many_leases() -> tuple[BlockPoolAllocator, Call]:
    """A decode step of an owner that holds keys and values."""
    pool = separate()
    pool.allocate_kv(9, 2)
    pool.allocate("k", 4, 2)
    return pool, lambda: (pool.allocate("v", 3, 2), pool.allocate("k", 4, 2))


@scenario
def one_block_more_after_single_frees() -> tuple[BlockPoolAllocator, Call]:
    """The same of an owner that lost single blocks."""
    pool = separate()
    pool.allocate_kv(9, 2)
    pool.free(pool.blocks_for(2)[1::3])
    return pool, lambda: (pool.allocate("v", 3, 2), pool.allocate("k", 4, 2))


@scenario
def one_block_of_another_format() -> tuple[BlockPoolAllocator, Call]:
    """A second lease."""
    pool = unified()
    pool.allocate("k", 3, 2)
    return pool, lambda: pool.allocate("k", 3, 2, "int4")


@scenario
def one_block_for_a_registered_owner() -> tuple[BlockPoolAllocator, Call]:
    """The registration has to survive."""
    pool = unified()
    pool.register_owner(2)
    return pool, lambda: pool.allocate("k", 3, 2)


@scenario
def many_blocks() -> tuple[BlockPoolAllocator, Call]:
    """A prefill, from never-used blocks."""
    pool = unified()
    return pool, lambda: pool.allocate("k", 27, 2)


@scenario
def many_reused_blocks() -> tuple[BlockPoolAllocator, Call]:
    """A prefill, from large and small regions that were freed before, and some new ones."""
    pool = unified(60)
    for owner in (2, "late"):
        pool.allocate("k", 80, owner)
    pool.free_all(2)
    pool.free_all("late")
    pool.free(pool.allocate("k", 14, 2)[1:3])
    return pool, lambda: pool.allocate("k", 4 * 45 - 1, 2)


@scenario
def many_blocks_after_a_single_free() -> tuple[BlockPoolAllocator, Call]:
    """An owner that already lost a block grows."""
    pool = unified()
    pool.allocate("k", 3, 2, "int4")
    pool.free(pool.allocate("k", 14, 2)[1:2])
    return pool, lambda: pool.allocate("k", 14, 2)


@scenario
def both_streams() -> tuple[BlockPoolAllocator, Call]:
    """Keys and values of one step."""
    pool = separate()
    return pool, lambda: pool.allocate_kv(11, 2)


@scenario
def both_streams_of_a_unified_pool() -> tuple[BlockPoolAllocator, Call]:
    """Keys and values from one list."""
    pool = unified()
    return pool, lambda: pool.allocate_kv(11, 2)


@scenario
def growth() -> tuple[BlockPoolAllocator, Call]:
    """An allocation that makes blocks."""
    pool = unified(7, grow_on_exhaustion=True)
    return pool, lambda: pool.allocate("k", 39, 2)


@scenario
def growth_of_both_streams() -> tuple[BlockPoolAllocator, Call]:
    """The same twice in one call."""
    pool = separate(10, grow_on_exhaustion=True, max_blocks=20)
    return pool, lambda: pool.allocate_kv(19, 2)


@scenario
def exhaustion() -> tuple[BlockPoolAllocator, Call]:
    """A refused allocation."""
    pool = unified(5)

    def fail() -> None:
        with pytest.raises(BlockPoolExhaustedError):
            pool.allocate("k", 39, 2)

    return pool, fail


@scenario
def free_some() -> tuple[BlockPoolAllocator, Call]:
    """A list in no order, partial blocks in it."""
    pool = unified()
    blocks = pool.allocate("k", 27, 2)
    return pool, lambda: pool.free([blocks[i] for i in (6, 0, 3)])


@scenario
def free_whole_lease() -> tuple[BlockPoolAllocator, Call]:
    """A list that ends a holding."""
    pool = unified()
    blocks = pool.allocate("k", 14, 2)
    return pool, lambda: pool.free(blocks[::-1], owner=2)


@scenario
def free_of_several_owners() -> tuple[BlockPoolAllocator, Call]:
    """A list with blocks of three owners, two formats, and repeated ones."""
    pool = unified()
    pool.register_owner(2)
    blocks = pool.allocate("k", 6, 2) + pool.allocate("k", 6, 2, "int4")
    blocks += pool.allocate("k", 9, "late") + pool.blocks_for(1)[:1]
    return pool, lambda: pool.free(blocks + blocks[:2])


@scenario
def free_all_of_one_lease() -> tuple[BlockPoolAllocator, Call]:
    """The end of a request."""
    pool = unified()
    pool.allocate("k", 14, 2)
    return pool, lambda: pool.free_all(2)


@scenario
def free_all_of_a_large_lease() -> tuple[BlockPoolAllocator, Call]:
    """A release whose list becomes a region of the free list."""
    pool = unified(80)
    pool.allocate("k", 14, "late")
    pool.free_all("late")
    pool.allocate("k", 4 * 30, 2)
    return pool, lambda: pool.free_all(2)


@scenario
def free_all_of_many_leases() -> tuple[BlockPoolAllocator, Call]:
    """The end of a registered request with keys, values and two formats."""
    pool = separate()
    pool.register_owner(2)
    pool.allocate_kv(9, 2)
    pool.allocate_kv(9, 2, "int4")
    pool.free(pool.blocks_for(2)[:1])
    return pool, lambda: pool.free_all(2)


@scenario
def free_held() -> tuple[BlockPoolAllocator, Call]:
    """The release of a cache."""
    pool = unified()
    blocks = pool.allocate("k", 14, 2)
    return pool, lambda: pool.free_held([*blocks, *pool.blocks_for(1)], blocks[0].lease)


@scenario
def queued_release() -> tuple[BlockPoolAllocator, Call]:
    """A read that first does what a finalizer left."""
    pool = unified()
    blocks = pool.allocate("k", 14, 2)
    late = pool.allocate("k", 14, "late")
    pool.free_held_later(blocks, blocks[0].lease)
    pool.free_held_later(late, late[0].lease)
    return pool, lambda: pool.n_free("k")


@scenario
def shrink_unused() -> tuple[BlockPoolAllocator, Call]:
    """Blocks never handed out go."""
    pool = unified()
    return pool, lambda: pool.shrink("k", 3)


@scenario
def shrink_everything() -> tuple[BlockPoolAllocator, Call]:
    """Blocks of every kind go."""
    pool = unified(80)
    for owner in (2, "late"):
        pool.allocate("k", 90, owner)
    pool.free_all(2)
    pool.free(pool.blocks_for("late"))
    return pool, lambda: pool.shrink("k", 0)


@scenario
def mark_used() -> tuple[BlockPoolAllocator, Call]:
    """The fill of a block moves."""
    pool = unified()
    block = pool.allocate("k", 4, 2)[0]
    return pool, lambda: pool.mark_used(block, 1)


@scenario
def add_filled() -> tuple[BlockPoolAllocator, Call]:
    """The fill of a lease moves."""
    pool = unified()
    lease = pool.allocate("k", 14, 2)[0].lease
    return pool, lambda: pool.add_filled(-5, lease)


@scenario
def registration() -> tuple[BlockPoolAllocator, Call]:
    """An owner comes and goes."""
    pool = unified()

    def register() -> None:
        pool.register_owner(2)
        pool.release_owner(2)
        pool.register_owner(2)

    return pool, register


@scenario
def reading() -> tuple[BlockPoolAllocator, Call]:
    """Everything that only looks."""
    pool = separate()
    pool.allocate_kv(9, 2)

    def read() -> object:
        shown = pool.stats.snapshot(), pool.history, pool.blocks_for(2), pool.n_free("v")
        return shown, pool.stats.to_prometheus(), pool.refusal(pool.blocks_for(1)[0], owner=2)

    return pool, read


each_scenario = pytest.mark.parametrize("name", list(SCENARIOS))


def strike_everywhere(
    name: str,
    action: Callable[[BlockPoolAllocator], object],
    check: Callable[[BlockPoolAllocator, BaseException | None], object],
    *,
    finalizers: bool = False,
    step: int = 1,
) -> None:
    """Run a scenario again and again, struck at one point after the other, until none is left.

    After each run `check` gets the pool and what the call raised.
    """
    for turn in itertools.count(0, step):
        pool, call = SCENARIOS[name]()
        raised: BaseException | None = None
        with Strike(turn, partial(action, pool), finalizers=finalizers) as strike:
            try:
                call()
            except BaseException as error:
                raised = error
        if not strike.struck:
            assert raised is None
            assert turn > 0, "the call was never struck"
            return
        try:
            check(pool, raised)
        except BaseException as error:
            error.add_note(f"struck in {strike.where}; the call raised {raised!r}")
            raise


def check_served(pool: BlockPoolAllocator, raised: BaseException | None) -> None:
    """The call went on as if nothing had happened, and the pool is as good as ever."""
    assert raised is None
    assert_books(pool)
    assert_usable(pool)


# -- Ctrl-C ---------------------------------------------------------------------------------------


@each_scenario
def test_interrupted_at_every_point(name: str) -> None:
    """Wherever Ctrl-C falls: the caller sees it, the lock is free, the books are whole."""

    def check(pool: BlockPoolAllocator, raised: BaseException | None) -> None:
        assert isinstance(raised, KeyboardInterrupt)
        assert_books(pool)
        assert_unlocked(pool)
        assert_usable(pool)

    strike_everywhere(name, lambda _: interrupt(), check)


def code_objects(code: CodeType) -> Iterator[CodeType]:
    """Yield `code` and everything defined in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from code_objects(constant)


def _protector(code: CodeType, offset: int) -> int | None:
    """Return the `except`, `finally` or `with` that would see an error raised at `offset`."""
    handler = _handler(code, offset)
    # What CPython adds itself, around comprehensions and generators, starts with something else.
    while handler is not None and dis.opname[code.co_code[handler]] != "PUSH_EXC_INFO":
        handler = _handler(code, handler)
    return handler


@pytest.mark.skipif(sys.version_info < (3, 12), reason="before, a loop's end was always covered")
def test_no_loop_of_the_pool_ends_outside_of_its_try() -> None:
    """A signal at the end of a turn meets the handlers of the loop.

    CPython leaves the jump back out of them when a loop's last statement is an `if`, and 3.13
    raises right there: such a `finally` never runs. Another statement has to come last.
    """
    uncovered = []
    for path in Path(POOL_FILES).glob("*.py"):
        for code in code_objects(compile(path.read_text(encoding="utf-8"), str(path), "exec")):
            for instruction in dis.get_instructions(code):
                if instruction.opname.startswith("JUMP_BACKWARD"):
                    head = _protector(code, instruction.argval)
                    if head not in (None, _protector(code, instruction.offset)):
                        line = instruction.positions.lineno if instruction.positions else 0
                        uncovered.append(f"{path.name}, line {line}, in {code.co_qualname}")
    assert uncovered == []


@contextmanager
def nothing_else() -> Iterator[None]:
    """Keep log lines and the collector away, so that Ctrl-C falls into the pool's own code.

    Inside of `logging` it leaves locks of its own held, inside of a callback it is swallowed.
    """
    logging.disable(logging.CRITICAL)
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        logging.disable(logging.NOTSET)


@contextmanager
def alarm_handler(handler: Callable[[], object]) -> Iterator[Callable[[float], None]]:
    """Yield what sets the real-time alarm that calls `handler` in this thread."""
    old = signal.signal(signal.SIGALRM, lambda *_: handler())
    try:
        yield lambda delay: (signal.setitimer(signal.ITIMER_REAL, delay), None)[1]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)


@unix
@pytest.mark.parametrize(
    "name",
    [
        "one_block_for_a_new_owner",
        "many_blocks",
        "many_reused_blocks",
        "both_streams",
        "growth",
        "free_some",
        "free_of_several_owners",
        "free_all_of_many_leases",
        "shrink_everything",
    ],
)
def test_interrupted_by_a_storm(name: str) -> None:
    """The same with real signals at random moments, 600 of them a call."""
    moments = random.Random(name)
    armed = False
    n_hits = 0

    def strike() -> None:
        nonlocal armed
        if armed:
            armed = False
            raise KeyboardInterrupt

    _, call = SCENARIOS[name]()
    started = time.perf_counter()
    call()
    latest = 1.2 * (time.perf_counter() - started)
    with nothing_else(), alarm_handler(strike) as set_alarm:
        for _ in range(12_000):
            pool, call = SCENARIOS[name]()
            try:
                armed = True
                set_alarm(moments.uniform(1e-6, latest))
                call()
                armed = False
            except KeyboardInterrupt:
                n_hits += 1
                assert_books(pool)
                assert_usable(pool)
                if n_hits % 8 == 0:
                    assert_unlocked(pool)
            finally:
                armed = False
            if n_hits == 600:
                break
    assert n_hits > 20, "the signals fell elsewhere: nothing was tested"


# Calls that wait for the lock; `held` are blocks of owner 1.
WAITERS: dict[str, Callable[[BlockPoolAllocator, list[Block]], object]] = {
    "allocate one": lambda pool, held: pool.allocate("k", 4, 1),
    "allocate many": lambda pool, held: pool.allocate("k", 40, 1),
    "allocate_kv": lambda pool, held: pool.allocate_kv(4, 1),
    "free": lambda pool, held: pool.free(held),
    "free_held": lambda pool, held: pool.free_held(held, held[0].lease),
    "free_all": lambda pool, held: pool.free_all(1),
    "free_all of nobody": lambda pool, held: pool.free_all("nobody"),
    "shrink": lambda pool, held: pool.shrink("k", 0),
    "mark_used": lambda pool, held: pool.mark_used(held[0], 1),
    "add_filled": lambda pool, held: pool.add_filled(-1, held[0].lease),
    "register_owner": lambda pool, held: pool.register_owner("late"),
    "release_owner": lambda pool, held: pool.release_owner(1),
    "blocks_for": lambda pool, held: pool.blocks_for(1),
    "history": lambda pool, held: pool.history,
    "snapshot": lambda pool, held: pool.stats.snapshot(),
}


@unix
@pytest.mark.parametrize("how", list(WAITERS))
def test_interrupted_while_waiting_for_another_thread(how: str) -> None:
    """Ctrl-C ends a call that waits for the lock, and neither hides nor takes anything."""
    pool, call = SCENARIOS["many_blocks"]()
    held = pool.blocks_for(1)

    def wait() -> None:
        set_alarm(0.02)
        WAITERS[how](pool, held)

    with Pause(12, call) as inside, alarm_handler(interrupt) as set_alarm:
        assert inside
        with pytest.raises(KeyboardInterrupt):
            wait()
    assert len(pool.blocks_for(2)) == 7, "the other thread's call went on"
    assert pool.blocks_for(1) == held
    assert_books(pool)
    assert_unlocked(pool)
    assert_usable(pool)


# -- signal handlers and finalizers inside a call -------------------------------------------------


def read_everything(pool: BlockPoolAllocator) -> None:
    """Ask what a handler may ask; the answers are sane, also in the middle of a call."""
    snapshot = pool.stats.snapshot()
    assert 0 <= snapshot.blocks_in_use() <= snapshot.n_blocks
    assert 0.0 <= snapshot.fragmentation() <= 1.0
    for stream in streams_of(pool):
        assert 0 <= pool.n_free(stream) <= snapshot.n_blocks
    assert pool.stats.n_allocations == snapshot.n_allocations
    assert pool.stats.to_prometheus()
    assert pool.history[-1].n_blocks >= 0


@each_scenario
def test_read_at_every_point(name: str) -> None:
    """A handler that reads gets an answer wherever it strikes, and leaves no trace."""
    strike_everywhere(name, read_everything, check_served, finalizers=True, step=2)


@each_scenario
def test_snapshots_add_up_at_every_signal_point(name: str) -> None:
    """What a signal handler reads is a state between two calls, or between two of their parts."""

    def read(pool: BlockPoolAllocator) -> None:
        snapshot = pool.stats.snapshot()
        n_free = sum(pool.n_free(stream) for stream in streams_of(pool))
        assert n_free + snapshot.blocks_in_use() == snapshot.n_blocks
        grown, retired = snapshot.n_grown, snapshot.n_retired
        assert pool.config.n_blocks + grown - retired == snapshot.n_blocks

    strike_everywhere(name, read, check_served)


@each_scenario
def test_release_at_every_point(name: str) -> None:
    """A finalizer that releases an owner is served by the end of the call."""

    def check(pool: BlockPoolAllocator, raised: BaseException | None) -> None:
        assert pool.blocks_for("victim") == []
        check_served(pool, raised)

    strike_everywhere(name, lambda pool: pool.free_all("victim"), check, finalizers=True)


@each_scenario
def test_release_of_the_same_owner_at_every_point(name: str) -> None:
    """Also when the owner is the one that the call is about."""
    strike_everywhere(name, lambda pool: pool.free_all(2), check_served, finalizers=True)


@each_scenario
def test_queued_release_at_every_point(name: str) -> None:
    """The same for free_held_later."""
    held = {}
    build = SCENARIOS[name]

    def remembering() -> tuple[BlockPoolAllocator, Call]:
        pool, call = build()
        held[pool] = pool.blocks_for("victim")
        return pool, call

    def release(pool: BlockPoolAllocator) -> None:
        pool.free_held_later(held[pool], *{block.lease for block in held[pool]})

    def check(pool: BlockPoolAllocator, raised: BaseException | None) -> None:
        del held[pool]
        assert pool.blocks_for("victim") == []
        check_served(pool, raised)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SCENARIOS, name, remembering)
        strike_everywhere(name, release, check, finalizers=True, step=2)


REENTRIES: dict[str, Callable[[BlockPoolAllocator], object]] = {
    "allocate": lambda pool: pool.allocate("k", 6, "late"),
    "allocate_kv": lambda pool: pool.allocate_kv(3, "late"),
    "shrink": lambda pool: pool.shrink("k", 1),
    "register": lambda pool: pool.register_owner("late"),
    "release": lambda pool: pool.release_owner(2),
    "free": lambda pool: pool.free(pool.blocks_for("victim")),
    "free of the same": lambda pool: pool.free(pool.blocks_for(2)),
    "mark_used": lambda pool: [pool.mark_used(b, 1) for b in pool.blocks_for(2)],
    "mark_used 0": lambda pool: [pool.mark_used(b, 0) for b in pool.blocks_for(1)],
    "add_filled": lambda pool: [pool.add_filled(-3, b.lease) for b in pool.blocks_for(2)],
    "free_held": lambda pool: [pool.free_held([b], b.lease) for b in pool.blocks_for(2)],
}


@pytest.mark.parametrize("how", list(REENTRIES))
@pytest.mark.parametrize(
    "name",
    [
        "one_block_more",
        "one_block_more_of_many_leases",
        "one_block_more_after_single_frees",
        "one_block_of_another_format",
        "many_blocks_after_a_single_free",
        "both_streams",
        "growth",
        "free_some",
        "free_whole_lease",
        "free_all_of_many_leases",
        "queued_release",
        "shrink_unused",
        "mark_used",
        "add_filled",
    ],
)
def test_other_calls_from_inside_a_call(name: str, how: str) -> None:
    """A handler that changes the pool is served, or refused with PoolReentryError; no hang."""

    def reenter(pool: BlockPoolAllocator) -> None:
        with suppress(PoolReentryError, BlockPoolExhaustedError):
            REENTRIES[how](pool)

    def check(pool: BlockPoolAllocator, raised: BaseException | None) -> None:
        assert raised is None or isinstance(raised, (BlockPoolExhaustedError, ValueError))
        assert_books(pool)
        assert_usable(pool)

    strike_everywhere(name, reenter, check)


@unix
def test_C03_U38_signals_during_allocate() -> None:
    """Hundreds of real signals whose handler reads and releases while the pool is at work."""
    pool = unified()
    failures: list[BaseException] = []
    n_inside = n_signals = 0

    def handle() -> None:
        nonlocal n_inside, n_signals
        n_signals += 1
        n_inside += _inside_pool(sys._getframe())
        try:
            read_everything(pool)
            pool.free_all("late")
        except BaseException as error:
            failures.append(error)

    with alarm_handler(handle) as set_alarm:
        for turn in range(100_000):
            set_alarm(2e-5 + turn % 7 * 1e-5)
            pool.allocate("k", 30, "late")
            pool.allocate("k", 30, 2)
            pool.free(pool.blocks_for(2)[::2])
            pool.free_all(2)
            pool.free_all("late")
            if n_inside > 200 or failures:
                break
    assert failures == []
    assert n_inside > 200
    assert n_signals >= n_inside
    assert_books(pool)
    assert_unlocked(pool)
    assert_usable(pool)


def _inside_pool(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith(POOL_FILES):
            return True
        frame = frame.f_back
    return False


class Request:
    """Holds blocks and gives them back when it is collected; a cycle, so only a GC does it."""

    n_inside = 0
    n_gone = 0

    def __init__(self, pool: BlockPoolAllocator, owner: str, how: str) -> None:
        self.me, self.pool, self.owner, self.how = self, pool, owner, how
        self.blocks = pool.allocate("k", 6, owner)

    def __del__(self) -> None:
        Request.n_gone += 1
        Request.n_inside += _inside_pool(sys._getframe())
        if self.how == "free_all":
            self.pool.free_all(self.owner)
        elif self.how == "free":
            self.pool.free(self.blocks, owner=self.owner)
        else:
            self.pool.free_held_later(self.blocks, self.blocks[0].lease)


@contextmanager
def collector_off() -> Iterator[list[Any]]:
    """Leave collecting to `collect_inside`; yield what finalizers and callbacks raise."""
    unraisable: list[Any] = []
    old_hook, old_threshold = sys.unraisablehook, gc.get_threshold()
    sys.unraisablehook = unraisable.append
    gc.disable()
    try:
        yield unraisable
    finally:
        gc.enable()
        gc.set_threshold(*old_threshold)
        sys.unraisablehook = old_hook


def collect_inside(pool: BlockPoolAllocator, turn: int) -> None:
    """Make calls of the pool during which the collector starts, a little later each turn."""

    def cycle() -> None:
        pool.allocate("k", 1 + turn % 9, 2)
        pool.allocate("k", 9, 2, "int4")
        pool.free(pool.blocks_for(2)[::3])
        pool.free_all(2)
        pool.shrink("k", 40)

    gc.set_threshold(gc.get_count()[0] + 1 + turn % 20, 1000, 1000)
    gc.enable()
    cycle()
    gc.disable()


def growing() -> BlockPoolAllocator:
    """Return a pool that never runs out."""
    return BlockPoolAllocator(PoolConfig(4, 8, separate_kv=False, grow_on_exhaustion=True))


@pytest.mark.parametrize("how", ["free_all", "free", "free_held_later"])
def test_finalizers_release_inside_the_pool(how: str) -> None:
    """The collector strikes inside the pool's calls; releases from there are done, none lost."""
    pool = growing()
    gc.collect()
    Request.n_inside = Request.n_gone = 0
    with collector_off() as unraisable:
        for turn in range(200):
            Request(pool, f"request {turn}", how)
            collect_inside(pool, turn)
    gc.collect()
    assert unraisable == []
    assert Request.n_gone == 200
    assert Request.n_inside > 20, "the finalizers ran elsewhere: nothing was tested"
    assert pool.stats.blocks_in_use() == 0
    assert_books(pool)
    assert_unlocked(pool)
    assert_usable(pool)


def test_weakref_finalizers_release_inside_the_pool() -> None:
    """The same with weakref.finalize, the usual way to tie an owner to an object."""

    class Cache:
        def __init__(self) -> None:
            self.me = self

    pool = growing()
    n_inside = 0

    def release(owner: str) -> None:
        nonlocal n_inside
        n_inside += _inside_pool(sys._getframe())
        pool.free_all(owner)

    gc.collect()
    with collector_off() as unraisable:
        for turn in range(200):
            owner = f"request {turn}"
            pool.allocate("k", 6, owner)
            weakref.finalize(Cache(), release, owner)
            collect_inside(pool, turn)
    gc.collect()
    assert unraisable == []
    assert n_inside > 20, "the finalizers ran elsewhere: nothing was tested"
    assert pool.stats.blocks_in_use() == 0
    assert_books(pool)
    assert_usable(pool)


def test_gc_callbacks_inside_the_pool() -> None:
    """A monitor in gc.callbacks may read the pool and release an owner."""
    pool = growing()
    pool.allocate("k", 6, 1)
    n_inside = 0
    failures: list[BaseException] = []

    def watch(phase: str, info: dict[str, int]) -> None:
        nonlocal n_inside
        n_inside += _inside_pool(sys._getframe())
        try:
            read_everything(pool)
            pool.free_all("late")
        except BaseException as error:
            failures.append(error)

    with collector_off() as unraisable:
        gc.callbacks.append(watch)
        try:
            for turn in range(100):
                pool.allocate("k", 6, "late")
                collect_inside(pool, turn)
        finally:
            gc.callbacks.remove(watch)
    assert failures == []
    assert unraisable == []
    assert n_inside > 20, "the collector ran elsewhere: nothing was tested"
    assert_books(pool)
    assert_usable(pool)


def test_finalizers_with_an_eager_collector() -> None:
    """The same at the smallest threshold, so that a collection may start at any container."""
    pool = growing()
    Request.n_gone = 0
    with collector_off() as unraisable:
        gc.set_threshold(1, 1, 10)
        gc.enable()
        for turn in range(60):
            Request(pool, f"request {turn}", ("free_all", "free", "free_held_later")[turn % 3])
            pool.allocate("k", 3 + turn % 40, 2)
            pool.allocate_kv(9, 2, "int4")
            pool.free(pool.blocks_for(2)[::3])
            pool.shrink("k", 40)
            pool.free_all(2)
    gc.collect()
    assert unraisable == []
    assert Request.n_gone == 60
    assert pool.stats.blocks_in_use() == 0
    assert_books(pool)
    assert_usable(pool)


# -- threads --------------------------------------------------------------------------------------


class Pause:
    """Stops another thread at a chosen point inside the pool, while the test looks."""

    def __init__(self, turn: int, call: Call) -> None:
        self._reached, self._go_on = threading.Event(), threading.Event()
        self._strike = Strike(turn, self._stop, finalizers=False)
        self._call = call
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _stop(self) -> None:
        self._reached.set()
        self._go_on.wait(60)

    def _run(self) -> None:
        with self._strike:
            self._call()
        self._reached.set()

    @property
    def where(self) -> str:
        """The place where the thread stands."""
        return self._strike.where

    def __enter__(self) -> bool:
        """Return whether the other thread stands inside the pool."""
        self._thread.start()
        self._reached.wait(60)
        return self._strike.struck

    def __exit__(self, *error: object) -> None:
        self._go_on.set()
        self._thread.join(60)
        assert not self._thread.is_alive()


def pauses(name: str, step: int) -> Iterator[tuple[BlockPoolAllocator, Pause]]:
    """Yield a scenario that another thread runs, paused at one point after the other."""
    for turn in itertools.count(0, step):
        pool, call = SCENARIOS[name]()
        pause = Pause(turn, call)
        yield pool, pause
        if not pause._strike.struck:
            return


BUSY = ["many_blocks", "both_streams", "free_of_several_owners", "free_all_of_many_leases"]


@pytest.mark.parametrize("name", BUSY)
def test_free_held_later_waits_for_nobody(name: str) -> None:
    """A finalizer on this thread is not held up by another thread's call, nor is a counter."""
    for pool, pause in pauses(name, 5):
        stats = pool.stats
        victims = pool.blocks_for("victim")
        with pause as inside:
            if inside:
                pool.free_held_later(victims, *{block.lease for block in victims})
                assert 0 <= stats.n_frees <= stats.n_allocations
        assert_books(pool)
        assert (pool.blocks_for("victim") == []) is inside


@unix
@each_scenario
def test_fork_in_another_threads_call(name: str) -> None:
    """The child has a pool with a free lock and whole books, wherever the other thread stood."""
    n_forks = 0
    for pool, pause in pauses(name, 4):
        with pause as inside:
            if inside:
                n_forks += 1
                report = in_child(partial(check_served, pool, None))
                if report:
                    pytest.fail(f"{pause.where}: {report}")
        assert_books(pool)
        assert_usable(pool)
    assert n_forks


@unix
@pytest.mark.parametrize(
    "name", ["many_blocks", "both_streams", "free_of_several_owners", "shrink_everything"]
)
def test_fork_from_a_handler_inside_a_call(name: str) -> None:
    """A fork by the thread that is inside: parent and child both finish the call."""
    reports: list[str] = []

    def fork(_: BlockPoolAllocator) -> None:
        reader, writer = os.pipe()
        child = _fork()
        if child == 0:
            children.append(writer)
            return
        os.close(writer)
        with os.fdopen(reader) as pipe:
            reports.append(pipe.read())
        os.waitpid(child, 0)

    children: list[int] = []

    def check(pool: BlockPoolAllocator, raised: BaseException | None) -> None:
        if children:
            _report_and_exit(children[0], lambda: check_served(pool, raised))
        check_served(pool, raised)

    strike_everywhere(name, fork, check, step=9)
    assert reports
    assert set(reports) == {""}


def _fork() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # 3.12 warns of threads, the point here
        return os.fork()


def in_child(check: Call) -> str:
    """Run `check` in a forked child and return its traceback, empty when all is well."""
    reader, writer = os.pipe()
    child = _fork()
    if child == 0:
        _report_and_exit(writer, check)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        report = pipe.read()
    _, status = os.waitpid(child, 0)
    return report or ("" if status == 0 else f"the child ended with status {status}: a hang?")


def _report_and_exit(writer: int, check: Call) -> None:
    sys.settrace(None)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(20)  # ends a child that hangs
    status = 0
    try:
        check()
    except BaseException:
        os.write(writer, traceback.format_exc().encode())
        status = 1
    finally:
        os._exit(status)


@contextmanager
def fast_switching() -> Iterator[None]:
    """Let threads take turns as often as the interpreter can."""
    old = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(old)


class Tenant:
    """A thread that takes and gives back by every path, and keeps books of its own."""

    def __init__(self, pool: BlockPoolAllocator, me: int, holders: dict[int, int]) -> None:
        self.pool, self.me, self.holders = pool, me, holders
        self.rng = random.Random(me)
        self.mine: list[Block] = []
        self.n_taken = 0
        self.failure: BaseException | None = None

    def take(self) -> None:
        """Allocate, if there is room, and see that nobody else has these blocks."""
        rng, pool = self.rng, self.pool
        try:
            if rng.random() < 0.3:
                k_blocks, v_blocks = pool.allocate_kv(rng.randint(1, 12), self.me)
                blocks = k_blocks + v_blocks
            else:
                fmt = rng.choice(["fp16", "int4"])
                blocks = pool.allocate(rng.choice("kv"), rng.randint(1, 24), self.me, fmt)
        except BlockPoolExhaustedError:
            return
        self.n_taken += len(blocks)
        self.mine += blocks
        for block in blocks:
            other = self.holders.setdefault(block.block_id, self.me)
            assert other == self.me, "a block with two holders"
            assert block.owner == self.me

    def give_back(self) -> None:
        """Free all or half, by one of the ways to do it."""
        rng, mine = self.rng, self.mine
        gone = mine if rng.random() < 0.4 else rng.sample(mine, len(mine) // 2)
        for block in gone:
            del self.holders[block.block_id]
        if gone is mine and rng.random() < 0.5:
            self.pool.free_all(self.me)
        elif rng.random() < 0.3:
            self.pool.free_held(gone, *{block.lease for block in gone})
        else:
            self.pool.free(gone, owner=self.me)
        self.mine = [block for block in mine if block not in set(gone)]

    def work(self) -> None:
        """Live through 250 rounds; what fails is kept for the test."""
        rng = self.rng
        try:
            for _ in range(250):
                self.take()
                if self.mine and rng.random() < 0.6:
                    self.pool.mark_used(rng.choice(self.mine), rng.randint(0, 4))
                    self.give_back()
                if rng.random() < 0.1:
                    self.pool.shrink(rng.choice("kv"), 4)
            assert set(self.pool.blocks_for(self.me)) == set(self.mine)
            for block in self.mine:
                del self.holders[block.block_id]
            self.pool.free_all(self.me)
        except BaseException as error:
            self.failure = error


def watch_sums(pool: BlockPoolAllocator, threads: list[threading.Thread]) -> None:
    """Check snapshots for as long as one of `threads` lives."""
    last = pool.stats.snapshot()
    while any(thread.is_alive() for thread in threads):
        now = pool.stats.snapshot()
        assert pool.config.n_blocks + now.n_grown - now.n_retired == now.n_blocks
        assert 0 <= now.blocks_in_use() <= now.n_blocks <= 60
        assert now.blocks_in_use() <= now.peak_blocks_in_use
        assert now.n_allocations >= last.n_allocations
        assert now.n_frees >= last.n_frees
        assert now.peak_blocks_in_use >= last.peak_blocks_in_use
        last = now


@pytest.mark.parametrize("separate_kv", [False, True])
def test_threads_never_share_a_block(separate_kv: bool) -> None:
    """Four threads take and give back by every path; no block has two holders, no sum is off."""
    pool = BlockPoolAllocator(
        PoolConfig(4, 30, separate_kv, grow_on_exhaustion=True, max_blocks=60)
    )
    holders: dict[int, int] = {}
    tenants = [Tenant(pool, me, holders) for me in range(4)]
    threads = [threading.Thread(target=tenant.work, daemon=True) for tenant in tenants]
    with fast_switching():
        for thread in threads:
            thread.start()
        watch_sums(pool, threads)
    assert [tenant.failure for tenant in tenants] == [None] * 4
    assert holders == {}
    stats = pool.stats.snapshot()
    assert stats.n_allocations == stats.n_frees == sum(tenant.n_taken for tenant in tenants)
    assert not any(pool.rejected.values())
    assert_books(pool)
    assert_usable(pool)


def test_threads_race_for_one_owner_id() -> None:
    """Of several threads that register one id, one wins each time."""
    pool = unified()
    n_won = [0] * 4
    barrier = threading.Barrier(4)

    def race(me: int) -> None:
        for _ in range(60):
            barrier.wait(60)
            try:
                pool.register_owner("late")
            except ValueError:
                won = False
            else:
                won = True
                n_won[me] += 1
            barrier.wait(60)
            if won:
                pool.release_owner("late")

    threads = [threading.Thread(target=race, args=(me,), daemon=True) for me in range(4)]
    with fast_switching():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert sum(n_won) == 60


def test_threads_free_the_same_blocks() -> None:
    """Of several threads that free one list, each block is taken back once."""
    pool = unified(70)
    barrier = threading.Barrier(3)
    blocks: list[Block] = []

    def race(me: int) -> None:
        for _ in range(30):
            if me == 0:
                blocks[:] = pool.allocate("k", 240, 2)
            barrier.wait(60)
            pool.free(list(blocks))
            barrier.wait(60)

    threads = [threading.Thread(target=race, args=(me,), daemon=True) for me in range(3)]
    with fast_switching():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert pool.stats.n_frees == 30 * 60
    assert sum(pool.rejected.values()) == 2 * 30 * 60
    assert_books(pool)
    assert_usable(pool)
