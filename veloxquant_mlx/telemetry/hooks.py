"""Hooks: the pool's journal slots, swapped for closures that count and, now and then, time a call.

The pool makes one tuple per change of state anyway and hands it to a slot. A hook is such a slot:
it passes the tuple on and counts the call. One call in `STRIDE` arms a sample: the pool's lock is
swapped for one that notes when it was asked for and when it was had, and the next call on the same
slot tells how long the pool took. So an unsampled call pays for one Python call and one addition,
and an uninstrumented pool for nothing.

Everything here runs under the pool's lock. Nothing here refers to the pool but weakly: a pool that
is dropped must not live on in its hooks.
"""

from __future__ import annotations

import random
import threading
import weakref
from collections.abc import Callable
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, Final, Literal

from veloxquant_mlx.memory.block_pool import FP16
from veloxquant_mlx.memory.journal import ALLOCATE, EXHAUSTED, FREE, FREE_ALL, SHRINK
from veloxquant_mlx.telemetry.notices import SLOW_NS, Notice, listeners, tell

if TYPE_CHECKING:
    from veloxquant_mlx.memory.block import Lease
    from veloxquant_mlx.memory.block_pool import BlockPoolAllocator
    from veloxquant_mlx.memory.journal import Entry
    from veloxquant_mlx.telemetry.meters import Meters

__all__ = ["BULK", "STRIDE", "Hooks"]

# Calls a sample, jittered by half: a fixed stride that shares a factor with layers x (k, v) would
# time the same call of each round. A sample costs some 5 us, so a busy slot takes fewer.
STRIDE: Final = 61
STRIDE_BUSY: Final = 509
BUSY: Final = 4096  # calls on a slot from which it counts as busy
# Calls of this many blocks are timed by the pool itself, each one.
BULK: Final = 4096
# An armed lock that no call on its slot consumed is put back after this many other calls.
PATIENCE: Final = 64

_OPERATION: Final = {ALLOCATE: "allocate", FREE: "free", FREE_ALL: "free_all", SHRINK: "shrink"}


class Slot:
    """One hooked journal slot: its calls so far, and how to fire at a chosen one."""

    __slots__ = ("calls", "schedule", "weighed")

    def __init__(self, calls: Callable[[], int], schedule: Callable[[int], None]) -> None:
        self.calls = calls
        self.schedule = schedule
        self.weighed = 0  # calls that samples stand for so far


def _make_hook(
    forward: Callable[[Entry], None],
    fire: Callable[[Entry], None],
    tally: Callable[[Entry], None],
    first: int,
) -> tuple[Callable[[Entry], None], Slot]:
    left = period = first
    before = 0  # calls until the period began
    fp16 = FP16

    def hook(entry: Entry) -> None:
        nonlocal left
        forward(entry)
        left -= 1
        if not left:
            fire(entry)
        # By identity: what is fp16 and fails it is recognised by `tally`.
        if entry[2]._format is not fp16:  # type: ignore[union-attr]
            tally(entry)

    def calls() -> int:
        return before + period - left

    def schedule(after: int) -> None:
        nonlocal left, period, before
        before += period - left
        left = period = after

    return hook, Slot(calls, schedule)


class Hooks:
    """The hooks of one pool, from `install` to `remove`.

    Args:
        pool: Held weakly.
        meters: Where observations go.
        name: The pool's, for notices.
    """

    def __init__(self, pool: BlockPoolAllocator, meters: Meters, name: str = "") -> None:
        self._name = name
        self._n_grown = pool._counts[4].n_grown
        self._pool = weakref.ref(pool)
        self._meters = meters
        self._random = random.Random(0x5EED)  # noqa: S311 - jitter, not a secret
        self._slots: dict[object, Slot] = {}
        self._rare_calls = dict.fromkeys(_OPERATION.values(), 0)
        self._rare_allocates = {stream.name: 0 for stream in pool._streams}
        self._real_lock: Any = pool._lock
        self._timing_lock = _timing_lock(pool._lock, self)
        self._armed: Slot | None = None
        self._stamp: tuple[int, int, int] | None = None  # asked, had, thread
        self._n_stamps = 0
        self.spent_ns = 0  # in samples; `Meters` adds what the plain calls cost

    # -- on and off -----------------------------------------------------------------------------

    def install(self) -> None:
        """Swap the slots; the pool's lock is held."""
        pool = self._pool()
        assert pool is not None
        for stream in pool._streams:
            for side in ("took", "gave"):
                key = (stream.name, side)
                hook, self._slots[key] = _make_hook(
                    pool._journal.append,
                    self._firing(key, "allocate" if side == "took" else "free_all"),
                    self._tally_took if side == "took" else self._tally_gave,
                    self._random.randrange(1, STRIDE),
                )
                setattr(stream, side, hook)
        pool._rare = self._make_rare(pool._journal.append)
        pool._timed = self._on_bulk

    def remove(self) -> None:
        """Put back what `install` swapped; the pool's lock is held."""
        pool = self._pool()
        if pool is None:
            return
        for stream in pool._streams:
            stream.took = stream.gave = pool._journal.append
        pool._rare = pool._journal.append
        pool._timed = None
        self._disarm(pool)

    # -- what was counted -----------------------------------------------------------------------

    def calls(self) -> dict[str, int]:
        """Calls by operation."""
        calls = dict(self._rare_calls)
        for (_, side), slot in self._slots.items():  # type: ignore[misc]
            calls["allocate" if side == "took" else "free_all"] += slot.calls()
        return calls

    def allocates(self, stream: str) -> int:
        """Allocation calls on `stream` that went well."""
        return self._slots[stream, "took"].calls() + self._rare_allocates[stream]

    # -- rare calls -----------------------------------------------------------------------------

    def _make_rare(self, forward: Callable[[Entry], None]) -> Callable[[Entry], None]:
        def rare(entry: Entry) -> None:
            forward(entry)
            try:
                self._on_rare(entry)
            except Exception:  # noqa: BLE001 - telemetry never raises into the serving code
                self._meters.count_error("hook")

        return rare

    def _on_rare(self, entry: Entry) -> None:
        began = perf_counter_ns()
        operation, parts = entry[1], entry[2]
        assert isinstance(parts, tuple)
        if operation == EXHAUSTED:
            self._meters.note_exhaustion(parts[0][0].owner)
            lease, n, _ = parts[0]
            self._tell("exhausted", "allocate", lease, n)
        else:
            self._rare_calls[_OPERATION[operation]] += 1
            for lease, n, _ in parts:
                if operation == ALLOCATE:
                    self._rare_allocates[lease.stream] += 1
                    self._meters.request_blocks.observe(n)
                elif operation in (FREE, FREE_ALL):
                    self._meters.block_lifetime.observe(entry[0] - lease._born_ns, n)
                if operation != SHRINK:
                    self._meters.tally(lease.format, n if operation == ALLOCATE else -n)
            if operation == ALLOCATE:
                self._note_growth(entry[6][4].n_grown, None, parts[0][0])
        self.spent_ns += perf_counter_ns() - began

    def _on_bulk(self, operation: int, n_blocks: int, started_ns: int) -> None:
        """A call that the pool timed itself, in its own clock."""
        try:
            pool = self._pool()
            if pool is None:
                return
            if operation == ALLOCATE and pool._counts[4].n_grown != self._n_grown:
                lease = _last_lease(pool, operation)
                self._note_growth(pool._counts[4].n_grown, lease, lease)
            if n_blocks < BULK and not listeners():
                return
            took_ns = pool._clock() - started_ns
            if n_blocks >= BULK:
                self._meters.durations[_OPERATION[operation]].observe(took_ns)
            if took_ns >= SLOW_NS:
                lease = _last_lease(pool, operation)
                self._tell("slow", _OPERATION[operation], lease, n_blocks, took_ns)
        except Exception:  # noqa: BLE001 - telemetry never raises into the serving code
            self._meters.count_error("hook")

    # -- notices --------------------------------------------------------------------------------

    def _note_growth(self, n_grown: int, lease: Lease | None, first: Lease | None) -> None:
        """Tell of what the pool grew by since; `lease` tells the stream and `first` the owner."""
        grown, self._n_grown = n_grown - self._n_grown, n_grown
        if grown > 0:
            self._tell("grown", "allocate", lease, grown, owner=first)

    def _tell(
        self,
        kind: Literal["exhausted", "grown", "slow"],
        operation: str,
        lease: Lease | None,
        n_blocks: int,
        took_ns: int | None = None,
        owner: Lease | None = None,
    ) -> None:
        if not listeners():
            return
        who = owner or lease
        notice = Notice(
            kind=kind,
            pool=self._name,
            operation=operation,
            stream="" if lease is None else lease.stream,
            n_blocks=n_blocks,
            owner="" if who is None else str(who.owner)[:64],
            seconds=None if took_ns is None else took_ns / 1e9,
        )
        for _ in range(tell(notice)):
            self._meters.count_error("hook")

    # -- formats --------------------------------------------------------------------------------

    def _tally_took(self, entry: Entry) -> None:
        self._meters.tally(entry[2].format, entry[3])  # type: ignore[union-attr]

    def _tally_gave(self, entry: Entry) -> None:
        self._meters.tally(entry[2].format, -entry[3])  # type: ignore[union-attr]

    # -- samples --------------------------------------------------------------------------------

    def _firing(self, key: object, operation: str) -> Callable[[Entry], None]:
        """What a slot does at its chosen call: arm the lock, or take the sample it was armed for."""

        def fire(entry: Entry) -> None:
            began = perf_counter_ns()
            try:
                slot, pool = self._slots[key], self._pool()
                if pool is None:
                    return
                if self._armed is None:
                    self._arm(pool, slot)
                elif self._armed is slot:
                    self._take_sample(pool, slot, operation, entry, began)
                else:
                    slot.schedule(self._random.randrange(1, STRIDE))  # another slot is at it
            except Exception:  # noqa: BLE001 - telemetry never raises into the serving code
                self._meters.count_error("hook")
            finally:
                self.spent_ns += perf_counter_ns() - began

        return fire

    def _arm(self, pool: BlockPoolAllocator, slot: Slot) -> None:
        self._armed, self._stamp, self._n_stamps = slot, None, 0
        pool._lock = self._timing_lock
        slot.schedule(1)

    def _disarm(self, pool: BlockPoolAllocator) -> None:
        pool._lock = self._real_lock
        self._armed = None

    def _take_sample(
        self, pool: BlockPoolAllocator, slot: Slot, operation: str, entry: Entry, now: int
    ) -> None:
        stamp = self._stamp
        if stamp is None or stamp[2] != threading.get_ident():
            slot.schedule(1)  # a thread that had asked for the real lock before it was swapped
            return
        self._disarm(pool)
        pool._now = pool._clock()
        stride = STRIDE if slot.calls() < BUSY else STRIDE_BUSY
        slot.schedule(self._random.randrange(stride // 2, stride + stride // 2))
        weight = slot.calls() - slot.weighed
        slot.weighed += weight
        asked, had, _ = stamp
        meters, n = self._meters, entry[3]
        if now - asked >= SLOW_NS:
            self._tell("slow", operation, entry[2], n, now - asked)  # type: ignore[arg-type]
        meters.lock_wait.observe(had - asked, weight)
        if n < BULK:
            meters.durations[operation].observe(now - had, weight)
        if operation == "allocate":
            meters.request_blocks.observe(n, weight)
            n_blocks = entry[6][4].n_blocks
            if n_blocks:
                meters.occupancy.observe((entry[5] - entry[6][0]) / n_blocks, weight)
        else:
            lease = entry[2]
            meters.block_lifetime.observe(pool._now - lease._born_ns, weight * n)  # type: ignore[union-attr]
            meters.watch_idle(pool, lease)  # type: ignore[arg-type]
        meters.settle_idle(pool._now)

    def _stamped(self, asked: int, had: int) -> None:
        """The armed lock was had; another stamp replaces this until a call on the slot uses it."""
        self._stamp = (asked, had, threading.get_ident())
        self._n_stamps += 1
        if self._n_stamps > PATIENCE:
            pool = self._pool()
            if pool is not None and self._armed is not None:
                self._armed.schedule(STRIDE)
                self._disarm(pool)


def _last_lease(pool: BlockPoolAllocator, operation: int) -> Lease | None:
    """The lease of the newest journal entry, if that is of such an operation on one lease."""
    entry = pool._journal[-1] if pool._journal else None
    if entry is None or entry[1] != operation:
        return None
    parts = entry[2]
    if not isinstance(parts, tuple):
        return parts
    return parts[0][0] if len(parts) == 1 else None


def _timing_lock(lock: Any, hooks: Hooks) -> Any:
    """A lock like `lock` that tells `hooks` when it was asked for and had.

    Leaving is the real lock's own C function: a Python one could be interrupted before its first
    line, and the lock would be held for good. So the end of a call is told by its journal entry.
    """
    weakly = weakref.ref(hooks)
    owned = lock._is_owned

    def enter(_: object) -> None:
        if owned():
            lock.acquire()  # a handler inside a call; the stamp is the outer call's
            return
        asked = perf_counter_ns()
        try:
            lock.acquire()
            had = perf_counter_ns()
            target = weakly()
            if target is not None:
                target._stamped(asked, had)
        except BaseException:
            if owned():
                lock.release()
            raise

    def acquire(_: object, blocking: bool = True, timeout: float = -1) -> bool:
        return bool(lock.acquire(blocking, timeout))

    methods = {"__enter__": enter, "__exit__": lock.__exit__, "acquire": acquire}
    methods["release"] = lock.release
    methods["_is_owned"] = lock._is_owned
    return type("TimingLock", (), methods)()
