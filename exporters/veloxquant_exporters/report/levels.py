"""Levels: what was held, managed and asked for over time, in so many bins as a screen has columns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from veloxquant_exporters.report.holdings import Holdings
    from veloxquant_mlx.telemetry.trace import Trace

    Ints = NDArray[np.int64]

__all__ = ["BINS", "Levels", "filled_share", "find_fill", "find_hindsight", "find_levels"]

BINS: Final = 1200


@dataclass(frozen=True, slots=True)
class Levels:
    """Per stream the blocks in use and managed, at the end of each bin and at its extremes.

    Attributes:
        at_ns: Where each bin ends, shape (n,).
        in_use: By stream, shape (n,): at the end of the bin.
        most: By stream: the most within the bin.
        managed: By stream.
    """

    at_ns: Ints
    in_use: dict[str, Ints]
    most: dict[str, Ints]
    managed: dict[str, Ints]


def find_levels(trace: Trace, bins: int = BINS) -> Levels:
    """The levels of each stream, from the columns alone."""
    import numpy as np

    end_ns = max(1, trace.duration_ns)
    edges = np.linspace(0, end_ns, bins + 1)[1:].astype(np.int64)
    edges[-1] = end_ns
    in_use, most, managed = {}, {}, {}
    for index, name in enumerate(trace.header.streams):
        opening = trace.header.opening.levels[index]
        chosen = np.flatnonzero(trace.stream == index)
        at_ns = trace.at_ns[chosen]
        used = trace.managed_after[chosen] - trace.free_after[chosen]
        last = np.searchsorted(at_ns, edges, side="right") - 1
        began = opening.managed - opening.free
        in_use[name] = np.where(last >= 0, used[last] if len(used) else 0, began)
        managed[name] = np.where(
            last >= 0, trace.managed_after[chosen][last] if len(used) else 0, opening.managed
        )
        peaks = in_use[name].copy()
        np.maximum.at(peaks, np.searchsorted(edges, at_ns, side="left").clip(0, bins - 1), used)
        # What was held when the bin began counts too.
        peaks[1:] = np.maximum(peaks[1:], in_use[name][:-1])
        peaks[0] = max(int(peaks[0]), began)
        most[name] = peaks
    return Levels(edges, in_use, most, managed)


def filled_share(trace: Trace, n_owners: int) -> NDArray[np.float64]:
    """Share of the slots given back that tokens had filled, by owner; nan where none is known."""
    import numpy as np

    known = np.flatnonzero((trace.operation > 0) & (trace.owner >= 0) & (trace.tokens >= 0))
    slots = trace.blocks[known].astype(float) * trace.header.config.block_size
    held = np.bincount(trace.owner[known], slots, n_owners)
    tokens = np.bincount(trace.owner[known], trace.tokens[known].astype(float), n_owners)
    share = np.divide(tokens, held, out=np.full(n_owners, np.nan), where=held > 0)
    limited: NDArray[np.float64] = np.minimum(share, 1.0)
    return limited


def find_hindsight(
    trace: Trace, holdings: Holdings, bins: int = BINS
) -> tuple[Ints, NDArray[np.float64], NDArray[np.float64]]:
    """Token slots held, and of them those that their owners filled in the end, at the end of bins.

    An owner that had not given anything back counts as having filled all. Empty arrays where no
    owner's fill is known.
    """
    import numpy as np

    n_owners = max(trace.n_owners, int(holdings.owner.max(initial=-1)) + 1)
    share = filled_share(trace, n_owners)
    if np.isnan(share).all():
        return np.array([], dtype=np.int64), np.array([]), np.array([])
    size = trace.header.config.block_size
    end_ns = max(1, trace.duration_ns)
    edges = np.linspace(0, end_ns, bins + 1)[1:].astype(np.int64)
    weight = np.nan_to_num(share, nan=1.0)[holdings.owner] * size
    held, filled = np.zeros(bins + 1), np.zeros(bins + 1)
    for at_ns, sign in ((holdings.since_ns, 1), (holdings.until_ns, -1)):
        # What is given back at the end of a bin is still held in it.
        at = np.searchsorted(edges, at_ns, side="left" if sign > 0 else "right")
        np.add.at(held, at.clip(0, bins), sign * float(size))
        np.add.at(filled, at.clip(0, bins), sign * weight)
    return edges, np.cumsum(held)[:bins], np.cumsum(filled)[:bins]


def find_fill(trace: Trace) -> tuple[Ints, Ints, Ints]:
    """Token slots held and filled at each snapshot of the trace: times, held, filled."""
    import numpy as np

    from veloxquant_mlx.telemetry.snapshot_json import SnapshotFormatError, pool_from_dict

    rows = []
    for snapshot in trace.snapshots:
        try:
            pool = pool_from_dict(snapshot.document)
        except SnapshotFormatError:  # a newer version's, or not to be believed
            continue
        held = sum(pool.slots_held(name) for name in pool.streams)
        rows.append((snapshot.at_ns, held, sum(s.slots_used for s in pool.streams.values())))
    table = np.array(rows, dtype=np.int64).reshape(len(rows), 3)
    return table[:, 0], table[:, 1], table[:, 2]
