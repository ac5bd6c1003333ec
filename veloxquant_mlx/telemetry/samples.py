"""Samples: what one call in many showed, and how it goes into the histograms."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from veloxquant_mlx.memory.journal import ALLOCATE

if TYPE_CHECKING:
    from veloxquant_mlx.memory.block import Block
    from veloxquant_mlx.memory.journal import Entry
    from veloxquant_mlx.telemetry.meters import Meters
    from veloxquant_mlx.telemetry.slots import Slot

__all__ = ["Sample", "observe_call", "observe_releases"]


class Sample(NamedTuple):
    """A sampled call. A tuple, since it is made under the pool's lock.

    Attributes:
        slot: Whose call it was.
        calls: Calls on the slot by then.
        since: Calls that it stands for: those since the sample before.
        took_ns: Nanoseconds in the pool, without the wait for its lock.
        now_ns: When it ended, on the pool's clock.
        entry: What the journal has of it.
        watched: A block that it freed, to be watched for its reuse.
    """

    slot: Slot
    calls: int
    since: int
    took_ns: int
    now_ns: int
    entry: Entry
    watched: Block | None


def observe_call(meters: Meters, sample: Sample, weight: int) -> None:
    """Duration and, of an allocation, size and occupancy, as `weight` calls."""
    _, operation, _, n_blocks, _, taken, (gave, _, _, _, era) = sample.entry
    if weight <= 0:
        return
    meters.durations[sample.slot.operation].observe(sample.took_ns, weight)
    if operation == ALLOCATE:
        meters.request_blocks.observe(n_blocks, weight)
        if era.n_blocks:
            meters.occupancy.observe((taken - gave) / era.n_blocks, weight)


def observe_releases(meters: Meters, sample: Sample) -> None:
    """How long what a release gave back was held."""
    if sample.slot.operation not in ("free", "free_all"):
        return
    what, now_ns, since = sample.entry[2], sample.now_ns, sample.since
    for lease, n, _ in what if isinstance(what, tuple) else ((what, sample.entry[3], None),):
        held_ns = max(0, now_ns - lease._born_ns)
        meters.block_lifetime.observe(held_ns, since * n)
        if lease._at is None:
            meters.lease_lifetime.observe(held_ns, since)
    if sample.watched is not None:
        meters.watch_idle(sample.watched, now_ns)
