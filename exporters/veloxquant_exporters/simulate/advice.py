"""Advice: which of the tried configurations to take, and why, in sentences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from veloxquant_exporters.simulate.result import Result

__all__ = ["Advice", "advise"]

# Configurations whose memory differs by less are alike: a trace is one day of many.
ALIKE: Final = 0.02
# A pool of which so much is free at the peak is larger than it need be.
AMPLE: Final = 0.5


@dataclass(frozen=True, slots=True)
class Advice:
    """The recommended result and the reasons, a sentence each."""

    best: Result
    reasons: tuple[str, ...]


def advise(results: Sequence[Result]) -> Advice:
    """Recommend one of `results`, of which the first is the recorded configuration.

    The fewest requests refused come first, then the least memory at the peak; among those within
    2 % of that the recorded configuration, else the one of the fewest blocks, whose calls cost
    least, and then the smaller pool.

    Raises:
        ValueError: There are no results.
    """
    if not results:
        raise ValueError("there is nothing to choose from: give at least one result")
    recorded = results[0]
    fewest = min(_refused(result) for result in results)
    able = [result for result in results if _refused(result) == fewest]
    least = min(result.peak_slots for result in able)
    alike = [result for result in able if result.peak_slots <= least * (1 + ALIKE)]
    best = recorded if recorded in alike else min(alike, key=_cost)
    return Advice(best, tuple(_reasons(best, recorded, results, able)))


def _refused(result: Result) -> tuple[int, int]:
    return result.n_rejected, result.n_exhausted


def _cost(result: Result) -> tuple[int, int]:
    return result.peak_blocks, result.managed_slots


def _reasons(
    best: Result, recorded: Result, results: Sequence[Result], able: Sequence[Result]
) -> list[str]:
    reasons = []
    if best.n_exhausted:
        reasons += _refusing(best)
    else:
        if best is recorded:
            reasons.append("The recorded configuration is as good as any that was tried; keep it.")
        if len(able) < len(results):
            n = len(results) - len(able)
            reasons.append(f"It refuses nothing, where {n} of the others tried refuse requests.")
    if best is not recorded:
        reasons += _against(best, recorded)
    if not best.config.grow_on_exhaustion and not best.n_exhausted:
        spare = 1 - best.peak_slots / best.managed_slots if best.managed_slots else 0.0
        fewer = "; try fewer with --n-blocks" if spare > AMPLE else ""
        reasons.append(f"At the peak {spare:.0%} of its blocks are free{fewer}.")
    if best.n_admitted:
        reasons.append(
            f"{best.n_admitted} allocations that the recorded pool refused find room; what these "
            "requests would have held from there on is not in the trace, and not in these figures."
        )
    return reasons


def _refusing(best: Result) -> list[str]:
    """How much is refused at best, and what would help."""
    config = best.config
    if not config.grow_on_exhaustion:
        help_ = "Give the pool more blocks with --n-blocks, or let it grow with --grow on."
    elif config.max_blocks is not None:
        help_ = f"Let it grow beyond its {config.max_blocks} blocks with --max-blocks."
    else:
        help_ = "They ask for more than memory can hold."
    fewest = f"{best.n_exhausted} allocations, of {best.n_rejected} of {best.n_owners} requests"
    reasons = [
        f"Every configuration that was tried refuses requests. This one refuses the fewest: {fewest}.",
        help_,
    ]
    if best.n_stranded:
        reasons.append(
            f"For {best.n_stranded} of them the other stream had room: --separate-kv off shares it."
        )
    return reasons


def _against(best: Result, recorded: Result) -> list[str]:
    reasons = []
    if recorded.n_exhausted > best.n_exhausted:
        reasons.append(
            f"The recorded one refuses {recorded.n_exhausted} allocations of "
            f"{recorded.n_rejected} requests in this trace."
        )
    if recorded.peak_slots and _refused(best) == _refused(recorded):
        saved = 1 - best.peak_slots / recorded.peak_slots
        if saved > 0:
            reasons.append(
                f"Its peak takes {saved:.1%} less memory than the recorded configuration's: "
                f"{best.rounding:.1%} of the slots held are rounding, there {recorded.rounding:.1%}."
            )
        elif best.peak_blocks < recorded.peak_blocks:
            reasons.append(
                f"It takes {recorded.peak_blocks / best.peak_blocks:.1f} times fewer blocks for "
                f"memory that differs by {abs(saved):.1%}."
            )
    return reasons
