# ruff: noqa: ARG005 - every cost takes the container and the arguments, and most need one of them
"""Charges: what an operation on a container costs, in elements touched.

The helpers here stand in the rewritten source in place of operators and calls; they do the operation
and add its cost to the meter. Costs are those of CPython's own containers: a scan pays for what it
compares, a list for the tail it moves, a sort n log n. Constant work is not charged: instructions
count it.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import math
import operator
import random
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from veloxquant_exporters.bench.counting.locks import CountedLock
from veloxquant_exporters.bench.counting.meter import METER

__all__ = ["HELPERS"]

_HASHED: Final = (dict, set, frozenset)
_LINEAR: Final[tuple[type, ...]] = (list, tuple, deque, type({}.values()))
_VIEWS: Final[tuple[type, ...]] = (type({}.keys()), type({}.items()), type({}.values()))
_SIZED: Final[Any] = (*_HASHED, list, tuple, deque, *_VIEWS)
_LOCKS: Final = (threading.Lock, threading.RLock)

# Builtins that touch no element, or whose elements instructions count as they are drawn.
_FREE: Final = frozenset(
    map(id, (len, isinstance, issubclass, type, id, hash, iter, next, enumerate, reversed, range,
             getattr, setattr, hasattr, callable, repr, print))
)  # fmt: skip
_SORTS: Final = frozenset(map(id, (sorted, heapq.nsmallest, heapq.nlargest)))
_LOGARITHMIC: Final = frozenset(
    map(id, (heapq.heappush, heapq.heappop, heapq.heapreplace, heapq.heappushpop,
             bisect.bisect, bisect.bisect_left, bisect.bisect_right))
)  # fmt: skip
_INSERTS: Final = frozenset(map(id, (bisect.insort, bisect.insort_left, bisect.insort_right)))


def _size(value: Any) -> int:
    return len(value) if isinstance(value, _SIZED) else 0


def _log(n: int) -> int:
    return max(1, math.ceil(math.log2(n + 1)))


def _position(container: Any, value: Any) -> int:
    """Elements looked at until `value` is found; all if it is not there."""
    for seen, element in enumerate(container, 1):
        if element is value or element == value:
            return seen
    return len(container)


def _index(args: tuple[Any, ...], length: int, default: int) -> int:
    at = args[0] if args and isinstance(args[0], int) else default
    return min(max(at + length if at < 0 else at, 0), length)


def _tail(own: Any, args: tuple[Any, ...], default: int) -> int:
    return len(own) - _index(args, len(own), default)


_Cost = Callable[[Any, tuple[Any, ...]], int]
_LIST: Final[dict[str, _Cost]] = {
    "remove": lambda own, args: len(own),
    "index": lambda own, args: _position(own, args[0]),
    "count": lambda own, args: len(own),
    "pop": lambda own, args: _tail(own, args, len(own)),
    "insert": lambda own, args: _tail(own, args, 0),
    "sort": lambda own, args: len(own) * _log(len(own)),
    "reverse": lambda own, args: len(own),
    "copy": lambda own, args: len(own),
    "clear": lambda own, args: len(own),
    "extend": lambda own, args: _size(args[0]),
}
_DEQUE: Final[dict[str, _Cost]] = {
    **{name: _LIST[name] for name in ("remove", "index", "count", "copy", "clear", "reverse")},
    "insert": lambda own, args: len(own),
    "extend": lambda own, args: _size(args[0]),
    "extendleft": lambda own, args: _size(args[0]),
    "rotate": lambda own, args: min(abs(args[0]) if args else 1, len(own)),
}
_DICT: Final[dict[str, _Cost]] = {
    "update": lambda own, args: sum(map(_size, args)),
    "copy": lambda own, args: len(own),
    "clear": lambda own, args: len(own),
}
_SET: Final[dict[str, _Cost]] = {
    **_DICT,
    "union": lambda own, args: len(own) + sum(map(_size, args)),
    "difference": lambda own, args: len(own) + sum(map(_size, args)),
    "symmetric_difference": lambda own, args: len(own) + sum(map(_size, args)),
    "intersection": lambda own, args: min([len(own), *map(_size, args)]),
    "difference_update": lambda own, args: sum(map(_size, args)),
    "intersection_update": lambda own, args: len(own),
    "issubset": lambda own, args: len(own),
    "issuperset": lambda own, args: sum(map(_size, args)),
    "isdisjoint": lambda own, args: min([len(own), *map(_size, args)]),
}
_METHODS: Final[tuple[tuple[type | tuple[type, ...], dict[str, _Cost]], ...]] = (
    (list, _LIST),
    (deque, _DEQUE),
    (dict, _DICT),
    ((set, frozenset), _SET),
    (tuple, {name: _LIST[name] for name in ("index", "count")}),
    (str, {"join": lambda own, args: _size(args[0])}),
)


def _cost_of_call(function: Any, args: tuple[Any, ...]) -> int:
    own = getattr(function, "__self__", None)
    if own is not None and not isinstance(own, type):
        for kind, costs in _METHODS:
            if isinstance(own, kind):
                cost = costs.get(function.__name__)
                return cost(own, args) if cost else 0
    if hasattr(function, "__code__") or getattr(function, "__func__", None) is not None:
        return 0  # Python code: its instructions are counted
    key = id(function)
    if key in _FREE or not args:
        return 0
    if function is itertools.islice:
        return min([_size(args[0]), *(stop for stop in args[1:3] if isinstance(stop, int))])
    if key in _LOGARITHMIC:
        return _log(_size(args[0]))
    if key in _INSERTS:
        return _log(_size(args[0])) + _size(args[0])
    if isinstance(function, type) and function.__module__ not in _BUILTIN_MODULES:
        return 0
    total = sum(map(_size, args))
    return total * _log(total) if key in _SORTS else total


_BUILTIN_MODULES: Final = frozenset({"builtins", "collections", "itertools", "functools"})


def _call(function: Any, /, *args: Any, **kwargs: Any) -> Any:
    if function is random.Random and not args:
        args = (0,)  # what is sampled at random is sampled alike at every size
    METER.moves += _cost_of_call(function, args)
    result = function(*args, **kwargs)
    return CountedLock(result) if any(function is lock for lock in _LOCKS) else result


def _in(value: Any, container: Any) -> Any:
    if isinstance(container, _LINEAR):
        METER.moves += _position(container, value)
    return value in container


def _not_in(value: Any, container: Any) -> Any:
    return not _in(value, container)


def _equal(left: Any, right: Any) -> Any:
    METER.moves += min(_size(left), _size(right))
    return left == right


def _made(value: Any) -> Any:
    """A container that an operator or a slice just made."""
    METER.moves += _size(value)
    return value


def _drawn(value: Any) -> Any:
    """A container that is unpacked, or added to another in place."""
    METER.moves += _size(value)
    return value


def _added(own: Any, value: Any) -> Any:
    """The right side of `own += value`: what cannot change in place is copied whole."""
    METER.moves += _size(value) + (len(own) if isinstance(own, tuple | str | bytes) else 0)
    return value


def _delete(own: Any, at: Any) -> None:
    """`del own[at]`: a list moves its tail, a deque its shorter side."""
    if isinstance(own, list):
        start = at.indices(len(own))[0] if isinstance(at, slice) else _index((at,), len(own), 0)
        METER.moves += len(own) - start
    elif isinstance(own, deque):
        METER.moves += min(_index((at,), len(own), 0), len(own) - _index((at,), len(own), 0))
    operator.delitem(own, at)


def _store(own: Any, at: slice, value: Any) -> None:
    """`own[at] = value` for a slice."""
    if isinstance(own, list):
        METER.moves += len(own) - at.indices(len(own))[0] + _size(value)
    own[at] = value


HELPERS: Final[dict[str, Any]] = {
    f"__counted_{helper.__name__.strip('_')}__": helper
    for helper in (
        _call, _in, _not_in, _equal, _made, _drawn, _added, _delete, _store,
    )
} | {"__counted_slice__": slice}  # fmt: skip
