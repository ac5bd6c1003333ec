"""Pools, as the snapshot files tell of them: settings that will bite, and incidents counted so far."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from veloxquant_exporters.doctor.settings import Settings
from veloxquant_exporters.findings import Finding, printable

if TYPE_CHECKING:
    from veloxquant_mlx.telemetry import PoolSnapshot, ProcessSnapshot

__all__ = ["find", "unbounded"]


def find(settings: Settings) -> Iterator[Finding]:
    """The findings; see `checks`."""
    from veloxquant_exporters.sidecar.check import check_directory

    assert settings.snapshot_dir is not None
    n_pools = 0
    report = check_directory(settings.snapshot_dir)
    if report.fault:
        return  # as is said of the folder
    for checked in report.files:
        if checked.file is None:
            continue
        process = checked.file.header.process
        n_pools += len(checked.file.snapshot.pools)
        for pool in checked.file.snapshot.pools:
            yield from _of_pool(pool, printable(f"pool {pool.name!r} of {process!r}"))
        yield from _of_process(checked.file.snapshot, printable(process))
    if not n_pools:
        yield Finding(
            "note",
            "no pool is published",
            "none is watched, or no process publishes",
            "in the server: instrument(pool), or VELOXQUANT_INSTRUMENT=1",
        )
    else:
        yield Finding("ok", f"looked at {n_pools} pool{'s' if n_pools > 1 else ''}")


def unbounded(who: str) -> Finding:
    """The finding on a pool that may grow without end."""
    return Finding(
        "warning",
        f"{who} may grow without a bound",
        "its growth is unbounded (max_blocks none): load that nobody sheds ends in an out-of-memory "
        "abort, and no alert can say when",
        "PoolConfig(..., grow_on_exhaustion=True, max_blocks=N)",
    )


def _of_pool(pool: PoolSnapshot, who: str) -> Iterator[Finding]:
    if pool.n_pools > 1:
        yield Finding(
            "note",
            f"{pool.n_pools} pools are summed as {who}",
            "no more than 64 are told apart",
            "make fewer pools, or watch those that matter: instrument(pool, name=...)",
        )
        return
    if pool.grow_on_exhaustion and pool.max_blocks is None:
        yield unbounded(who)
    for name, stream in pool.streams.items():
        if not stream.managed:
            yield Finding(
                "note" if pool.grow_on_exhaustion else "problem",
                f"{who}: stream {name} has none of its {pool.n_blocks} blocks",
                "every allocation from it "
                + ("makes the pool grow first" if pool.grow_on_exhaustion else "fails"),
                "PoolConfig(n_blocks=2 or more), or separate_kv=False",
            )
    if broken := sum(pool.invariant_violations.values()):
        yield Finding(
            "problem",
            f"{who}: the self-check found its books broken {broken} times",
            "its figures cannot be trusted",
            "restart the worker and report it: docs/runbooks/double-free-and-invariants.md",
        )
    if pool.n_exhausted:
        yield Finding(
            "note",
            f"{who}: {pool.n_exhausted:,} allocations failed for want of blocks so far",
            "",
            "docs/runbooks/pool-exhausted.md",
        )


def _of_process(process: ProcessSnapshot, who: str) -> Iterator[Finding]:
    failed = {reason: n for reason, n in process.errors.items() if n}
    if failed:
        reasons = ", ".join(f"{printable(reason)} {n}" for reason, n in failed.items())
        yield Finding(
            "warning",
            f"the telemetry of {who} failed at times: {reasons}",
            "some figures are missing or old; the serving code never sees it",
            "the log of the process says why, once a reason",
        )
