"""Stage: where a scenario is acted out. Steps the clock from event to event, and scrapes."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from dashboards.drill.clock import CLOCK
from dashboards.drill.series import Key, Series

__all__ = ["JOB", "Part", "Stage", "Target"]

JOB: Final = "veloxquant"

# A part is played by a generator that yields for how many seconds it sleeps.
Part = Iterator[float]

_Kept = TypeVar("_Kept")


@dataclass(frozen=True, slots=True)
class Target:
    """Something that Prometheus scrapes.

    Attributes:
        collect: Its families now; None where nobody answers.
        instance, job: Labels that Prometheus adds.
    """

    collect: Callable[[], Iterable[Any] | None]
    instance: str
    job: str = JOB


class Stage:
    """Acts out one scenario.

    Args:
        name: Label `instance` of its targets.
        interval_s: Seconds between scrapes.
        seed: Of its chance, with the name.
    """

    def __init__(self, name: str, interval_s: int = 15, seed: str = "") -> None:
        CLOCK.restart_wall()
        self.name = name
        self.random = random.Random(name + seed)  # noqa: S311 - a play, no secret
        self.series = Series(interval_s)
        self.targets: list[Target] = []
        self.problems: list[str] = []  # that the play itself saw
        self._kept = contextlib.ExitStack()
        self._due: list[tuple[float, int, Part]] = []
        self._order = itertools.count()
        self._ids = itertools.count(1)

    @property
    def now_s(self) -> float:
        """Seconds since the beginning."""
        return CLOCK.wall_s()

    def keep(self, resource: contextlib.AbstractContextManager[_Kept]) -> _Kept:
        """Enter `resource` now; `close` leaves it."""
        return self._kept.enter_context(resource)

    def close(self) -> None:
        """Leave what was kept, and let go of the parts: they hold pools."""
        self._kept.close()
        self._due.clear()
        self.targets.clear()

    def fresh_id(self, kind: str = "request") -> str:
        """An id that no other request has."""
        return f"{kind}-{next(self._ids)}"

    def add_target(
        self, collect: Callable[[], Iterable[Any] | None], *, instance: str = "", job: str = JOB
    ) -> None:
        """Have Prometheus scrape it from now on."""
        self.targets.append(Target(collect, instance or self.name, job))

    def play(self, part: Part, after_s: float = 0.0) -> None:
        """Let `part` begin `after_s` seconds from now."""
        heapq.heappush(self._due, (self.now_s + after_s, next(self._order), part))

    def every(self, seconds: float, call: Callable[[], object], after_s: float = 0.0) -> None:
        """Call `call` at equal distances."""
        self.play(_again(seconds, call), after_s)

    def at(self, seconds: float, call: Callable[[], object]) -> None:
        """Call `call` once, at `seconds` since the beginning."""
        self.play(_once(call), max(0.0, seconds - self.now_s))

    def run(self, seconds: float) -> Series:
        """Play until `seconds`, scraping from 0 to then; returns what was scraped."""
        interval_s = self.series.interval_s
        for at_s in range(0, int(seconds) + 1, interval_s):
            self._play_until(float(at_s))
            self._scrape()
        return self.series

    # -- inside ---------------------------------------------------------------------------------

    def _play_until(self, end_s: float) -> None:
        while self._due and self._due[0][0] <= end_s:
            at_s, _, part = heapq.heappop(self._due)
            CLOCK.step_to(at_s)
            sleep_s = next(part, None)
            if sleep_s is not None:
                heapq.heappush(self._due, (at_s + sleep_s, next(self._order), part))
        CLOCK.step_to(end_s)

    def _scrape(self) -> None:
        page: dict[Key, float] = {}
        for target in self.targets:
            own = (("instance", target.instance), ("job", target.job))
            families = target.collect()
            page["up", own] = float(families is not None)
            for family in families or ():
                self.series.kinds.setdefault(family.name, (family.type, family.documentation))
                for sample in family.samples:
                    page[sample.name, (*own, *sorted(sample.labels.items()))] = sample.value
        self.series.add(page)


def _again(seconds: float, call: Callable[[], object]) -> Part:
    while True:
        call()
        yield seconds


def _once(call: Callable[[], object]) -> Part:
    call()
    yield from ()
