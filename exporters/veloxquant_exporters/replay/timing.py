"""Timing: nanoseconds a call, by operation, of a trace that is replayed."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from veloxquant_exporters.replay.driver import Driver
from veloxquant_mlx.memory.block_pool import BlockPoolAllocator

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from veloxquant_mlx.memory.pool_config import PoolConfig
    from veloxquant_mlx.telemetry.trace import Trace

__all__ = ["TIMED", "Round", "Timing", "replay_round", "summarize"]

TIMED: Final = ("allocate", "allocate_kv", "free", "free_all", "shrink")


@dataclass(frozen=True, slots=True)
class Round:
    """One replay of a whole trace.

    Attributes:
        took_ns: By operation of each call, failed ones too, with what reading the clock costs.
        late_ns: How far behind the recording the latest call was; 0 at full speed.
    """

    took_ns: dict[str, array[int]]
    late_ns: int = 0


@dataclass(frozen=True, slots=True)
class Timing:
    """An operation over several rounds.

    Attributes:
        calls: In a round.
        ns: Nanoseconds a call: of each call the median over the rounds, of these the mean. So a
            round in which the machine did something else for a while does not count.
        noise: Largest less least of the rounds' own medians, over the middle one; NaN of one round.
    """

    calls: int
    ns: float
    noise: float


def replay_round(
    trace: Trace,
    *,
    real: bool = False,
    make: Callable[[PoolConfig], BlockPoolAllocator] = BlockPoolAllocator,
    progress: Callable[[int], None] | None = None,
) -> Round:
    """Do every call of a trace, timing each call on the allocator by itself.

    Args:
        trace: Loaded by `load_trace`.
        real: Wait for each call until it was made in the recording; otherwise none waits.
        make: What makes the pool.
        progress: Told the number of calls done, now and then.

    Raises:
        TraceError: The trace cannot be replayed.
    """
    driver = Driver(trace, make=make)
    clocked = _Clocked(driver.pool)
    driver.pool = clocked  # type: ignore[assignment]
    times = trace.at_ns[trace.first_row[:-1]].tolist() if real else []
    began, late = time.perf_counter_ns(), 0
    for call in range(driver.n_calls):
        if real:
            late = max(late, _wait_until(began + times[call]))
        driver.step(call)
        if progress is not None and not call % 4096:
            progress(call)
    return Round({name: took for name, took in clocked.took_ns.items() if took}, late)


def summarize(rounds: list[Round]) -> dict[str, Timing]:
    """By operation, and "all"; what reading the clock costs is taken off."""
    cost = _clock_cost_ns()
    found: dict[str, Timing] = {}
    every: list[NDArray[np.int64]] = []
    for name in TIMED:
        if name in rounds[0].took_ns:
            times = np.array([one.took_ns[name] for one in rounds], np.int64)
            every.append(times)
            found[name] = _timing(times, cost)
    if every:
        found["all"] = _timing(np.concatenate(every, axis=1), cost)
    return found


def _timing(times: NDArray[np.int64], cost_ns: float) -> Timing:
    """Of an array of shape (rounds, calls)."""
    ns = max(0.0, float(np.median(times, axis=0).mean()) - cost_ns)
    middles = np.maximum(1.0, np.median(times, axis=1) - cost_ns)
    noise = float((middles.max() - middles.min()) / np.median(middles))
    return Timing(times.shape[1], ns, noise if len(middles) > 1 else float("nan"))


class _Clocked:
    """A pool, its calls timed. Everything else is the pool's own."""

    def __init__(self, pool: BlockPoolAllocator) -> None:
        self._pool = pool
        self.took_ns = {name: array("q") for name in TIMED}
        for name in TIMED:
            setattr(self, name, self._timed(name, getattr(pool, name)))

    def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        clock, put = time.perf_counter_ns, self.took_ns[name].append

        def timed(*args: Any) -> Any:
            began = clock()
            try:
                return call(*args)
            finally:
                put(clock() - began)

        return timed

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)


def _clock_cost_ns(n: int = 10_000) -> float:
    """What reading the clock twice adds to what it measures."""
    clock, took = time.perf_counter_ns, []
    for _ in range(n):
        began = clock()
        took.append(clock() - began)
    return median(took)


def _wait_until(due_ns: int) -> int:
    """Wait, and return by how much it was too late then."""
    left = due_ns - time.perf_counter_ns()
    if left > 0:
        time.sleep(left / 1e9)
    return max(0, time.perf_counter_ns() - due_ns)


@contextmanager
def quiet_collector() -> Iterator[None]:
    """No garbage collection while something is timed."""
    import gc

    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
