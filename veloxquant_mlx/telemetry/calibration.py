"""Calibration: what a hook costs on this machine, for the telemetry's account of itself."""

from __future__ import annotations

from collections import deque
from functools import cache
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, Final

from veloxquant_mlx.memory.hot_path import FP16
from veloxquant_mlx.telemetry.slots import make_hooks

if TYPE_CHECKING:
    from collections.abc import Callable

    from veloxquant_mlx.memory.journal import Entry

__all__ = ["hook_cost_ns"]

ROUNDS: Final = 7
CALLS: Final = 200


class _Fp16:
    """What a hook looks at in a lease."""

    _format = FP16


@cache
def hook_cost_ns() -> float:
    """Nanoseconds that an unsampled hook adds to a call; measured once a process, in half a ms.

    Timing every call would cost more than the hook, so the overhead counter estimates them by this.
    """
    log: deque[Entry] = deque(maxlen=256)
    nothing: Callable[..., None] = lambda *_: None  # noqa: E731 - a stand-in
    hooks = make_hooks("allocate", log.append, nothing, nothing, {"hook": 0})
    hooks.slot.schedule(1 << 29)
    entry: Any = (0, 1, _Fp16, 1, 1, 1, ())
    return max(0.0, _fastest_ns(hooks.plain, entry) - _fastest_ns(log.append, entry))


def _fastest_ns(call: Callable[[Any], None], entry: Any) -> float:
    """The least of several rounds: what disturbs a round only ever adds."""
    best = float("inf")
    for _ in range(ROUNDS):
        began = perf_counter_ns()
        for _ in range(CALLS):
            call(entry)
        best = min(best, (perf_counter_ns() - began) / CALLS)
    return best
