"""Holdings: which block was held when, and by whom; found by driving an allocator with the trace."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from veloxquant_exporters.replay.driver import Driver, Moved

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from veloxquant_mlx.telemetry.trace import Trace

    Ints = NDArray[np.int64]

__all__ = ["Holdings", "find_holdings"]

# Calls between two reports of progress.
REPORTED: Final = 4096


@dataclass(frozen=True, slots=True)
class Holdings:
    """One row a holding: a block, from the call that took it to the call that gave it back.

    Every column is an int64 array of shape (n_holdings,), in the order of the beginnings.

    Attributes:
        block: Block id. Those of the recorded pool if the trace began with the pool; else those
            that a new pool gives to the same calls.
        owner: Number of the owner.
        since_ns, until_ns: Since the beginning of the trace; to its end for what is held then.
        filled: Token slots of the block that were asked for when it was taken.
        row: Place of the block among those that were ever held, by stream and id: ids that never
            were leave no gap in a picture.
        n_rows: Blocks that were ever held.
        disagreed: Number of the first call that went otherwise than recorded; -1 without one.
    """

    block: Ints
    owner: Ints
    since_ns: Ints
    until_ns: Ints
    filled: Ints
    row: Ints
    n_rows: int
    disagreed: int


def find_holdings(trace: Trace, progress: Callable[[int], object] = lambda _: None) -> Holdings:
    """Do every call of the trace, and note what moved; linear in blocks moved.

    Args:
        trace: The recording.
        progress: Called now and then with the number of calls done.

    Raises:
        TraceError: The trace needs more blocks than can be replayed.
    """
    import numpy as np

    driver = Driver(trace)
    times = trace.at_ns[trace.first_row[:-1]].tolist()
    refused = trace.outcome[trace.first_row[:-1]].tolist()
    rows: list[tuple[int, int, int, int]] = []  # block, owner, since, filled
    ends: list[int] = []
    streams: list[int] = []
    place: dict[int, int] = {}  # of the open holding of a block
    disagreed = -1

    def take(moved: Moved, at_ns: int) -> None:
        for share in moved.taken:
            for block in share.blocks:
                block_id = block.block_id
                place[block_id] = len(rows)
                rows.append((block_id, share.owner, at_ns, block.n_used))
                ends.append(-1)
                streams.append(share.stream)

    take(driver.opening, 0)
    for call, (at_ns, moved) in enumerate(zip(times, driver.run(), strict=True)):
        for share in moved.freed:
            for block in share.blocks:
                held = place.pop(block.block_id, None)
                if held is not None:
                    ends[held] = at_ns
        take(moved, at_ns)
        if disagreed < 0 and (moved.outcome == "exhausted") is (refused[call] != 1):
            disagreed = call
        if not call % REPORTED:
            progress(call)
    progress(driver.n_calls)
    table = np.array(rows, dtype=np.int64).reshape(len(rows), 4)
    until = np.array(ends, dtype=np.int64)
    until[until < 0] = trace.duration_ns
    # Streams one above the other, as ids of growth are from the same count.
    places = np.array(streams, dtype=np.int64) << 40 | table[:, 0]
    held, row = np.unique(places, return_inverse=True)
    ids, owners, since, filled = table.T
    return Holdings(ids, owners, since, until, filled, row.reshape(-1), len(held), disagreed)
