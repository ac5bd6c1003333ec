"""Table: the watched pools by name, those watched before, and what earlier pools had counted."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from veloxquant_mlx.core.exceptions import ArgumentTypeError
from veloxquant_mlx.telemetry.carry import carry
from veloxquant_mlx.telemetry.probe import OTHER, Probe

if TYPE_CHECKING:
    from veloxquant_mlx.memory.block_pool import BlockPoolAllocator
    from veloxquant_mlx.telemetry.snapshot import PoolSnapshot

__all__ = ["MAX_POOLS", "MAX_REMEMBERED", "Table", "check_name", "free_name"]

# Pools told apart; the rest are summed as "other", so that series stay bounded.
MAX_POOLS: Final = 64
# Names whose counts are remembered after their pool is gone; of more, the oldest are forgotten.
MAX_REMEMBERED: Final = 1024
MAX_NAME_CHARS: Final = 128


@dataclass(frozen=True, slots=True)
class Table:
    """What is watched; never changed.

    Attributes:
        probes: By name.
        parked: Probes of pools that live and are watched no more, by name: a pool that is watched
            again under its name goes on with its own counts.
        before: What earlier pools had counted, by label, the longest ago first.
    """

    probes: dict[str, Probe] = field(default_factory=dict)
    parked: dict[str, Probe] = field(default_factory=dict)
    before: dict[str, PoolSnapshot] = field(default_factory=dict)

    def probe_of(self, pool: BlockPoolAllocator) -> Probe | None:
        """What watches `pool` now."""
        return next((probe for probe in self.probes.values() if probe.pool is pool), None)

    def label_for(self, name: str) -> str:
        """What the series of a new pool of that name are called."""
        # For the pool's life: a pool that moved between "other" and a label of its own would take
        # its counts with it, and counters would fall.
        n_apart = sum(probe.label != OTHER for probe in self.probes.values())
        return name if n_apart < MAX_POOLS else OTHER

    def with_probe(self, probe: Probe) -> Table:
        """The table when `probe` watches."""
        parked = {name: kept for name, kept in self.parked.items() if kept is not probe}
        return replace(self, probes={**self.probes, probe.name: probe}, parked=parked)

    def parking(self, probe: Probe) -> Table:
        """The table when `probe` watches no more and its pool may come back."""
        probes = {name: kept for name, kept in self.probes.items() if kept is not probe}
        return replace(self, probes=probes, parked={**self.parked, probe.name: probe})

    def without(self, probe: Probe) -> Table:
        """The table when `probe` is gone for good: its label keeps what it had counted."""
        probes = {name: kept for name, kept in self.probes.items() if kept is not probe}
        parked = {name: kept for name, kept in self.parked.items() if kept is not probe}
        last, before = probe.final(), dict(self.before)
        if last is not None:
            earlier = before.pop(probe.label, None)
            before[probe.label] = last if earlier is None else carry(last, earlier)
        while len(before) > MAX_REMEMBERED:
            del before[next(name for name in before if name != OTHER)]
        return Table(probes, parked, before)


def free_name(table: Table) -> str:
    """`pool-<lowest free number>`."""
    return next(name for n in itertools.count() if (name := f"pool-{n}") not in table.probes)


def check_name(table: Table, name: object) -> str:
    """`name`, if a new pool may have it.

    Raises:
        ValueError: A live pool has it, or it is no name.
        ArgumentTypeError: It is no str.
    """
    if not isinstance(name, str):
        raise ArgumentTypeError(f"name must be a str or None, got {name!r}")
    if not 0 < len(name) <= MAX_NAME_CHARS or name == OTHER or not _is_encodable(name):
        raise ValueError(
            f"name must have 1 to {MAX_NAME_CHARS} characters of valid Unicode and not be "
            f"{OTHER!r}, got {name!r}"
        )
    if name in table.probes:
        raise ValueError(f"a live pool is named {name!r} already; give this one another name")
    return name


def _is_encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # a lone surrogate would break every page it stands on
        return False
    return True
