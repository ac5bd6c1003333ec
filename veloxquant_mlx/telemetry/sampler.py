"""Sampler: takes the samples of one pool's calls, and observes them later for all its calls.

Everything here runs under the pool's lock.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from veloxquant_mlx.telemetry.samples import Sample, observe_call, observe_releases, sample_of

if TYPE_CHECKING:
    from veloxquant_mlx.memory.journal import Entry
    from veloxquant_mlx.telemetry.lock_timer import LockTimer
    from veloxquant_mlx.telemetry.meters import Meters
    from veloxquant_mlx.telemetry.slots import Slot
    from veloxquant_mlx.telemetry.tap import Tap

__all__ = ["Sampler"]

# Samples are observed so many at a time, or when a snapshot is taken.
DIGESTED: Final = 64


class Sampler:
    """The samples of one pool.

    Args:
        meters: Where observations go.
        timer: Knows the waits for the lock, which are observed together with the samples.
        rng: Jitter.
        slots: All of the pool's; a list that its owner fills.
        clock: The pool's.

    Attributes:
        tap: Who else is told of each sample.
    """

    def __init__(
        self,
        meters: Meters,
        timer: LockTimer,
        rng: random.Random,
        slots: list[Slot],
        clock: Callable[[], int],
    ) -> None:
        self._meters = meters
        self._timer = timer
        self._random = rng
        self._slots = slots
        self._clock = clock
        self._samples: list[Sample] = []
        self.tap: Tap | None = None

    def sample(self, slot: Slot, entry: Entry, took_ns: int, now: int) -> None:
        """Take a sample of the call that made `entry`, which is to stand for those before it."""
        jitter = self._random.random()
        calls = slot.calls()
        since = slot.sampled(calls, now, jitter)
        sample = slot.last = sample_of(entry, slot, calls, since, took_ns, now, jitter)
        self._samples.append(sample)
        if self.tap is not None:
            self.tap.sampled(sample)
        if len(self._samples) >= DIGESTED:
            self.digest()

    def observe_bulk(self, slot: Slot, entry: Entry, took_ns: int, now: int) -> None:
        """A call that stands for itself alone, and that no other sample stands for."""
        slot.weighed += 1
        slot.sampled_calls += 1
        sample = sample_of(entry, slot, 0, 1, took_ns, now, 0.0)
        if self.tap is not None:
            self.tap.sampled(sample)
        observe_call(self._meters, sample, 1)
        observe_releases(self._meters, sample)

    def digest(self) -> None:
        """Observe what was sampled. Put off until now: sampling must be short, as its code is cold."""
        samples, self._samples = self._samples, []
        for sample in samples:
            observe_call(self._meters, sample, sample.slot.pending(sample.calls))
            observe_releases(self._meters, sample)
        self._timer.digest()
        self._meters.settle_idle(self._clock())

    def settle(self) -> None:
        """Observe what was sampled, and let the newest sample of each slot stand for the rest.

        After it every call is stood for in the histograms.
        """
        self.digest()
        for slot in self._slots:
            if slot.last is not None and (pending := slot.pending(slot.calls())):
                observe_call(self._meters, slot.last, pending)

    def let_go(self) -> None:
        """Observe what was sampled, and drop what refers to blocks."""
        try:
            self.settle()
        except Exception:  # noqa: BLE001 - may run while the pool is being collected
            self._meters.errors["hook"] += 1
        self._samples = []
        for slot in self._slots:
            slot.last = None
