"""Calls: whether the rows of one call are such as one call has, so that nobody need ask again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from veloxquant_mlx.telemetry.trace.libraries import load_library
from veloxquant_mlx.telemetry.trace.schema import (
    ALLOCATE_OP,
    EXHAUSTED_OUTCOME,
    FREE_ALL_OP,
    FREE_OP,
    MAX_COUNT,
    OK,
    TraceError,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]

__all__ = ["check_calls", "size_fault"]

# `allocate_kv` has a row for the keys and one for the values.
MAX_ALLOCATED: int = 2


def check_calls(found: Mapping[str, Ints]) -> None:
    """The rows of a chunk, each of whose calls begins with a row of `new_call` 1.

    Raises:
        TraceError: A call does several things at once, or one that no pool does.
    """
    np: Any = load_library("numpy")
    starts = np.flatnonzero(found["new_call"])
    if not len(starts):
        return
    sizes = np.diff(np.append(starts, len(found["new_call"])))
    for name in ("operation", "outcome"):
        if (found[name] != np.repeat(found[name][starts], sizes)).any():
            raise TraceError(f"the rows of a call differ in their {name}")
    operation = found["operation"]
    asks, ends = operation == ALLOCATE_OP, operation == FREE_ALL_OP
    if ((sizes > MAX_ALLOCATED) & asks[starts]).any():
        raise TraceError(f"an allocation has more than {MAX_ALLOCATED} rows")
    same = found["owner"] == np.repeat(found["owner"][starts], sizes)
    if (~same & (asks | ends)).any():
        raise TraceError("a call is of several owners")
    if ((found["outcome"] == EXHAUSTED_OUTCOME) & ~asks).any():
        raise TraceError("a call is refused that is no allocation")
    if ((found["growth"] > 0) & ~asks).any():
        raise TraceError("a call grows the pool that is no allocation")
    # A lease whose blocks were all freed singly is released with none.
    if ((found["blocks"] < 1) & (asks | (operation == FREE_OP))).any():
        raise TraceError("a call is of no blocks")


def size_fault(found: Mapping[str, Ints], block_size: int) -> str | None:
    """The first allocation whose blocks are not those that its tokens take, in words, or None."""
    np: Any = load_library("numpy")
    taken = (found["operation"] == ALLOCATE_OP) & (found["outcome"] == OK)
    tokens, blocks = found["tokens"], found["blocks"]
    wrong = np.flatnonzero(
        taken & (tokens >= 0) & (tokens < MAX_COUNT) & (-(-tokens // block_size) != blocks)
    )
    if not len(wrong):
        return None
    row = int(wrong[0])
    return (
        f"the books do not add up at call {int(found['call'][row])}: {int(blocks[row])} blocks of "
        f"{block_size} for {int(tokens[row])} tokens"
    )
