"""Result: what came of a trace under one configuration."""

from __future__ import annotations

from dataclasses import dataclass

from veloxquant_mlx.memory.pool_config import PoolConfig

__all__ = ["Result"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One configuration's outcome. Slots are token slots of all streams together.

    Attributes:
        config: The configuration.
        n_calls: Calls that the trace has.
        peak_blocks: Most blocks in use at one time.
        final_blocks: Blocks managed at the end.
        grown_blocks: Blocks added by growth.
        most_blocks: Most blocks managed at one time.
        n_exhausted: Allocations refused.
        n_stranded: Of these, those for which the other stream had room.
        n_admitted: Allocations refused in the recording and not here; given back at once, as the
            trace does not tell how they would have gone on.
        first_exhausted_ns: When the first was, since the beginning; None without one.
        n_rejected: Owners that lost an allocation, and so their request.
        n_owners: Owners that the trace has.
        rounding: Share of the held slots that nobody had asked for, over time: what block size
            costs. 0 to 1.
        unfilled: Share of the slots given back that had never held a token; None where the trace
            does not tell.
        occupancy: Most slots held in each of equal spans of the trace, for a picture.
        seconds: How long it took to find out.
    """

    config: PoolConfig
    n_calls: int
    peak_blocks: int
    final_blocks: int
    grown_blocks: int
    most_blocks: int
    n_exhausted: int
    n_stranded: int
    n_admitted: int
    first_exhausted_ns: int | None
    n_rejected: int
    n_owners: int
    rounding: float
    unfilled: float | None
    occupancy: tuple[int, ...]
    seconds: float

    @property
    def peak_slots(self) -> int:
        """Most token slots in use at one time."""
        return self.peak_blocks * self.config.block_size

    @property
    def managed_slots(self) -> int:
        """Token slots of the pool at its largest, which is what memory has to be there for."""
        return self.most_blocks * self.config.block_size

    def bytes_of(self, slots: int, bytes_per_slot: int | None) -> int | None:
        """Bytes of so many slots; None where nobody said what a slot takes."""
        return None if bytes_per_slot is None else slots * bytes_per_slot
