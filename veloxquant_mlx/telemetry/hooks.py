"""Hooks: the pool's journal slots, swapped for closures that count and, now and then, time a call.

The pool makes one tuple per change of state anyway and hands it to a slot. A hook is such a slot:
it passes the tuple on and counts the call, which is all that an unsampled call pays; an
uninstrumented pool pays nothing.

How long a call took is known from its entry if it went the general path, whose entries carry the
time of their beginning. Of a call on the one-block path, which reads no clock, `lock_timer` tells it.

Everything here runs under the pool's lock. Nothing here refers to the pool but weakly: a pool that
is dropped must not live on in its hooks.
"""

from __future__ import annotations

import random
import weakref
from collections import deque
from collections.abc import Callable
from time import perf_counter_ns
from typing import TYPE_CHECKING, Final, Literal

from veloxquant_mlx.memory.hot_path import FP16
from veloxquant_mlx.memory.journal import ALLOCATE, BULK, EXHAUSTED, FREE, FREE_ALL, SHRINK
from veloxquant_mlx.telemetry.lock_timer import PATIENCE_AT_START, LockTimer
from veloxquant_mlx.telemetry.meters import owner_text
from veloxquant_mlx.telemetry.notices import SLOW_NS, Notice, listeners, tell
from veloxquant_mlx.telemetry.sampler import Sampler
from veloxquant_mlx.telemetry.slots import HookPair, RareSlot, Slot, make_hooks, n_calls

if TYPE_CHECKING:
    from veloxquant_mlx.memory.block import Lease
    from veloxquant_mlx.memory.block_pool import BlockPoolAllocator
    from veloxquant_mlx.memory.journal import Entry, Part
    from veloxquant_mlx.telemetry.meters import Meters
    from veloxquant_mlx.telemetry.tap import Tap

__all__ = ["Hooks"]

OPERATION_NAMES: Final = {
    ALLOCATE: "allocate",
    FREE: "free",
    FREE_ALL: "free_all",
    SHRINK: "shrink",
}


class Hooks:
    """The hooks of one pool, from `install` to `remove`.

    Args:
        pool: Held weakly.
        meters: Where observations go.
        name: The pool's, for notices.
    """

    def __init__(self, pool: BlockPoolAllocator, meters: Meters, name: str = "") -> None:
        self._name = name
        self._pool = weakref.ref(pool)
        self._clock = pool._clock
        self._meters = meters
        self._random = random.Random(0x5EED)  # noqa: S311 - jitter, not a secret
        self._n_grown = pool._counts[4].n_grown
        self._n_refused = 0
        self._took: dict[str, Slot] = {}
        self._slots: list[Slot] = []
        self._hooked: list[tuple[HookPair, HookPair]] = []
        self._telling = False  # whether any lease was of another format than fp16
        self._rare = {code: RareSlot(name) for code, name in OPERATION_NAMES.items()}
        self._rare_allocates = {stream.name: 0 for stream in pool._streams}
        self._timer = LockTimer(pool, meters, self._random, self._slots)
        self._sampler = Sampler(meters, self._timer, self._random, self._slots, self._clock)
        self._tap: Tap | None = None
        self.journal: deque[Entry] = pool._journal
        self.spent_ns = 0  # in samples; what the plain calls cost is estimated by the reader

    # -- on and off -----------------------------------------------------------------------------

    def install(self) -> None:
        """Swap the slots; the pool's lock is held. Counts go on where they were."""
        pool = self._pool()
        if pool is None:
            return
        if not self._hooked:
            self._make_hooks(pool)
        self._put_hooks(pool, telling=any(self._meters.formats.values()))
        pool._rare = self._make_rare(pool._journal.append)
        pool._timed = self._on_special
        self._timer.arm(pool, None, PATIENCE_AT_START)

    def _make_hooks(self, pool: BlockPoolAllocator) -> None:
        errors, log = self._meters.errors, pool._journal.append
        self._slots[:] = self._rare.values()
        for stream in pool._streams:
            took = make_hooks("allocate", log, self._fire, self._tally_took, errors)
            gave = make_hooks("free_all", log, self._fire, self._tally_gave, errors)
            self._took[stream.name] = took.slot
            self._slots += (took.slot, gave.slot)
            self._hooked.append((took, gave))

    def _put_hooks(self, pool: BlockPoolAllocator, *, telling: bool) -> None:
        self._telling = telling
        for stream, (took, gave) in zip(pool._streams, self._hooked, strict=True):
            stream.took = took.telling if telling else took.plain
            stream.gave = gave.telling if telling else gave.plain

    def _begin_telling(self) -> None:
        """The first lease of another format than fp16: from now on hooks look at each entry."""
        pool = self._pool()
        if pool is not None:
            self._meters.recount_formats(pool)
            self._put_hooks(pool, telling=True)

    def remove(self) -> None:
        """Put back what `install` swapped; the pool's lock is held."""
        pool = self._pool()
        if pool is None:
            return
        if self._tap is not None:
            self._tap.removed()
        for stream in pool._streams:
            stream.took = stream.gave = pool._journal.append
        pool._rare = pool._journal.append
        pool._timed = None
        self._timer.disarm(pool)

    # -- recording ------------------------------------------------------------------------------

    def use_journal(self, pool: BlockPoolAllocator, journal: deque[Entry], tap: Tap | None) -> None:
        """Let entries go to `journal` from now on, and tell `tap` the rest; the lock is held."""
        self.journal = pool._journal = journal
        self._tap = self._sampler.tap = tap
        for pair in self._hooked:
            for hook in pair:
                hook.slot.redirect(journal.append)
        pool._rare = self._make_rare(journal.append)

    def n_entries(self) -> int:
        """Entries that went by. A Ctrl-C inside of a hook leaves out the one it struck."""
        return self.n_calls() + self._n_refused

    def violated(self) -> None:
        """Tell the recorder that the books do not add up."""
        if self._tap is not None:
            self._tap.violated()

    # -- what was counted -----------------------------------------------------------------------

    def calls(self) -> dict[str, int]:
        """Calls by operation."""
        calls = dict.fromkeys(OPERATION_NAMES.values(), 0)
        for slot in self._slots:
            calls[slot.operation] += slot.calls()
        return calls

    def n_calls(self) -> int:
        """Calls in all."""
        return n_calls(self._slots)

    def allocates(self, stream: str) -> int:
        """Allocation calls on `stream` that went well."""
        slot = self._took.get(stream)
        return self._rare_allocates[stream] + (0 if slot is None else slot.calls())

    def settle(self) -> None:
        """Observe what was sampled; after it every call is stood for in the histograms."""
        self._sampler.settle()

    def let_go(self) -> None:
        """Observe what was sampled, and drop what refers to blocks."""
        self._sampler.let_go()

    def end(self) -> None:
        """The pool is gone: let go of its journal as well."""
        self.let_go()
        if self._tap is not None:
            self._tap.gone()
            self._tap = self._sampler.tap = None
        self.journal = deque()
        for pair in self._hooked:
            for hook in pair:
                hook.slot.redirect(self.journal.append)
        self._hooked = []

    # -- calls off the one-lease path -----------------------------------------------------------

    def _make_rare(self, forward: Callable[[Entry], None]) -> Callable[[Entry], None]:
        errors, on_rare = self._meters.errors, self._on_rare

        def rare(entry: Entry) -> None:
            forward(entry)
            try:
                on_rare(entry)
            except Exception:  # noqa: BLE001 - telemetry never raises into the serving code
                errors["hook"] += 1

        return rare

    def _on_rare(self, entry: Entry) -> None:
        operation, parts, n = entry[1], entry[2], entry[3]
        assert isinstance(parts, tuple)
        if operation == EXHAUSTED:
            lease, n_asked, _ = parts[0]
            self._n_refused += 1
            self._meters.note_exhaustion(lease.owner)
            self._tell("exhausted", "allocate", lease, n_asked)
            if self._tap is not None:
                self._tap.refused()
            return
        slot = self._rare[operation]
        due = slot.tick()
        if operation != SHRINK:
            self._tally_parts(parts, 1 if operation == ALLOCATE else -1)
        if operation == ALLOCATE:
            for name in {lease._stream.name for lease, _, _ in parts}:
                self._rare_allocates[name] += 1
            self._note_growth(entry[6][4].n_grown, None, parts[0][0])
        elif self._tap is not None:
            if operation == FREE:
                self._tap.freed(entry)
            elif operation == SHRINK:
                self._tap.resized()
        if due or n >= BULK or listeners():
            self._on_timed(slot, entry, parts[0][0], due=due)

    def _on_timed(self, slot: Slot, entry: Entry, lease: Lease, *, due: bool) -> None:
        """A call whose entry tells when it began."""
        began = perf_counter_ns()
        now = self._clock()
        took_ns, n = now - entry[0], entry[3]
        if took_ns >= SLOW_NS:
            self._tell("slow", slot.operation, lease, n, took_ns)
        if n >= BULK:
            self._sampler.observe_bulk(slot, entry, took_ns, now)
            if due:
                slot.schedule(1)
        elif due:
            self._sampler.sample(slot, entry, took_ns, now)
            pool = self._pool()
            if pool is not None and not self._timer.is_in_place(pool):
                self._timer.arm(pool, None, 1)  # for the next wait
        self.spent_ns += perf_counter_ns() - began

    def _on_special(self, operation: int, n_blocks: int, started_ns: int) -> None:
        """A call on one lease that is large, grew the pool, or is of another format than fp16."""
        try:
            pool = self._pool()
            if pool is None or operation not in (ALLOCATE, FREE_ALL) or not pool._journal:
                return
            entry = pool._journal[-1]
            lease = entry[2]
            if entry[1] != operation or isinstance(lease, tuple):
                return
            if operation == ALLOCATE:
                if not self._telling and lease._format is not FP16:
                    self._begin_telling()
                self._note_growth(entry[6][4].n_grown, lease, lease)
            if n_blocks < BULK and not listeners():
                return
            now = self._clock()
            took_ns = now - started_ns
            if n_blocks >= BULK:
                self._sampler.observe_bulk(self._slot_of(operation, lease), entry, took_ns, now)
            if took_ns >= SLOW_NS:
                self._tell("slow", OPERATION_NAMES[operation], lease, n_blocks, took_ns)
        except Exception:  # noqa: BLE001 - telemetry never raises into the serving code
            self._meters.errors["hook"] += 1

    def _slot_of(self, operation: int, lease: Lease) -> Slot:
        took = self._took[lease.stream]
        return took if operation == ALLOCATE else self._slots[self._slots.index(took) + 1]

    # -- notices --------------------------------------------------------------------------------

    def _note_growth(self, n_grown: int, lease: Lease | None, first: Lease | None) -> None:
        """Tell of what the pool grew by since; `lease` tells the stream and `first` the owner."""
        grown, self._n_grown = n_grown - self._n_grown, n_grown
        if grown > 0:
            if self._tap is not None:
                self._tap.resized()
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
            owner="" if who is None else owner_text(who.owner),
            seconds=None if took_ns is None else took_ns / 1e9,
        )
        for _ in range(tell(notice)):
            self._meters.errors["hook"] += 1

    # -- formats --------------------------------------------------------------------------------

    def _tally_parts(self, parts: tuple[Part, ...], sign: int) -> None:
        others = [(lease._format, n) for lease, n, _ in parts if lease._format is not FP16]
        if others and not self._telling:
            self._begin_telling()
            return
        for name, n in others:
            self._meters.tally(name, sign * n)

    def _tally_took(self, entry: Entry) -> None:
        self._meters.tally(entry[2]._format, entry[3])  # type: ignore[union-attr]

    def _tally_gave(self, entry: Entry) -> None:
        self._meters.tally(entry[2]._format, -entry[3])  # type: ignore[union-attr]

    # -- samples --------------------------------------------------------------------------------

    def _fire(self, slot: Slot, entry: Entry) -> None:
        """A chosen call: sample it if its beginning is known, else see to it that the next's is."""
        began = perf_counter_ns()
        try:
            now, pool = self._clock(), self._pool()
            if pool is None:
                return
            had, timer = None, self._timer
            in_place = timer.is_in_place(pool)
            if in_place:
                had = timer.had_ns()
            elif slot.operation == "allocate" and entry[3] > 1:
                had = entry[0]  # the one-block path alone reads no clock
            if had is None or entry[3] >= BULK:
                slot.schedule(1)
                if not in_place:
                    timer.await_call(pool, slot)
                return
            timer.done(pool, slot)
            pool._now = now
            self._sampler.sample(slot, entry, now - had, now)
            if now - had >= SLOW_NS:
                self._tell("slow", slot.operation, entry[2], entry[3], now - had)  # type: ignore[arg-type]
        finally:
            self.spent_ns += perf_counter_ns() - began
