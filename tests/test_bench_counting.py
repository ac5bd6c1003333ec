"""The counters: what container operations cost, and how exponents are fitted."""

from __future__ import annotations

import math
import sys
from typing import Any

import pytest

from veloxquant_exporters.bench.counting.charges import HELPERS
from veloxquant_exporters.bench.counting.instructions import BlindCounterError, counted
from veloxquant_exporters.bench.counting.locks import CountedLock
from veloxquant_exporters.bench.counting.meter import METER
from veloxquant_exporters.bench.counting.rewrite import CannotCountError, rewrite
from veloxquant_exporters.bench.fit import doubling, growth, slope

PREPARED = """
import bisect, heapq, itertools, threading
from collections import deque
numbers = list(range(100))
queue = deque(numbers)
table = dict.fromkeys(numbers)
group = set(numbers)
class Box: pass
box = Box()
box.numbers = list(numbers)
def key(): return slice(90, None)
"""

# Statement, elements it touches with 100 in every container.
COSTS = [
    ("99 in numbers", 100),
    ("0 in numbers", 1),
    ("-1 not in numbers", 100),
    ("99 in table", 0),
    ("99 in table.values()", 100),
    ("numbers.remove(0)", 100),
    ("numbers.index(49)", 50),
    ("numbers.pop()", 0),
    ("numbers.pop(0)", 100),
    ("numbers.insert(90, 1)", 10),
    ("numbers.append(numbers)", 0),
    ("numbers.sort()", 700),
    ("sorted(numbers)", 700),
    ("numbers[10:20]", 10),
    ("del numbers[0]", 100),
    ("del numbers[-1]", 1),
    ("del numbers[key()]", 10),
    ("numbers[:0] = [1, 2]", 102),
    ("numbers + numbers", 200),
    ("numbers == list(numbers)", 200),
    ("numbers += [1, 2, 3]", 3),
    ("box.numbers += [1, 2, 3]", 3),
    ("[*numbers]", 100),
    ("{**table}", 100),
    ("first, *rest = numbers", 100),
    ("max(numbers)", 100),
    ("list(map(str, numbers))", 100),
    ("list(itertools.islice(numbers, 5))", 5),
    ("len(numbers); iter(numbers); isinstance(numbers, list)", 0),
    ("heapq.heappush(numbers, 7)", 7),
    ("bisect.insort(numbers, 7)", 107),
    ("queue.popleft()", 0),
    ("queue.remove(3)", 100),
    ("del queue[50]", 50),
    ("group | {1000}", 101),
    ("group.discard(5); table.get(5); table.pop(5)", 0),
    ("table.update(table)", 100),
    ("'-'.join(['a'] * 100)", 200),
]


def run(source: str, names: dict[str, Any]) -> int:
    """Moves of `source`, rewritten, in `names`."""
    METER.reset()
    exec(rewrite(source, "<costs>"), names)
    return METER.moves


@pytest.mark.parametrize(("statement", "moves"), COSTS)
def test_an_operation_pays_for_what_it_touches(statement: str, moves: int) -> None:
    """Scans, moves of a tail, copies and sorts cost their elements; constant work costs nothing."""
    names: dict[str, Any] = dict(HELPERS)
    run(PREPARED, names)
    assert run(statement, names) == moves


def test_rewritten_code_does_the_same() -> None:
    """The helpers change no result, name, default, class or closure."""
    source = """
from __future__ import annotations
from dataclasses import dataclass
from typing import NamedTuple
class Pair(NamedTuple):
    left: list[int] | None
    right: int = 1 + 1
@dataclass(frozen=True, slots=True)
class Base:
    __hidden = [3, 4]
    value: int = 5
    def sum(self, more=[*range(3)]): return self.value + sum(more) + sum(self.__hidden)
class Child(Base):
    def sum(self): return super().sum() + (1 if 2 in {2} else 0)
def walk(n):
    kept = [i for i in range(n) if i not in (1, 2)]
    del kept[0], kept[-1]
    kept[1:2] = kept[:1] * 2
    kept += [n]
    try:
        kept.remove(99)
    except ValueError as error:
        kept.append(str(error))
    return kept
result = (Pair(None), Child().sum(), walk(7), 1 < 2 < 3 in [3])
"""
    plain: dict[str, Any] = {"__name__": "plain"}
    counted_names: dict[str, Any] = {"__name__": "plain", **HELPERS}
    sys.modules["plain"] = sys  # dataclasses look their module up
    try:
        exec(compile(source, "<plain>", "exec", dont_inherit=True), plain)
        run(source, counted_names)
    finally:
        del sys.modules["plain"]
    assert repr(plain["result"]) == repr(counted_names["result"])
    assert METER.moves > 0


def test_what_cannot_be_counted_is_refused() -> None:
    """A slice among several targets is named with its line, not let pass uncounted."""
    with pytest.raises(CannotCountError, match=r"here\.py:2"):
        rewrite("a = [1]\nb = a[:0] = [2]\n", "here.py")


def test_locks_note_the_work_done_within() -> None:
    """The longest of several holds counts, an inner hold of the same lock is part of the outer."""
    names: dict[str, Any] = dict(HELPERS)
    source = """
import threading
lock = threading.RLock()
numbers = list(range(100))
with lock:
    with lock:
        99 in numbers
    99 in numbers
numbers.sort()
with lock:
    pass
"""
    run(source, names)
    assert isinstance(names["lock"], CountedLock)
    assert METER.longest_hold == 200
    assert METER.n_holds == 2


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="counts by sys.monitoring there")
def test_a_taken_trace_function_is_blindness() -> None:
    """Under a debugger or coverage the counter refuses to count."""
    before = sys.gettrace()
    sys.settrace(lambda *_: None)
    try:
        with pytest.raises(BlindCounterError, match="debugger or coverage"), counted():
            pass
    finally:
        sys.settrace(before)


def test_exponents() -> None:
    """Flat, linear, n log n and quadratic costs have the exponents they should."""
    sizes = [256, 512, 1024, 2048]
    assert slope(sizes, [3.0, 3.0, 3.0, 3.0]) == pytest.approx(0)
    assert slope(sizes, [float(n) for n in sizes]) == pytest.approx(1)
    assert growth(sizes, [n * n for n in sizes]) == pytest.approx(2)
    assert growth(sizes, [7, 7, 7, 7]) == 0
    assert growth(sizes, [int(n * math.log2(n)) for n in sizes]) > 1.1
    assert growth(sizes, [1000 + n for n in sizes]) > growth(sizes, [1000, 1000, 1000, 1001])
    assert doubling([1024, 4096, 16384], [1.0, 4.0, 16.0]) == pytest.approx(2)


@pytest.mark.parametrize(("sizes", "costs"), [([1], [1.0]), ([1, 2], [1.0]), ([1, 2], [0.0, 1.0])])
def test_a_fit_without_enough_to_fit_is_refused(sizes: list[int], costs: list[float]) -> None:
    """One size, a missing cost or a cost of nothing has no slope."""
    with pytest.raises(ValueError, match=r"need a cost|above 0"):
        slope(sizes, costs)
