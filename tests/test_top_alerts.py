"""vqmon top: the alerts that would fire, held against the rules they are taken from."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.top_help import at, exhaust, snapshot, watched
from veloxquant_exporters.top.board import AlertView
from veloxquant_exporters.top.boards import BoardMaker
from veloxquant_exporters.top.history import Moment
from veloxquant_exporters.top.rule import Rule
from veloxquant_exporters.top.rules import HALF_JUDGED, NOT_JUDGED, RULES
from veloxquant_mlx.core.exceptions import BlockPoolExhaustedError
from veloxquant_mlx.memory.block_pool import BlockPoolAllocator
from veloxquant_mlx.telemetry.process import ProcessSnapshot
from veloxquant_mlx.telemetry.program import AccountSnapshot, ProgramSnapshot

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).resolve().parent.parent
ALERTS = ROOT / "dashboards" / "alerts"


def yaml_rules() -> dict[str, dict[str, Any]]:
    """The alerts of alerts.yaml by name; their expressions with the records written out."""
    records, alerts = {}, {}
    for name in ("records.yaml", "alerts.yaml"):
        for group in yaml.safe_load((ALERTS / name).read_text("utf-8"))["groups"]:
            for rule in group["rules"]:
                if "record" in rule:
                    records[rule["record"]] = rule["expr"]
                else:
                    alerts[rule["alert"]] = rule
    for rule in alerts.values():
        for record, expr in records.items():
            rule["expr"] = rule["expr"].replace(record, f"({expr})")
    return alerts


def seconds(text: str) -> float:
    """Of a duration as in 5m."""
    return float(text[:-1]) * {"s": 1, "m": 60, "h": 3600}[text[-1]]


def look(*moments: Moment) -> tuple[AlertView, ...]:
    """The alerts after all of them."""
    maker = BoardMaker("made up")
    return [maker.add(moment) for moment in moments][-1].alerts


def names(*moments: Moment) -> list[str]:
    """Their names."""
    return [alert.name for alert in look(*moments)]


@pytest.fixture
def pool() -> Iterator[BlockPoolAllocator]:
    """A watched pool of 64 blocks of 16 tokens in two streams, which does not grow."""
    with watched("alarmed", n_blocks=64, separate_kv=True) as found:
        yield found


def now() -> ProcessSnapshot:
    """That pool's process now."""
    return snapshot("alarmed", process="w")


# -- the table -----------------------------------------------------------------------------------


def test_every_rule_is_judged_or_said_not_to_be() -> None:
    """None is forgotten, none is made up, and none is both."""
    judged = [rule.name for rule in RULES]
    assert len(set(judged)) == len(judged)
    assert sorted([*judged, *NOT_JUDGED]) == sorted(yaml_rules())
    assert HALF_JUDGED.keys() <= set(judged)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_a_rule_is_as_prometheus_has_it(rule: Rule) -> None:
    """Severity, duration, runbook, window and thresholds."""
    wanted = yaml_rules()[rule.name]
    assert wanted["labels"]["severity"] == rule.severity
    assert seconds(wanted.get("for", "0s")) == rule.for_s
    assert wanted["annotations"]["runbook_url"] == f"RUNBOOKS/{rule.runbook}"
    assert (ROOT / "docs" / "runbooks" / rule.runbook).is_file()
    # That which a division needs, not to divide by 0, is no threshold.
    expr = wanted["expr"].replace(" > 0)", ")")
    limits = tuple(float(n) for n in re.findall(r"(?:>|==)\s+(\d+(?:\.\d+)?)", expr))
    if rule.name in HALF_JUDGED:
        limits = limits[: len(rule.limits)]
    assert limits == rule.limits
    if rule.window_s:
        assert {seconds(text) for text in re.findall(r"\[(\w+)\]", wanted["expr"])} == {
            rule.window_s
        }
    elif rule.name not in HALF_JUDGED:
        assert "[" not in wanted["expr"]


# -- each condition ------------------------------------------------------------------------------


def test_a_quiet_pool_raises_no_alert(pool: BlockPoolAllocator) -> None:
    """Half full, freed and allocated."""
    pool.allocate_kv(160, 1)
    first = at(0, now())
    pool.free_all(1)
    pool.allocate_kv(160, 2)
    assert names(first, at(60, now()), at(120, now())) == []


def test_exhaustion_is_an_increase_not_a_count(pool: BlockPoolAllocator) -> None:
    """What failed before top began is not news; what fails now is, for five minutes."""
    exhaust(pool)
    first = at(0, now())
    assert names(first) == []
    pool.allocate("k", 16, 1)
    exhaust(pool, times=2)
    second = at(10, now())
    alerts = {alert.name: alert for alert in look(first, second)}
    assert alerts.keys() == {
        "VeloxQuantPoolExhausted",
        "VeloxQuantPoolExhaustionSustained",
    }
    found = alerts["VeloxQuantPoolExhausted"]
    assert (found.process, found.pool, found.state) == ("w", "alarmed", "pending")
    assert found.detail == "2 allocations failed in 5m"
    assert names(first, second, *(at(float(s), now()) for s in range(20, 400, 20))) == []


def test_an_alert_fires_once_it_has_held(pool: BlockPoolAllocator) -> None:
    """Pending until its time is over, and pending anew after a gap."""
    maker = BoardMaker("made up")
    maker.add(at(0, now()))
    states = []
    for step in range(1, 20):
        exhaust(pool)
        (found,) = (
            alert
            for alert in maker.add(at(step * 10.0, now())).alerts
            if alert.name == "VeloxQuantPoolExhausted"
        )
        states.append((found.held_s, found.state))
    assert states[0] == (0.0, "pending")
    assert [state for held_s, state in states if held_s >= 120] == ["firing"] * 7
    assert {state for held_s, state in states if held_s < 120} == {"pending"}
    for step in range(1, 40):
        board = maker.add(at(190.0 + step * 10, now()))
    assert board.alerts == ()
    exhaust(pool)
    again = maker.add(at(600.0, now())).alerts
    assert {(alert.held_s, alert.state) for alert in again} == {(0.0, "pending")}


def test_near_capacity_is_of_a_pool_that_cannot_grow(pool: BlockPoolAllocator) -> None:
    """Nine tenths in use, and no more blocks to come."""
    pool.allocate_kv(16 * 30, 1)
    assert "VeloxQuantPoolNearCapacity" in names(at(0, now()))
    with watched("grows", n_blocks=8, grow_on_exhaustion=True, max_blocks=64) as other:
        other.allocate_kv(16 * 4, 1)
        assert "VeloxQuantPoolNearCapacity" not in names(at(0, snapshot("grows")))


def test_a_stranded_stream_is_told(pool: BlockPoolAllocator) -> None:
    """k is full while v has room for the request: the split is wrong, not the size."""
    pool.allocate("k", 16 * 32, 1)
    first = at(0, now())
    exhaust(pool, "k")
    pool.free_all(1)
    pool.allocate("k", 16 * 31, 1)
    with pytest.raises(BlockPoolExhaustedError):
        pool.allocate("k", 32, 2)
    found = {alert.name: alert for alert in look(first, at(5, now()))}
    assert found["VeloxQuantPoolStreamImbalance"].detail == "1 allocations failed (stream k) in 10m"


def test_two_full_streams_are_no_imbalance(pool: BlockPoolAllocator) -> None:
    """Of two full ones, one always has a few blocks more."""
    pool.allocate_kv(16 * 31, 1)
    pool.allocate("k", 16, 1)
    first = at(0, now())
    with pytest.raises(BlockPoolExhaustedError):
        pool.allocate("k", 16, 2)
    found = names(first, at(5, now()))
    assert "VeloxQuantPoolExhausted" in found
    assert "VeloxQuantPoolStreamImbalance" not in found


def test_an_old_owner_is_a_leak() -> None:
    """Older than an hour; the age is the pool's own."""
    with watched("alarmed", n_blocks=64) as pool:
        pool.allocate("k", 16, 1)
        found = now()
    old = replace(found, pools=(replace(found.pools[0], oldest_owner_age_s=3601.0),))
    assert names(at(0, old)) == ["VeloxQuantPoolBlockLeak"]
    young = replace(found, pools=(replace(found.pools[0], oldest_owner_age_s=3600.0),))
    assert names(at(0, young)) == []


def serving(
    found: ProcessSnapshot, active: int, excess: int = 0, total: int = 0
) -> ProcessSnapshot:
    """That process as a watched program with so many requests, and caches beyond its pool."""
    account = AccountSnapshot(pool="alarmed", excess_blocks=excess, excess_blocks_total=total)
    return replace(
        found, program=ProgramSnapshot(active_requests={"decode": active}, account=account)
    )


def test_what_an_idle_server_keeps_is_no_leak() -> None:
    """It is, once a request was seen."""
    with watched("alarmed", n_blocks=64) as pool:
        pool.allocate("k", 16, 1)
        found = now()
    old = replace(found, pools=(replace(found.pools[0], oldest_owner_age_s=3601.0),))
    idle, busy = serving(old, 0), serving(old, 1)
    assert names(at(0, idle), at(5, idle)) == []
    assert names(at(0, busy), at(5, idle)) == ["VeloxQuantPoolBlockLeak"]


def test_caches_beyond_their_pool_are_told(pool: BlockPoolAllocator) -> None:
    """While there are some, and for five minutes after they rose."""
    found = now()
    before, over, after = serving(found, 1), serving(found, 1, 3, 7), serving(found, 1, 0, 7)
    assert names(at(0, before)) == []
    (alert,) = look(at(0, before), at(5, over))
    assert (alert.name, alert.pool) == ("VeloxQuantPoolOverBudget", "alarmed")
    assert alert.detail == "3 blocks beyond the pool, 7 more in 5m"
    assert names(at(0, before), at(5, after)) == ["VeloxQuantPoolOverBudget"]
    assert names(at(0, before), at(5, over), *(at(s, after) for s in range(100, 400, 50))) == []


def test_a_dead_generation_thread_is_told(pool: BlockPoolAllocator) -> None:
    """While it is dead; a program that has none is no server."""
    found = now()
    for alive, said in (
        (None, []),
        (True, []),
        (False, ["VeloxQuantGenerationThreadDead"]),
    ):
        program = ProgramSnapshot(generation_thread_alive=alive)
        assert names(at(0, replace(found, program=program))) == said


def test_a_double_free_is_told_at_once_by_reason(pool: BlockPoolAllocator) -> None:
    """From the first one on; a stale handle is not meant."""
    blocks = pool.allocate("k", 32, 1)
    first = at(0, now())
    pool.free(blocks)
    pool.free(blocks)
    (found,) = look(first, at(1, now()))
    assert (found.name, found.severity) == ("VeloxQuantPoolDoubleFree", "warning")
    assert found.detail.startswith("2 blocks refused (free)")


def test_empty_slots_matter_in_a_full_pool(pool: BlockPoolAllocator) -> None:
    """Waste is told where three quarters are held, and not where a quarter is."""
    pool.allocate_kv(16 * 8, 1, n_filled=8)
    assert names(at(0, now())) == []
    pool.allocate_kv(16 * 16, 2, n_filled=8)
    assert names(at(0, now())) == ["VeloxQuantPoolTokenSlotWaste"]


def slowed(found: ProcessSnapshot, n: int, place: int) -> ProcessSnapshot:
    """With `n` more calls of free_all and waits for the lock in the bucket `place`."""
    pool = found.pools[0]

    def more(histogram: Any) -> Any:
        counts = list(histogram.counts)
        counts[place] += n
        return replace(histogram, counts=tuple(counts))

    durations = {**pool.durations, "free_all": more(pool.durations["free_all"])}
    changed = replace(pool, durations=durations, lock_wait=more(pool.lock_wait))
    return replace(found, pools=(changed,))


def test_slow_calls_and_waits_are_told(pool: BlockPoolAllocator) -> None:
    """By operation, of the last five minutes alone."""
    pool.allocate("k", 16, 1)
    found = now()
    bounds = found.pools[0].durations["free_all"].bounds
    place = bounds.index(0.0025)
    alerts = look(at(0, found), at(10, slowed(found, 5, place)))
    assert [alert.name for alert in alerts] == [
        "VeloxQuantPoolLockContention",
        "VeloxQuantPoolOperationSlow",
    ]
    assert alerts[1].detail.startswith("free_all p99 2.5ms")
    fast = bounds.index(0.0005)
    assert names(at(0, found), at(10, slowed(found, 5, fast))) == []


def test_memory_near_the_limit_is_active_and_cache() -> None:
    """Never the peak; and nothing is said where there is no limit."""
    with watched("alarmed", n_blocks=8):
        found = now()
    full: dict[str, Any] = {"mlx_active_bytes": 60, "mlx_cache_bytes": 31, "mlx_peak_bytes": 999}
    assert names(at(0, replace(found, **full, mlx_limit_bytes=100))) == [
        "VeloxQuantMlxMemoryNearLimit"
    ]
    assert names(at(0, replace(found, **full, mlx_limit_bytes=102))) == []
    assert names(at(0, replace(found, **full, mlx_limit_bytes=None))) == []


def test_a_dead_worker_is_told(pool: BlockPoolAllocator) -> None:
    """It has no pools any more, and that is the news."""
    (found,) = look(at(0, now(), up={"w": 1, "gone": 0}))
    assert (found.name, found.process, found.pool) == ("VeloxQuantWorkerDown", "gone", "")
    assert found.severity == "critical"


def test_old_metrics_are_told(pool: BlockPoolAllocator) -> None:
    """A snapshot older than the rule allows, and not one that is just as old."""
    (limit_s,) = next(rule.limits for rule in RULES if rule.name == "VeloxQuantMetricsStale")
    first = at(0, now())
    old = Moment(100.0, first.wall_s + limit_s + 1, first.reading)
    assert names(first, old) == ["VeloxQuantMetricsStale"]
    assert names(first, Moment(100.0, first.wall_s + limit_s, first.reading)) == []


def test_failures_of_telemetry_are_told_by_reason(pool: BlockPoolAllocator) -> None:
    """Of a process, and of who reads its files."""
    found = now()
    failed = replace(found, errors={**found.errors, "hook": found.errors.get("hook", 0) + 2})
    alerts = look(at(0, found, errors={"io": 1}), at(5, failed, errors={"io": 4}))
    assert [(alert.name, alert.process) for alert in alerts] == [
        ("VeloxQuantTelemetryErrors", ""),
        ("VeloxQuantTelemetryErrors", "w"),
    ]
    assert "3 failures (io)" in alerts[0].detail
    assert "2 failures (hook)" in alerts[1].detail


def test_costly_telemetry_is_told(pool: BlockPoolAllocator) -> None:
    """More than two hundredths of a core."""
    found = now()
    costly = replace(found, overhead_s=found.overhead_s + 0.3)
    assert names(at(0, found), at(10, costly)) == ["VeloxQuantTelemetryOverhead"]
    assert names(at(0, found), at(20, costly)) == []


def test_a_broken_invariant_is_the_gravest(pool: BlockPoolAllocator) -> None:
    """Critical ones come first."""
    found = now()
    inner = found.pools[0]
    broken = replace(
        inner,
        invariant_violations={check: n + 1 for check, n in inner.invariant_violations.items()},
        oldest_owner_age_s=7200.0,
    )
    alerts = look(at(0, found), at(10, replace(found, pools=(broken,))))
    assert alerts[0].name == "VeloxQuantPoolInvariantViolated"
    assert alerts[-1].name == "VeloxQuantPoolBlockLeak"
