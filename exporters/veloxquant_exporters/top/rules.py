"""The alert rules that can be judged from readings alone, and why the others cannot.

Names, thresholds, windows, durations and runbooks are those of dashboards/alerts/alerts.yaml; a test
compares them. What happened before the first reading is not known.
"""

from __future__ import annotations

from typing import Final

from veloxquant_exporters.top import judging
from veloxquant_exporters.top.rule import Rule

__all__ = ["HALF_JUDGED", "NOT_JUDGED", "RULES"]

_M: Final = 60.0

RULES: Final = (
    Rule("VeloxQuantPoolExhausted", "warning", 2 * _M, "pool-exhausted.md",
         judging.increases(judging.exhausted, "allocations failed"), window_s=5 * _M),
    Rule("VeloxQuantPoolExhaustionSustained", "critical", 10 * _M, "pool-exhausted.md",
         judging.sustained, (0.01,), window_s=5 * _M),
    Rule("VeloxQuantPoolNearCapacity", "warning", 10 * _M, "near-capacity.md",
         judging.pools_where(judging.near_capacity), (0.9,)),
    Rule("VeloxQuantPoolStreamImbalance", "warning", 5 * _M, "stream-imbalance.md",
         judging.imbalance, (0.0, 0.05), window_s=10 * _M),
    Rule("VeloxQuantPoolBlockLeak", "warning", 15 * _M, "block-leak.md",
         judging.old_owner, (3600.0,)),
    Rule("VeloxQuantPoolOverBudget", "warning", 5 * _M, "pool-over-budget.md",
         judging.over_budget, (0.0, 0.0), window_s=5 * _M),
    Rule("VeloxQuantGenerationThreadDead", "critical", 1 * _M, "generation-thread-dead.md",
         judging.processes_where(judging.thread_dead)),
    Rule("VeloxQuantPoolDoubleFree", "warning", 1 * _M, "double-free-and-invariants.md",
         judging.increases(judging.rejected, "blocks refused"), window_s=15 * _M),
    Rule("VeloxQuantPoolInvariantViolated", "critical", 1 * _M, "double-free-and-invariants.md",
         judging.increases(judging.violations, "violations"), window_s=15 * _M),
    Rule("VeloxQuantPoolTokenSlotWaste", "info", 30 * _M, "token-slot-waste.md",
         judging.pools_where(judging.waste), (0.4, 0.7)),
    Rule("VeloxQuantPoolOperationSlow", "warning", 10 * _M, "allocate-slow.md",
         judging.slow(judging.durations), (0.001,), window_s=5 * _M),
    Rule("VeloxQuantPoolLockContention", "warning", 10 * _M, "allocate-slow.md",
         judging.slow(judging.lock_wait), (0.001,), window_s=5 * _M),
    Rule("VeloxQuantMlxMemoryNearLimit", "warning", 10 * _M, "mlx-memory.md",
         judging.processes_where(judging.near_limit), (0.9,)),
    Rule("VeloxQuantWorkerDown", "critical", 1 * _M, "exporter-down-and-stale.md", judging.down),
    Rule("VeloxQuantMetricsStale", "warning", 1 * _M, "exporter-down-and-stale.md",
         judging.processes_where(judging.stale), (120.0,)),
    Rule("VeloxQuantTelemetryErrors", "warning", 15 * _M, "telemetry-overhead.md", judging.errors,
         window_s=15 * _M),
    Rule("VeloxQuantTelemetryOverhead", "info", 15 * _M, "telemetry-overhead.md",
         judging.processes_where(judging.overhead), (0.02,), window_s=5 * _M),
)  # fmt: skip

_LONG: Final = "looks at a trend over {}, longer than what top keeps"
_SCRAPE: Final = "is about Prometheus' own scrapes"
_BENCH: Final = "is about benchmark runs"

# Every other rule of alerts.yaml.
NOT_JUDGED: Final = {
    "VeloxQuantPoolExhaustionPredicted": _LONG.format("20 minutes"),
    "VeloxQuantPoolChurnGrowShrink": _LONG.format("30 minutes"),
    "VeloxQuantMlxCacheGrowing": _LONG.format("30 minutes"),
    "VeloxQuantMlxMemoryDrift": _LONG.format("1 hour"),
    "VeloxQuantExporterDown": _SCRAPE,
    "VeloxQuantExporterAbsent": _SCRAPE,
    "VeloxQuantBenchmarkRegression": _BENCH,
    "VeloxQuantBenchmarkStale": _BENCH,
}
# Half of a rule: said beside the list, as the other half is judged.
HALF_JUDGED: Final = {
    "VeloxQuantPoolBlockLeak": "owners of an hour are judged, the climb of idle blocks is not",
}
