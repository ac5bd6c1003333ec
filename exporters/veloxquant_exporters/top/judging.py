"""How the rules judge: each gives what holds now, over as much of its window as was watched."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from veloxquant_exporters.top.quantile import difference, quantile
from veloxquant_exporters.top.rule import Finding, Rule, Scene
from veloxquant_exporters.top.track import Track, rise
from veloxquant_exporters.top.units import duration, percent
from veloxquant_mlx.telemetry.histogram import HistogramSnapshot
from veloxquant_mlx.telemetry.process import ProcessSnapshot
from veloxquant_mlx.telemetry.snapshot import PoolSnapshot

__all__ = [
    "down",
    "durations",
    "errors",
    "exhausted",
    "imbalance",
    "increases",
    "lock_wait",
    "near_capacity",
    "near_limit",
    "old_owner",
    "over_budget",
    "overhead",
    "pools_where",
    "processes_where",
    "rejected",
    "slow",
    "stale",
    "sustained",
    "thread_dead",
    "violations",
    "waste",
]


def pools_where(
    condition: Callable[[Rule, PoolSnapshot], str | None],
) -> Callable[[Rule, Scene], Iterator[Finding]]:
    """A rule about the present state of a pool: `condition` gives the detail if it holds."""

    def judge(rule: Rule, scene: Scene) -> Iterator[Finding]:
        for (process, name), track in scene.tracks.pools.items():
            detail = condition(rule, track.now)
            if detail is not None:
                yield Finding(process, name, detail)

    return judge


def increases(
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


def slow(
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


def processes_where(
    condition: Callable[[Rule, Scene, ProcessSnapshot], str | None],
) -> Callable[[Rule, Scene], Iterator[Finding]]:
    """A rule about a process."""

    def judge(rule: Rule, scene: Scene) -> Iterator[Finding]:
        for name, track in scene.tracks.processes.items():
            detail = condition(rule, scene, track.now)
            if detail is not None:
                yield Finding(name, "", detail)

    return judge


def near_capacity(rule: Rule, pool: PoolSnapshot) -> str | None:
    """A pool that cannot grow, and is nearly full."""
    share = _share(pool.blocks_in_use, pool.n_blocks)
    if share > rule.limits[0] and pool.n_blocks >= pool.blocks_limit:
        return f"{percent(share)} of the blocks in use, and it cannot grow"
    return None


def waste(rule: Rule, pool: PoolSnapshot) -> str | None:
    """Empty token slots in a pool that is full of them."""
    held = sum(pool.slots_held(name) for name in pool.streams)
    empty = 1 - _share(sum(s.slots_used for s in pool.streams.values()), held) if held else 0.0
    used = _share(pool.blocks_in_use, pool.n_blocks)
    if empty > rule.limits[0] and used > rule.limits[1]:
        return f"{percent(empty)} of the held token slots are empty at {percent(used)} in use"
    return None


def old_owner(rule: Rule, scene: Scene) -> Iterator[Finding]:
    """Owners that are too old; but what an idle server keeps by accident is no leak."""
    for (process, name), track in scene.tracks.pools.items():
        age_s = track.now.oldest_owner_age_s
        if age_s > rule.limits[0] and not _idles(scene.tracks.processes[process]):
            yield Finding(process, name, f"an owner has held blocks for {duration(age_s)}")


def _idles(track: Track[ProcessSnapshot]) -> bool:
    """Whether it is a watched program without a request for as long as it was watched."""
    programs = [point.snapshot.program for point in track.points]
    counts = [n for p in programs if p is not None for n in p.active_requests.values()]
    return bool(counts) and not any(counts)


def imbalance(rule: Rule, scene: Scene) -> Iterator[Finding]:
    """Stranded allocations, while the emptiest stream has room on average."""
    for finding in increases(_stranded, "allocations failed")(rule, scene):
        track = scene.tracks.pools[finding.process, finding.pool]
        pools = [p.snapshot for p in track.window(scene.now.at_s, rule.window_s).points]
        free = max(
            sum(pool.streams[name].free for pool in pools if name in pool.streams) / len(pools)
            for name in track.now.streams
        )
        if free > rule.limits[1] * track.now.n_blocks:
            yield finding


def over_budget(rule: Rule, scene: Scene) -> Iterator[Finding]:
    """The caches of a watched program against the pool that they are charged to."""
    for name, track in scene.tracks.processes.items():
        if track.now.program is None or track.now.program.account is None:
            continue
        account = track.now.program.account
        n = track.window(scene.now.at_s, rule.window_s).rise(_uncharged)
        if account.excess_blocks > rule.limits[0] or n > rule.limits[1]:
            text = f"{account.excess_blocks:,} blocks beyond the pool, {n:,.0f} more in "
            yield Finding(name, account.pool, text + duration(rule.window_s))


def _uncharged(process: ProcessSnapshot) -> int:
    account = process.program.account if process.program is not None else None
    return account.excess_blocks_total if account is not None else 0


def sustained(rule: Rule, scene: Scene) -> Iterator[Finding]:
    """The share of allocations that fail."""
    for (process, name), track in scene.tracks.pools.items():
        window = track.window(scene.now.at_s, rule.window_s)
        failed = window.rise(lambda pool: pool.n_exhausted)
        asked = window.rise(
            lambda pool: sum(stream.allocate_requests for stream in pool.streams.values())
        )
        if asked and failed / asked > rule.limits[0]:
            yield Finding(process, name, f"{percent(failed / asked)} of the allocations fail")


def near_limit(rule: Rule, _scene: Scene, process: ProcessSnapshot) -> str | None:
    """Active and cached memory of MLX against the device's limit."""
    parts = (process.mlx_active_bytes, process.mlx_cache_bytes, process.mlx_limit_bytes)
    active, cache, limit = parts
    if active is None or cache is None or not limit:
        return None
    share = (active + cache) / limit
    return f"MLX at {percent(share)} of the device's limit" if share > rule.limits[0] else None


def thread_dead(_rule: Rule, _scene: Scene, process: ProcessSnapshot) -> str | None:
    """A server whose generation thread has ended."""
    dead = process.program is not None and process.program.generation_thread_alive is False
    return "the generation thread has ended: requests are taken and not answered" if dead else None


def stale(rule: Rule, scene: Scene, process: ProcessSnapshot) -> str | None:
    """A snapshot that is too old."""
    age_s = scene.now.wall_s - process.wall_s
    return f"its newest snapshot is {duration(age_s)} old" if age_s > rule.limits[0] else None


def overhead(rule: Rule, scene: Scene, process: ProcessSnapshot) -> str | None:
    """The share of a core that telemetry takes."""
    track = scene.tracks.processes[process.process].window(scene.now.at_s, rule.window_s)
    share = _share(track.rise(lambda p: p.overhead_s), track.seconds)
    return f"telemetry takes {percent(share)} of a core" if share > rule.limits[0] else None


def down(rule: Rule, scene: Scene) -> Iterator[Finding]:
    """Processes whose snapshot cannot be had."""
    for process, up in scene.now.reading.up.items():
        if up == rule.limits[0]:
            yield Finding(process, "", "its snapshot cannot be had: it died, or cannot be read")


def errors(rule: Rule, scene: Scene) -> Iterator[Finding]:
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


def exhausted(pool: PoolSnapshot) -> dict[str, int]:
    """Failed allocations."""
    return {"": pool.n_exhausted}


def _stranded(pool: PoolSnapshot) -> dict[str, int]:
    return {f"stream {name}": s.exhausted.get("stranded", 0) for name, s in pool.streams.items()}


def rejected(pool: PoolSnapshot) -> dict[str, int]:
    """Refused blocks by reason; a stale handle is no bug of the pool's users."""
    return {reason: n for reason, n in pool.rejected.items() if reason != "stale"}


def violations(pool: PoolSnapshot) -> dict[str, int]:
    """Broken invariants by check."""
    return dict(pool.invariant_violations)


def durations(pool: PoolSnapshot) -> dict[str, HistogramSnapshot]:
    """Times of calls by operation."""
    return dict(pool.durations)


def lock_wait(pool: PoolSnapshot) -> dict[str, HistogramSnapshot]:
    """Waits for the lock."""
    return {"lock wait": pool.lock_wait}
