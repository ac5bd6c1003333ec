"""Samples: what one call in many showed, and how it goes into the histograms.

A sample holds numbers and no journal entry. An entry that outlives its turn in the journal is given
back to the memory allocator out of order; the pool's next entries then lie scattered, and every
call of a one-block cycle takes 3 % longer for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from veloxquant_mlx.memory.journal import ALLOCATE, FREE, FREE_ALL

if TYPE_CHECKING:
    from veloxquant_mlx.memory.block import Block
    from veloxquant_mlx.memory.journal import Entry
    from veloxquant_mlx.telemetry.meters import Meters
    from veloxquant_mlx.telemetry.slots import Slot

__all__ = ["Sample", "observe_call", "observe_releases", "sample_of"]


class Sample(NamedTuple):
    """A sampled call. A tuple, since it is made under the pool's lock.

    Attributes:
        slot: Whose call it was.
        calls: Calls on the slot by then.
        since: Calls that it stands for: those since the sample before.
        took_ns: Nanoseconds in the pool, without the wait for its lock.
        now_ns: When it ended, on the pool's clock.
        n_blocks: Blocks that moved.
        in_use: Blocks in use after it.
        n_managed: Blocks managed after an allocation; 0 of other calls.
        held: Of each lease in a release: since when it was held, its blocks that were given back,
            and whether it ended.
        watched: A block that was given back, to be watched for its reuse.
    """

    slot: Slot
    calls: int
    since: int
    took_ns: int
    now_ns: int
    n_blocks: int
    in_use: int
    n_managed: int
    held: tuple[tuple[int, int, bool], ...]
    watched: Block | None


def sample_of(
    entry: Entry, slot: Slot, calls: int, since: int, took_ns: int, now_ns: int, jitter: float
) -> Sample:
    """The sample of the call that made `entry`; `jitter`, 0 to 1, chooses the watched block."""
    _, operation, what, n_blocks, _, taken, (gave, _, _, _, era) = entry
    held: tuple[tuple[int, int, bool], ...] = ()
    watched = None
    if operation in (FREE_ALL, FREE):
        if isinstance(what, tuple):
            lease = what[0][0]
            held = tuple((part._born_ns, n, part._at is None) for part, n, _ in what)
        else:
            lease = what
            held = ((lease._born_ns, n_blocks, True),)
        top = lease._stream.top
        if top:
            watched = top[-1 - int(jitter * min(len(top), 64))]
    n_managed = era.n_blocks if operation == ALLOCATE else 0
    return Sample(
        slot, calls, since, took_ns, now_ns, n_blocks, taken - gave, n_managed, held, watched
    )


def observe_call(meters: Meters, sample: Sample, weight: int) -> None:
    """Duration and, of an allocation, size and occupancy, as `weight` calls."""
    if weight <= 0:
        return
    operation = sample.slot.operation
    meters.durations[operation].observe(sample.took_ns, weight)
    if operation == "allocate":
        meters.request_blocks.observe(sample.n_blocks, weight)
        if sample.n_managed:
            meters.occupancy.observe(sample.in_use / sample.n_managed, weight)


def observe_releases(meters: Meters, sample: Sample) -> None:
    """How long what a release gave back was held."""
    now_ns, since = sample.now_ns, sample.since
    for born_ns, n, ended in sample.held:
        held_ns = max(0, now_ns - born_ns)
        meters.block_lifetime.observe(held_ns, since * n)
        if ended:
            meters.lease_lifetime.observe(held_ns, since)
    if sample.watched is not None:
        meters.watch_idle(sample.watched, now_ns)
