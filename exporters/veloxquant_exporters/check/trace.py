"""A trace file: can it be read, is it whole, and could a pool have done what it says?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from veloxquant_exporters.findings import Finding, printable
from veloxquant_mlx.telemetry.trace import Trace, TraceError, load_trace
from veloxquant_mlx.telemetry.trace.schema import (
    ALLOCATE_OP,
    EXHAUSTED_OUTCOME,
    MAGIC,
    OK,
    OPERATIONS,
    SHRINK_OP,
    SUFFIX,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Rows = NDArray[np.int64]

__all__ = ["MAGIC", "SUFFIX", "CheckedTrace", "check_trace"]


@dataclass(frozen=True, slots=True)
class CheckedTrace:
    """What was found in a trace.

    Attributes:
        summary: How much there is, in a few words; "" of a file that cannot be read.
        findings: Without any that say that all is well.
        header: What the trace says of itself, as JSON values; None of one that cannot be read.
    """

    summary: str
    findings: tuple[Finding, ...]
    header: dict[str, Any] | None


def check_trace(path: Path) -> CheckedTrace:
    """Look at a trace file.

    Raises:
        ImportError: The extra `trace` is not installed.
        OSError: The file cannot be read.
    """
    try:
        trace = load_trace(path)
    except TraceError as error:
        finding = Finding(
            "problem",
            printable(str(error)),
            "it is damaged, or was written by another program or version",
            "record it anew; a file that is still copied, or was cut in the middle, is like that",
        )
        return CheckedTrace("", (finding,), None)
    return CheckedTrace(_summary(trace), tuple(_findings(trace)), _header(trace))


def _summary(trace: Trace) -> str:
    header = trace.header
    seconds = trace.duration_ns / 1e9
    return printable(
        f"trace of pool {header.pool!r}: {trace.n_calls:,} calls of {trace.n_owners:,} owners in "
        f"{seconds:,.3g} s, {'cut' if trace.cut else 'whole'}, written as {header.reason}"
    )


def _header(trace: Trace) -> dict[str, Any]:
    header = trace.header
    return {
        "version": header.version,
        "pool": header.pool,
        "reason": header.reason,
        "began_wall_s": header.began_wall_s,
        "streams": list(header.streams),
        "versions": dict(header.versions),
        "cut": trace.cut,
        "n_lost": trace.n_lost,
        "n_calls": trace.n_calls,
        "n_rows": trace.n_rows,
        "n_owners": trace.n_owners,
        "duration_ns": trace.duration_ns,
    }


def _findings(trace: Trace) -> Iterator[Finding]:
    if trace.cut:
        yield Finding(
            "warning",
            "the file ends without its end, and is read up to there",
            "the process died while it wrote, or is still writing",
        )
    if trace.n_lost:
        yield Finding(
            "warning",
            f"{trace.n_lost:,} calls were lost in {len(trace.gaps)} gaps",
            "the pool was called faster than the recorder drained it; the books go on after a gap",
            "record with a larger ring, or with less of it: docs/traces.md",
        )
    if not trace.n_rows:
        yield Finding("warning", "there is not one call in it", "nothing can be replayed")
        return
    yield from _rows(trace)


def _rows(trace: Trace) -> Iterator[Finding]:
    """What the reader, who keeps the books as it reads, does not look at."""
    taken = (trace.operation == ALLOCATE_OP) & (trace.outcome == OK)
    slots = trace.blocks * trace.header.config.block_size
    faults = (
        (taken & (trace.tokens > slots), "asks for more tokens than its blocks have slots"),
        (taken & (trace.blocks == 0), "takes no block"),
        (~taken & (trace.outcome == OK) & (trace.tokens > slots), "frees more tokens than fit"),
        ((trace.operation == SHRINK_OP) & (trace.owner >= 0), "shrinks for an owner"),
        (trace.growth * (not trace.header.config.grow_on_exhaustion) > 0, "grows a fixed pool"),
        ((trace.outcome == EXHAUSTED_OUTCOME) & (trace.operation != ALLOCATE_OP), "is refused"),
        (_refused_with_room(trace), "is refused although there are enough free blocks"),
    )
    for wrong, text in faults:
        rows = wrong.nonzero()[0]
        if len(rows):
            row = int(rows[0])
            name = OPERATIONS[int(trace.operation[row])]
            more = f", and {len(rows) - 1:,} more rows" if len(rows) > 1 else ""
            yield Finding(
                "problem",
                f"call {int(trace.call[row])}: {name} {text}{more}",
                "no pool does that: the recorder has a fault, or the file was made up",
                "do not replay it; report it with the file",
            )


def _refused_with_room(trace: Trace) -> Rows:
    """Rows of refused calls for which every stream had the blocks that all rows of them asked."""
    import numpy as np

    refused = np.flatnonzero(trace.outcome == EXHAUSTED_OUTCOME)
    n_streams = len(trace.header.streams)
    key = trace.call[refused] * n_streams + trace.stream[refused]
    keys, place = np.unique(key, return_inverse=True)
    asked = np.bincount(place, weights=trace.blocks[refused], minlength=len(keys))
    lacks = asked[place] > trace.free_after[refused]
    lacking_calls = np.unique(trace.call[refused][lacks])
    wrong = np.zeros(trace.n_rows, np.bool_)
    wrong[refused] = ~np.isin(trace.call[refused], lacking_calls)
    return wrong.astype(np.int64)
