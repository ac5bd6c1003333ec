"""Raster: the block map when there are too many holdings to draw each: an image of cells."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from veloxquant_exporters.report.holdings import Holdings

__all__ = ["COLUMNS", "ROWS", "Raster", "rasterise"]

COLUMNS: Final = 900
ROWS: Final = 240
NOBODY: Final = -1


@dataclass(frozen=True, slots=True)
class Raster:
    """Cells of equal spans of time and ranges of blocks, arrays of shape (rows, columns).

    Attributes:
        occupancy: Share of the cell that was held, 0 to 1.
        owner: Number of the owner whose single holding covers most of it; -1 where nothing does.
    """

    occupancy: NDArray[np.float32]
    owner: NDArray[np.int64]


def rasterise(holdings: Holdings, end_ns: int, rows: int = ROWS, columns: int = COLUMNS) -> Raster:
    """Paint the holdings into cells; those of a row are the ids of one row each, where ids are few."""
    import numpy as np

    rows = max(1, min(rows, holdings.n_rows))
    end_ns = max(1, end_ns)
    row = holdings.row * rows // max(1, holdings.n_rows)
    left, right = holdings.since_ns / end_ns * columns, holdings.until_ns / end_ns * columns
    first = np.minimum(left.astype(np.int64), columns - 1)
    last = np.minimum(right.astype(np.int64), columns - 1)
    # Coverage by differences: whole cells between the ends, and the parts of the cells at them.
    whole = np.zeros((rows, columns + 1))
    np.add.at(whole, (row, first), 1.0)
    np.add.at(whole, (row, last), -1.0)
    cover = np.cumsum(whole[:, :-1], axis=1)
    np.add.at(cover, (row, first), first - left)
    np.add.at(cover, (row, last), right - last)
    ids = np.bincount(np.arange(holdings.n_rows) * rows // max(1, holdings.n_rows), minlength=rows)
    occupancy = np.clip(cover / np.maximum(ids, 1)[:, None], 0, 1).astype(np.float32)
    owner = np.full((rows, columns), NOBODY, dtype=np.int64)
    # The longest are painted last: they are what one looks for.
    order = np.argsort(holdings.until_ns - holdings.since_ns, kind="stable")
    painted = zip(
        row[order].tolist(),
        first[order].tolist(),
        (last[order] + 1).tolist(),
        holdings.owner[order].tolist(),
        strict=True,
    )
    for at, begin, end, number in painted:
        owner[at, begin:end] = number
    return Raster(occupancy, owner)
