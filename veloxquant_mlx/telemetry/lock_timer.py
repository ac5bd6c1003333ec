"""LockTimer: when a sampled call had the pool's lock, and how long calls wait for it.

The one-block path of a pool reads no clock. Where a sample of it is due, the pool's lock is swapped
for one that notes when it was asked for and had, until the sample was taken or nobody came.

Everything here runs under the pool's lock.
"""

from __future__ import annotations

import random
import weakref
from threading import get_ident
from typing import TYPE_CHECKING, Any, Final

from veloxquant_mlx.telemetry.slots import n_calls
from veloxquant_mlx.telemetry.timing_lock import timing_lock

if TYPE_CHECKING:
    from veloxquant_mlx.memory.block_pool import BlockPoolAllocator
    from veloxquant_mlx.telemetry.meters import Meters
    from veloxquant_mlx.telemetry.slots import Slot

__all__ = ["PATIENCE_AT_START", "LockTimer"]

# Waits are observed so many at a time, or when a snapshot is taken.
DIGESTED: Final = 64
# How often the timing lock may be entered for nothing before it is put back: so often at least, ...
PATIENCE: Final = 64
PATIENCE_AT_START: Final = 16
# ... once in so many hooked calls, ...
PATIENCE_SHARE: Final = 64
# ... and for a slot of which nothing is known yet. Each time costs about a microsecond.
PATIENCE_FIRST: Final = 2000


class LockTimer:
    """Swaps one pool's lock, and observes the waits for it.

    Args:
        pool: Held weakly.
        meters: Where waits go.
        rng: Jitter.
        slots: All of the pool's, by which calls are counted; a list that its owner fills.
    """

    def __init__(
        self,
        pool: BlockPoolAllocator,
        meters: Meters,
        rng: random.Random,
        slots: list[Slot],
    ) -> None:
        self._pool = weakref.ref(pool)
        self._clock = pool._clock
        self._meters = meters
        self._random = rng
        self._slots = slots
        self._real_lock: Any = pool._lock
        self._timing_lock = timing_lock(self._real_lock, self, self._clock)
        # While the timing lock is in place: whom for, when it was last had and by which thread.
        self._armed: Slot | None = None
        self._stamp: tuple[int, int] | None = None
        self._left_stamps = 0
        self._wait_due = False
        self._waits_ns: list[int] = []
        self._last_wait_ns: list[int] = []
        self._waits_weighed = 0

    # -- in place, and out of it ----------------------------------------------------------------

    def is_in_place(self, pool: BlockPoolAllocator) -> bool:
        """Whether the pool's lock is the timing one."""
        return pool._lock is self._timing_lock

    def had_ns(self) -> int | None:
        """When this thread's call had the lock, which is the timing one; None if that is not known."""
        stamp = self._stamp
        # Another thread's: this one had asked for the lock before it was swapped.
        return stamp[0] if stamp is not None and stamp[1] == get_ident() else None

    def await_call(self, pool: BlockPoolAllocator, slot: Slot) -> None:
        """Put the timing lock in place for the next call on `slot`, for as long as it is worth."""
        self.arm(pool, slot, self._patience(slot))

    def arm(self, pool: BlockPoolAllocator, slot: Slot | None, patience: int) -> None:
        """Put the timing lock in place, for `slot` or else for whoever comes."""
        if pool._lock is not self._real_lock:  # made anew in the child of a fork
            self._real_lock = pool._lock
            self._timing_lock = timing_lock(self._real_lock, self, self._clock)
        self._armed, self._stamp = slot, None
        self._left_stamps, self._wait_due = patience, True
        pool._lock = self._timing_lock

    def disarm(self, pool: BlockPoolAllocator) -> None:
        """Put the pool's own lock back."""
        self._armed = None
        if pool._lock is self._timing_lock:
            pool._lock = self._real_lock

    def done(self, pool: BlockPoolAllocator, slot: Slot) -> None:
        """The call on `slot` came: put the lock back if it was in place for that."""
        if self._armed is slot:
            self.disarm(pool)

    def _patience(self, slot: Slot) -> int:
        slot.misses += 1
        if slot.misses == 1:
            return PATIENCE if slot.last is not None else PATIENCE_FIRST
        total = n_calls(self._slots)
        since, slot.armed_total = total - slot.armed_total, total
        return PATIENCE + since // PATIENCE_SHARE

    # -- stamps ---------------------------------------------------------------------------------

    def stamped(self, asked_ns: int, had_ns: int) -> None:
        """See `timing_lock.Stamped`."""
        try:
            self._stamp = (had_ns, get_ident())
            if self._wait_due:
                self._wait_due = False
                self._waits_ns.append(had_ns - asked_ns)
                if len(self._waits_ns) >= DIGESTED:
                    self.digest()
            self._left_stamps -= 1
            if self._left_stamps <= 0:
                self._give_up(had_ns)
        except Exception:  # noqa: BLE001 - telemetry never raises into the serving code
            self._meters.errors["hook"] += 1

    def _give_up(self, now: int) -> None:
        pool = self._pool()
        if pool is None:
            return
        slot = self._armed
        if slot is not None:
            slot.schedule(slot.stride(slot.calls(), now, self._random.random()))
        self.disarm(pool)

    def digest(self) -> None:
        """The waits seen since stand for the calls since, to equal parts; or the last one does."""
        waits, total = self._waits_ns or self._last_wait_ns, n_calls(self._slots)
        if waits:
            each, more = divmod(total - self._waits_weighed, len(waits))
            self._waits_ns, self._last_wait_ns, self._waits_weighed = [], waits[-1:], total
            for n, wait_ns in enumerate(waits):
                self._meters.lock_wait.observe(wait_ns, each + (n < more))
