"""Benchmark pages: what CI publishes of its runs, as the node exporter's textfile has it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

from prometheus_client.parser import text_string_to_metric_families

from benchmarks.guard.publish import ratios_of, samples_of, textfile
from dashboards.drill.stage import Stage

__all__ = ["regressed_page"]

SIZES: Final = (1024, 4096, 16384, 65536)
BASE_S: Final = {"free_all": 9e-7, "allocate": 4e-5, "grow_one": 7e-7}


def regressed_page(stage: Stage, at_s: float) -> Callable[[], Iterable[Any]]:
    """The newest run, compared with its base; from `at_s` on that of a commit that slows free_all."""
    pages = [_page(free_all=1.01), _page(free_all=1.52)]

    def collect() -> Iterable[Any]:
        is_slow = stage.now_s >= at_s
        ran_s = at_s if is_slow else 0.0
        return list(text_string_to_metric_families(pages[is_slow](ran_s)))

    return collect


def _page(free_all: float) -> Callable[[float], str]:
    slower = {"free_all": free_all, "allocate": 0.98, "grow_one": 1.02}

    def page(ran_s: float) -> str:
        run = {
            "created_s": ran_s,
            "benchmarks": {
                name: {"status": "pass", "times": _times(seconds * slower[name])}
                for name, seconds in BASE_S.items()
            },
        }
        compared = {"ratios": {name: {"ratio": ratio} for name, ratio in slower.items()}}
        return textfile([*samples_of(run), *ratios_of(compared)])

    return page


def _times(seconds: float) -> dict[str, list[float]]:
    return {
        "sizes": list(SIZES),
        "target_s": [seconds * (1 + 0.02 * n) for n in range(len(SIZES))],
        "median_s": [seconds * (1.1 + 0.02 * n) for n in range(len(SIZES))],
    }
