"""Series: what was scraped, in promtool's notation and as OpenMetrics."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Final

__all__ = ["Key", "Series", "notation"]

# Name, then labels by name.
Key = tuple[str, tuple[tuple[str, str], ...]]
# A scrape in which a series had no sample; and the first one of those, as Prometheus marks it.
MISSING: Final = None
_WALL_CLOCK: Final = "_timestamp_seconds"


@dataclass
class Series:
    """Samples of scrapes at equal distance, the first at 0.

    Attributes:
        interval_s: Seconds between scrapes.
        n_scrapes: So far.
        kinds: Prometheus type and help text by family name.
    """

    interval_s: int
    n_scrapes: int = 0
    kinds: dict[str, tuple[str, str]] = field(default_factory=dict)
    _values: dict[Key, list[float | None]] = field(default_factory=dict)

    def add(self, page: Mapping[Key, float]) -> None:
        """The samples of one scrape of everything."""
        n = self.n_scrapes
        for key, value in page.items():
            values = self._values.get(key)
            if values is None:
                values = self._values[key] = []
            if len(values) < n:
                values += [MISSING] * (n - len(values))
            values.append(value)
        self.n_scrapes += 1

    def __iter__(self) -> Iterator[tuple[Key, Sequence[float | None]]]:
        return iter(self._values.items())

    def names(self) -> set[str]:
        """Metric names."""
        return {name for name, _ in self._values}

    def for_promtool(self, names: Collection[str]) -> Iterator[tuple[str, str]]:
        """Series of `names` and their values, as promtool's input_series wants them."""
        for (name, labels), values in sorted(self._values.items()):
            if name in names:
                padded = [*values, *[MISSING] * (self.n_scrapes - len(values))]
                yield f"{name}{braces(labels)}", notation(padded)

    def openmetrics(self, end_s: float) -> Iterator[str]:
        """Lines of an OpenMetrics file, the last scrape at `end_s` since the epoch."""
        begin_s = end_s - (self.n_scrapes - 1) * self.interval_s
        for family, keys in groupby(sorted(self._values, key=self._by_family), key=self._family):
            kind, text = self.kinds.get(family, ("gauge", ""))
            yield f"# HELP {family} {_escaped(text)}\n# TYPE {family} {kind}\n"
            for key in keys:
                yield from self._lines(key, begin_s)
        yield "# EOF\n"

    # -- inside ---------------------------------------------------------------------------------

    def _family(self, key: Key) -> str:
        name = key[0]
        for end in ("", "_total", "_bucket", "_count", "_sum"):
            if name.endswith(end) and name.removesuffix(end) in self.kinds:
                return name.removesuffix(end)
        return name

    def _by_family(self, key: Key) -> tuple[object, ...]:
        """Families together; in a histogram the labels but `le`, then what the format asks for."""
        name, labels = key
        rest = tuple(pair for pair in labels if pair[0] != "le")
        bound = dict(labels).get("le")
        part = name.removeprefix(self._family(key))
        order = ("_bucket", "_count", "_sum", "", "_total").index(part)
        return self._family(key), rest, order, math.inf if bound is None else float(bound), labels

    def _lines(self, key: Key, begin_s: float) -> Iterator[str]:
        name, labels = key
        head = f"{name}{braces(labels)}"
        shift = begin_s if name.endswith(_WALL_CLOCK) else 0.0
        for n, value in enumerate(self._values[key]):
            if value is not MISSING:
                yield f"{head} {_number(value + shift)} {begin_s + n * self.interval_s:.3f}\n"


def braces(labels: Iterable[tuple[str, str]]) -> str:
    """Labels as PromQL writes them."""
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels) + "}"


def notation(values: Sequence[float | None]) -> str:
    """`values` as short as promtool's notation can have them, without a loss.

    A series that ends gets the staleness marker that Prometheus would write.
    """
    parts: list[str] = []
    n = 0
    while n < len(values):
        value = values[n]
        if value is MISSING:
            end = _end_of_gap(values, n)
            gap = end - n
            if n > 0:
                parts.append("stale")
                gap -= 1
            if gap:
                parts.append(f"_x{gap}")
            n = end
            continue
        end, step = _end_of_line(values, n)
        parts.append(_line(value, step, end - n - 1))
        n = end
    return " ".join(parts)


def _end_of_gap(values: Sequence[float | None], n: int) -> int:
    while n < len(values) and values[n] is MISSING:
        n += 1
    return n


def _end_of_line(values: Sequence[float | None], n: int) -> tuple[int, float]:
    """Where the straight line that begins at `n` ends, and its slope; exact, so ints only."""
    first = values[n]
    second = values[n + 1] if n + 1 < len(values) else MISSING
    if first is MISSING or second is MISSING:
        return n + 1, 0.0
    step = second - first
    if step and not (_is_int(first) and _is_int(step)):
        return n + 1, 0.0
    end = n + 1
    while end < len(values) and values[end] == first + step * (end - n):
        end += 1
    # Two samples of any slope are a line; written out, the second may begin a longer one.
    return (n + 1, 0.0) if step and end - n < 3 else (end, step)


def _is_int(value: float) -> bool:
    return math.isfinite(value) and value == int(value) and abs(value) < 2**53


def _line(value: float, step: float, n_more: int) -> str:
    if not n_more:
        return _number(value)
    slope = f"{'-' if step < 0 else '+'}{_number(abs(step))}" if step else ""
    return f"{_number(value)}{slope}x{n_more}"


def _number(value: float) -> str:
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if _is_int(value) else repr(float(value))


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
