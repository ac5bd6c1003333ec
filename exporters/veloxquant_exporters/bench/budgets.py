"""Budgets: what each benchmark may cost, as exponents, with the reason."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from veloxquant_exporters.bench.workloads import WORKLOADS, Workload

__all__ = ["Budget", "BudgetError", "default_budget", "read_budgets"]

# Counts have no noise: what is left between a flat or linear count and the gate is rounding at the
# smallest sizes. A linear call with an n log n part ends above 1.05 at these sizes.
FLAT_SLACK: Final = 0.02
LINEAR_SLACK: Final = 0.05


class BudgetError(ValueError):
    """The budget file does not fit the benchmarks."""


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits of one benchmark. None: not gated.

    Attributes:
        exponent: Most growth of the exact counts: 0.0 flat, 1.0 linear.
        cpu_slope: Log-log slope of CPU time above which the timed layer fails.
        ratio_slope: For linear calls, the slope of the ratio to the twin that must be exceeded too.
        level: Ratio to the twin above which there is a warning.
        reason: Why these.
    """

    exponent: float
    cpu_slope: float
    ratio_slope: float | None
    level: float
    reason: str

    @property
    def most_growth(self) -> float:
        """The exponent with its slack."""
        return self.exponent + (FLAT_SLACK if self.exponent == 0 else LINEAR_SLACK)


def default_budget(workload: Workload) -> Budget:
    """The budget of a workload by its kind alone."""
    if workload.kind == "flat":
        return Budget(0.0, 0.65, None, 1.5, "flat in what it is measured over")
    return Budget(1.0, 1.30, 0.20, 1.5, "linear in the blocks it is about")


def read_budgets(path: Path) -> dict[str, Budget]:
    """The budgets of a TOML file, one table a benchmark.

    Raises:
        BudgetError: A table is wrong, a benchmark has none, or one is for no benchmark: a renamed
            benchmark must not pass by being forgotten.
    """
    tables = tomllib.loads(path.read_text("utf-8"))
    missing, unknown = WORKLOADS.keys() - tables.keys(), tables.keys() - WORKLOADS.keys()
    if missing or unknown:
        raise BudgetError(
            f"{path.name} and the benchmarks differ: no budget for {sorted(missing) or 'none'}, "
            f"no benchmark for {sorted(unknown) or 'none'}"
        )
    return {name: _budget(name, table) for name, table in tables.items()}


def _budget(name: str, table: dict[str, Any]) -> Budget:
    fields = {"exponent", "cpu_slope", "ratio_slope", "level", "reason"}
    numbers = {key: value for key, value in table.items() if key != "reason"}
    if table.keys() - fields or {"exponent", "cpu_slope", "level", "reason"} - table.keys():
        raise BudgetError(f"[{name}] must have {', '.join(sorted(fields))}; has {sorted(table)}")
    bad = [key for key, value in numbers.items() if type(value) not in (int, float)]
    if bad or not isinstance(table["reason"], str) or not table["reason"].strip():
        raise BudgetError(f"[{name}]: {bad or ['reason']} must be numbers, and reason a sentence")
    return Budget(
        float(table["exponent"]),
        float(table["cpu_slope"]),
        float(table["ratio_slope"]) if "ratio_slope" in table else None,
        float(table["level"]),
        table["reason"],
    )
