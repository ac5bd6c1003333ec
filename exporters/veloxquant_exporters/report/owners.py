"""Owners: how long each held blocks, how many, and how much of that was filled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from veloxquant_exporters.report.levels import filled_share

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from veloxquant_exporters.report.holdings import Holdings
    from veloxquant_mlx.telemetry.trace import Trace

    Ints = NDArray[np.int64]

__all__ = ["MAX_OWNERS", "Owners", "find_owners"]

# Bars that a figure shows: those of the owners that held most, over time.
MAX_OWNERS: Final = 400


@dataclass(frozen=True, slots=True)
class Owners:
    """Arrays of shape (n,), the holder of most block-seconds first.

    Attributes:
        number: In the trace.
        since_ns, until_ns: From the first block to the last.
        most: Blocks held at the most.
        block_ns: Blocks times nanoseconds.
        filled: Share of the slots given back that had held tokens, 0 to 1; nan where that is
            not known.
        held: Whether blocks were still held at the end.
    """

    number: Ints
    since_ns: Ints
    until_ns: Ints
    most: Ints
    block_ns: NDArray[np.float64]
    filled: NDArray[np.float64]
    held: NDArray[np.bool_]


def find_owners(trace: Trace, holdings: Holdings, most: int = MAX_OWNERS) -> Owners:
    """The `most` owners that held most."""
    import numpy as np

    n = max(trace.n_owners, int(holdings.owner.max(initial=-1)) + 1)
    spans = (holdings.until_ns - holdings.since_ns).astype(float)
    block_ns = np.bincount(holdings.owner, spans, n).astype(float)
    counts = np.bincount(holdings.owner, minlength=n)
    chosen = np.flatnonzero(counts)
    chosen = chosen[np.argsort(-block_ns[chosen], kind="stable")][:most]
    since = np.full(n, np.iinfo(np.int64).max)
    until = np.zeros(n, dtype=np.int64)
    np.minimum.at(since, holdings.owner, holdings.since_ns)
    np.maximum.at(until, holdings.owner, holdings.until_ns)
    filled = filled_share(trace, n)
    end = trace.duration_ns
    open_owners = np.unique(holdings.owner[holdings.until_ns >= end])
    return Owners(
        chosen,
        since[chosen],
        until[chosen],
        _peaks(holdings, chosen, n),
        block_ns[chosen],
        filled[chosen],
        np.isin(chosen, open_owners) & (until[chosen] >= end),
    )


def _peaks(holdings: Holdings, chosen: Ints, n: int) -> Ints:
    """The most blocks that each held at one time."""
    import numpy as np

    wanted = np.zeros(n, dtype=bool)
    wanted[chosen] = True
    rows = np.flatnonzero(wanted[holdings.owner])
    owner = np.concatenate([holdings.owner[rows]] * 2)
    at = np.concatenate([holdings.since_ns[rows], holdings.until_ns[rows]])
    step = np.repeat([1, -1], len(rows))
    # Of one moment, what is given back comes before what is taken. The steps of an owner add up to
    # nothing, so that one running sum does for all.
    order = np.lexsort((step, at, owner))
    peaks = np.zeros(n, dtype=np.int64)
    np.maximum.at(peaks, owner[order], np.cumsum(step[order]))
    found: Ints = peaks[chosen]
    return found
