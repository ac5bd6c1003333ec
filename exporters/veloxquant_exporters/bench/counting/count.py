"""Count: the exact work of each workload's call at a few sizes."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Sequence
from typing import Any, Final

from veloxquant_exporters.bench.counting.calibration import KNOWN
from veloxquant_exporters.bench.counting.instructions import BlindCounterError, counted
from veloxquant_exporters.bench.counting.meter import METER
from veloxquant_exporters.bench.counting.rewrite import Rewriter
from veloxquant_exporters.bench.target import Factory, load, package_of
from veloxquant_exporters.bench.workloads import WORKLOADS, UnsupportedError, Workload

__all__ = ["SERIES", "count_all"]

SERIES: Final = ("steps", "moves", "longest_hold")
_DEAR: Final = 30_000  # steps and moves; a call as long as this is counted once
_TOO_DEAR: Final = 10 * _DEAR
_HARNESS: Final = "veloxquant_exporters.bench"


def count_all(target: str, names: Sequence[str], sizes: Sequence[int]) -> dict[str, Any]:
    """Counts by workload: `{"sizes": [...], "steps": [...], "moves": [...], "longest_hold": [...]}`.

    A workload that the target does not support has `{"unsupported": reason}`. Replaces the modules
    of the target's package: for a process of its own.

    Raises:
        BlindCounterError: A counter missed work that certainly happened.
        CannotCountError: The source has an operation whose cost cannot be seen.
        TargetError: The target cannot be loaded.
    """
    rewriter = Rewriter([package_of(target), "veloxquant_mlx"], spare=_HARNESS)
    rewriter.install()
    _calibrate()
    factory = load(target)
    if not rewriter.files:
        raise BlindCounterError(
            f"no module of {package_of(target)} was rewritten: is it compiled, or imported early?"
        )
    gc.disable()
    return {name: _counts(WORKLOADS[name], factory, sizes) for name in names}


def _counts(workload: Workload, factory: Factory, sizes: Sequence[int]) -> dict[str, Any]:
    found: dict[str, Any] = {"sizes": list(sizes), **{series: [] for series in SERIES}}
    try:
        for size in sizes:
            counts = _count_at(workload, factory, size)
            for series, count in zip(SERIES, counts, strict=True):
                found[series].append(count)
            if _too_steep(found):
                break
    except UnsupportedError as error:
        return {"unsupported": str(error)}
    found["sizes"] = found["sizes"][: len(found["steps"])]
    return found


def _too_steep(found: dict[str, Any]) -> bool:
    """True when larger sizes would only take long to say the same."""
    work = [steps + moves for steps, moves in zip(found["steps"], found["moves"], strict=True)]
    return len(work) > 1 and work[-1] > _TOO_DEAR and work[-1] > 3 * work[-2]


def _count_at(workload: Workload, factory: Factory, size: int) -> tuple[int, ...]:
    """Steps, moves and longest hold of one call: the least of three, as telemetry times some calls."""
    done = workload.start(factory, size, 1)
    # What a first call does once (imports, first of its kind) is no part of the shape.
    done.ready()
    done.run()
    done.check()
    found: list[tuple[int, ...]] = []
    for _ in range(3):
        done.ready()
        with counted():
            done.run()
        found.append(tuple(getattr(METER, series) for series in SERIES))
        done.check()
        if METER.total() > _DEAR:
            break
    if min(steps for steps, *_ in found) == 0:
        raise BlindCounterError(f"{workload.name} at {size}: a call without a single instruction")
    return min(found)


def _calibrate() -> None:
    """Count work of known cost.

    Raises:
        BlindCounterError: It was not counted right.
    """
    rewriter = Rewriter([KNOWN], spare="none")
    rewriter.install()
    known = importlib.import_module(KNOWN)
    _judge(known, rewriter)


def _judge(known: Any, rewriter: Rewriter) -> None:
    loops: list[int] = []
    for n in (8, 64):
        with counted():
            expected = known.work(n)
        if METER.moves != expected:
            raise BlindCounterError(
                f"container work of a known function: counted {METER.moves}, expected {expected}"
            )
        if METER.n_holds != 1 or not METER.longest_hold:
            raise BlindCounterError(f"a lock held once was seen {METER.n_holds} times")
        loops.append(METER.steps)
    rewriter.uninstall()
    if loops[1] - loops[0] < 3 * (64 - 8):
        raise BlindCounterError(f"a loop of 56 turns more made {loops[1] - loops[0]} steps more")
