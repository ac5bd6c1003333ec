"""The alert rules that can be judged from readings alone, and why the others cannot.

Names, thresholds, windows, durations and runbooks are those of dashboards/alerts/alerts.yaml; a test
compares them. Judged is what the rule says, over as much of its window as has been watched: what
happened before the first reading is not known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, Literal

from veloxquant_exporters.top.history import Moment
from veloxquant_exporters.top.quantile import difference, quantile
from veloxquant_exporters.top.track import Tracks, rise
from veloxquant_exporters.top.units import duration, percent
from veloxquant_mlx.telemetry.histogram import HistogramSnapshot
from veloxquant_mlx.telemetry.process import ProcessSnapshot
from veloxquant_mlx.telemetry.snapshot import PoolSnapshot

__all__ = ["NOT_JUDGED", "RULES", "Finding", "Rule", "Scene", "Severity"]

Severity = Literal["critical", "warning", "info"]
_M: Final = 60.0


@dataclass(frozen=True, slots=True)
class Scene:
    """What a rule may look at.

    Attributes:
        moments: The readings that are kept, the newest last.
        tracks: Of what is there now.
    """

    moments: tuple[Moment, ...]
    tracks: Tracks

    @property
    def now(self) -> Moment:
        """The newest reading."""
        return self.moments[-1]


@dataclass(frozen=True, slots=True)
class Finding:
    """A condition that holds now.

    Attributes:
        process, pool: What it is about; "" where it is about less.
        detail: The figures, in a few words.
        label: Tells it from others of the same rule and pool, e.g. an operation.
    """

    process: str
    pool: str
    detail: str
    label: str = ""


@dataclass(frozen=True, slots=True)
class Rule:
    """An alert rule.

    Attributes:
        name: As in alerts.yaml.
        severity: As there.
        for_s: How long the condition must hold.
        runbook: File in docs/runbooks.
        judge: Gives what holds now.
        limits: Thresholds, in the order in which the expression has them.
        window_s: Of the expression's range; 0 without one.
    """

    name: str
    severity: Severity
    for_s: float
    runbook: str
    judge: Callable[[Rule, Scene], Iterator[Finding]]
    limits: tuple[float, ...] = (0.0,)
    window_s: float = 0.0


# -- how they judge ------------------------------------------------------------------------------


def _pools(
    condition: Callable[[Rule, PoolSnapshot], str | None],
) -> Callable[[Rule, Scene], Iterator[Finding]]:
    """A rule about the present state of a pool: `condition` gives the detail if it holds."""

    def judge(rule: Rule, scene: Scene) -> Iterator[Finding]:
        for (process, name), track in scene.tracks.pools.items():
            detail = condition(rule, track.now)
            if detail is not None:
                yield Finding(process, name, detail)

    return judge


def _increases(
    read: Callable[[PoolSnapshot], dict[str, int]], what: str
) -> Callable[[Rule, Scene], Iterator[Finding]]:
    """A rule about counters of a pool, by label, that shall not rise within the window."""

    def judge(rule: Rule, scene: Scene) -> Iterator[Finding]:
        for (process, name), track in scene.tracks.pools.items():
            window = track.window(scene.now.at_s, rule.window_s)
            for label in read(track.now):
                n = window.rise(lambda pool, label=label: read(pool).get(label, 0))  # type: ignore[misc]
                if n > rule.limits[0]:
                    shown = f" ({label})" if label else ""
                    yield Finding(
                        process, name, f"{n:,.0f} {what}{shown} in {duration(rule.window_s)}", label
                    )

    return judge


def _slow(
    read: Callable[[PoolSnapshot], dict[str, HistogramSnapshot]],
) -> Callable[[Rule, Scene], Iterator[Finding]]:
    """A rule about the 99th percentile of histograms, by label, within the window."""

    def judge(rule: Rule, scene: Scene) -> Iterator[Finding]:
        for (process, name), track in scene.tracks.pools.items():
            window = track.window(scene.now.at_s, rule.window_s)
            first = read(window.points[0].snapshot)
            if len(window.points) < 2:
                continue
            for label, histogram in read(window.now).items():
                before = first.get(label)
                if before is None:
                    continue
                p99_s = quantile(difference(histogram, before), 0.99)
                if p99_s is not None and p99_s > rule.limits[0]:
                    shown = f"{label} p99 {duration(p99_s)}".strip()
                    yield Finding(process, name, shown, label)

    return judge


def _processes(
    condition: Callable[[Rule, Scene, ProcessSnapshot], str | None],
) -> Callable[[Rule, Scene], Iterator[Finding]]:
    """A rule about a process."""

    def judge(rule: Rule, scene: Scene) -> Iterator[Finding]:
        for name, track in scene.tracks.processes.items():
            detail = condition(rule, scene, track.now)
            if detail is not None:
                yield Finding(name, "", detail)

    return judge


def _near_capacity(rule: Rule, pool: PoolSnapshot) -> str | None:
    share = _share(pool.blocks_in_use, pool.n_blocks)
    if share > rule.limits[0] and pool.n_blocks >= pool.blocks_limit:
        return f"{percent(share)} of the blocks in use, and it cannot grow"
    return None


def _waste(rule: Rule, pool: PoolSnapshot) -> str | None:
    held = sum(pool.slots_held(name) for name in pool.streams)
    waste = 1 - _share(sum(s.slots_used for s in pool.streams.values()), held) if held else 0.0
    used = _share(pool.blocks_in_use, pool.n_blocks)
    if waste > rule.limits[0] and used > rule.limits[1]:
        return f"{percent(waste)} of the held token slots are empty at {percent(used)} in use"
    return None


def _old_owner(rule: Rule, pool: PoolSnapshot) -> str | None:
    if pool.oldest_owner_age_s > rule.limits[0]:
        return f"an owner has held blocks for {duration(pool.oldest_owner_age_s)}"
    return None


def _imbalance(rule: Rule, scene: Scene) -> Iterator[Finding]:
    """Stranded allocations, while the emptiest stream has room on average."""
    for finding in _increases(_stranded, "allocations failed")(rule, scene):
        track = scene.tracks.pools[finding.process, finding.pool]
        pools = [p.snapshot for p in track.window(scene.now.at_s, rule.window_s).points]
        free = max(
            sum(pool.streams[name].free for pool in pools if name in pool.streams) / len(pools)
            for name in track.now.streams
        )
        if free > rule.limits[1] * track.now.n_blocks:
            yield finding


def _sustained(rule: Rule, scene: Scene) -> Iterator[Finding]:
    for (process, name), track in scene.tracks.pools.items():
        window = track.window(scene.now.at_s, rule.window_s)
        failed = window.rise(lambda pool: pool.n_exhausted)
        asked = window.rise(
            lambda pool: sum(stream.allocate_requests for stream in pool.streams.values())
        )
        if asked and failed / asked > rule.limits[0]:
            yield Finding(process, name, f"{percent(failed / asked)} of the allocations fail")


def _near_limit(rule: Rule, _scene: Scene, process: ProcessSnapshot) -> str | None:
    parts = (process.mlx_active_bytes, process.mlx_cache_bytes, process.mlx_limit_bytes)
    active, cache, limit = parts
    if active is None or cache is None or not limit:
        return None
    share = (active + cache) / limit
    return f"MLX at {percent(share)} of the device's limit" if share > rule.limits[0] else None


def _stale(rule: Rule, scene: Scene, process: ProcessSnapshot) -> str | None:
    age_s = scene.now.wall_s - process.wall_s
    return f"its newest snapshot is {duration(age_s)} old" if age_s > rule.limits[0] else None


def _overhead(rule: Rule, scene: Scene, process: ProcessSnapshot) -> str | None:
    track = scene.tracks.processes[process.process].window(scene.now.at_s, rule.window_s)
    share = _share(track.rise(lambda p: p.overhead_s), track.seconds)
    return f"telemetry takes {percent(share)} of a core" if share > rule.limits[0] else None


def _down(rule: Rule, scene: Scene) -> Iterator[Finding]:
    for process, up in scene.now.reading.up.items():
        if up == rule.limits[0]:
            yield Finding(process, "", "its snapshot cannot be had: it died, or cannot be read")


def _errors(rule: Rule, scene: Scene) -> Iterator[Finding]:
    """Failures of telemetry: of each process, and of who reads them."""
    counted: dict[tuple[str, str], list[float]] = {}
    for moment in scene.moments:
        if scene.now.at_s - moment.at_s > rule.window_s:
            continue
        for reason, n in moment.reading.errors.items():
            counted.setdefault(("", reason), []).append(n)
    for name, track in scene.tracks.processes.items():
        for point in track.window(scene.now.at_s, rule.window_s).points:
            for reason, n in point.snapshot.errors.items():
                counted.setdefault((name, reason), []).append(n)
    for (process, reason), values in counted.items():
        n_failed = rise(values)
        if n_failed > rule.limits[0]:
            text = f"{n_failed:,.0f} failures ({reason}) in {duration(rule.window_s)}"
            yield Finding(process, "", text, reason)


def _share(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0


def _exhausted(pool: PoolSnapshot) -> dict[str, int]:
    return {"": pool.n_exhausted}


def _stranded(pool: PoolSnapshot) -> dict[str, int]:
    return {f"stream {name}": s.exhausted.get("stranded", 0) for name, s in pool.streams.items()}


def _rejected(pool: PoolSnapshot) -> dict[str, int]:
    return {reason: n for reason, n in pool.rejected.items() if reason != "stale"}


def _violations(pool: PoolSnapshot) -> dict[str, int]:
    return dict(pool.invariant_violations)


def _durations(pool: PoolSnapshot) -> dict[str, HistogramSnapshot]:
    return dict(pool.durations)


def _lock_wait(pool: PoolSnapshot) -> dict[str, HistogramSnapshot]:
    return {"lock wait": pool.lock_wait}


# -- the table -----------------------------------------------------------------------------------

RULES: Final = (
    Rule("VeloxQuantPoolExhausted", "warning", 2 * _M, "pool-exhausted.md",
         _increases(_exhausted, "allocations failed"), window_s=5 * _M),
    Rule("VeloxQuantPoolExhaustionSustained", "critical", 10 * _M, "pool-exhausted.md",
         _sustained, (0.01,), window_s=5 * _M),
    Rule("VeloxQuantPoolNearCapacity", "warning", 10 * _M, "near-capacity.md",
         _pools(_near_capacity), (0.9,)),
    Rule("VeloxQuantPoolStreamImbalance", "warning", 5 * _M, "stream-imbalance.md",
         _imbalance, (0.0, 0.05), window_s=10 * _M),
    Rule("VeloxQuantPoolBlockLeak", "warning", 15 * _M, "block-leak.md",
         _pools(_old_owner), (3600.0,)),
    Rule("VeloxQuantPoolDoubleFree", "warning", 1 * _M, "double-free-and-invariants.md",
         _increases(_rejected, "blocks refused"), window_s=15 * _M),
    Rule("VeloxQuantPoolInvariantViolated", "critical", 1 * _M, "double-free-and-invariants.md",
         _increases(_violations, "violations"), window_s=15 * _M),
    Rule("VeloxQuantPoolTokenSlotWaste", "info", 30 * _M, "token-slot-waste.md",
         _pools(_waste), (0.4, 0.7)),
    Rule("VeloxQuantPoolOperationSlow", "warning", 10 * _M, "allocate-slow.md",
         _slow(_durations), (0.001,), window_s=5 * _M),
    Rule("VeloxQuantPoolLockContention", "warning", 10 * _M, "allocate-slow.md",
         _slow(_lock_wait), (0.001,), window_s=5 * _M),
    Rule("VeloxQuantMlxMemoryNearLimit", "warning", 10 * _M, "mlx-memory.md",
         _processes(_near_limit), (0.9,)),
    Rule("VeloxQuantWorkerDown", "critical", 1 * _M, "exporter-down-and-stale.md", _down),
    Rule("VeloxQuantMetricsStale", "warning", 2 * _M, "exporter-down-and-stale.md",
         _processes(_stale), (60.0,)),
    Rule("VeloxQuantTelemetryErrors", "warning", 15 * _M, "telemetry-overhead.md", _errors,
         window_s=15 * _M),
    Rule("VeloxQuantTelemetryOverhead", "info", 15 * _M, "telemetry-overhead.md",
         _processes(_overhead), (0.02,), window_s=5 * _M),
)  # fmt: skip

_LONG: Final = "looks at a trend over {}, longer than top keeps"
_SCRAPE: Final = "is about Prometheus' own scrapes"
_BENCH: Final = "is about benchmark runs"

# Every other rule of alerts.yaml.
NOT_JUDGED: Final = {
    "VeloxQuantPoolExhaustionPredicted": _LONG.format("15 minutes").replace("longer", "as long"),
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
