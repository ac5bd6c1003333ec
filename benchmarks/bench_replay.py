"""Replay: what production did, done again by today's allocator and by its frozen twin, by turns.

The traces in `benchmarks/traces` were recorded through generation by mlx-lm (`traces/record.py`). Every
round checks nothing, but before it the whole trace is compared with the recording, call by call. The
figure to read is the ratio to the twin in `extra_info`: the machine does to both what it does.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.guard.twin import block_pool as twin
from veloxquant_exporters.replay.check import disagreement
from veloxquant_exporters.replay.timing import Round, quiet_collector, replay_round, summarize
from veloxquant_mlx.memory.pool_config import PoolConfig
from veloxquant_mlx.telemetry.trace import load_trace

TRACES = sorted((Path(__file__).resolve().parent / "traces").glob("*.vqtrace"))
ROUNDS = 9


class ReplayClock:
    """A timer that only moves when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        """Now."""
        return self.now


CLOCK = ReplayClock()


def make_twin(config: PoolConfig) -> Any:
    """The allocator as it was frozen, with the same settings."""
    return twin.BlockPoolAllocator(twin.PoolConfig(**asdict(config)))


def advance(seconds: float) -> None:
    """Let time pass for pytest-benchmark: what was measured is given to its tables."""
    CLOCK.now += seconds


def middle_ns(one: Round) -> float:
    """Of all calls of a round the median, which no other process can move far."""
    return float(np.median(np.concatenate([np.asarray(took) for took in one.took_ns.values()])))


@pytest.mark.benchmark(group="replay", timer=CLOCK)
@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.stem)
def test_replay(benchmark: Any, path: Path) -> None:
    """Nanoseconds a call of a recorded trace."""
    trace = load_trace(path)
    assert disagreement(trace) is None
    ours: list[Round] = []
    ratios: list[float] = []
    with quiet_collector():
        for turn in range(ROUNDS + 1):
            if turn % 2:
                beside = replay_round(trace, make=make_twin)
                one = replay_round(trace)
            else:
                one = replay_round(trace)
                beside = replay_round(trace, make=make_twin)
            if turn:
                ours.append(one)
                ratios.append(middle_ns(one) / middle_ns(beside))
    timings = summarize(ours)
    seconds = iter([sum(map(sum, one.took_ns.values())) / 1e9 for one in ours])
    benchmark.extra_info.update(
        calls=trace.n_calls,
        n_blocks=round(int(trace.blocks.sum()) / trace.n_calls),
        ratio_to_twin=round(float(np.median(ratios)), 3),
        **{f"ns_{name}": round(timing.ns) for name, timing in timings.items()},
    )
    benchmark.pedantic(lambda: advance(next(seconds)), rounds=ROUNDS)
    ratio, noise = benchmark.extra_info["ratio_to_twin"], max(ratios) - min(ratios)
    ns = timings["all"].ns
    print(f"\n{path.stem}: {ns:.0f} ns a call, {ratio} times its twin's, spread {noise:.2f}")
