"""Census: every live cache object of mlx-lm, by kind, counted from plain attributes and shapes."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Final

from veloxquant_mlx.serving.events import Listener
from veloxquant_mlx.telemetry.program import CacheCensus
from veloxquant_mlx.telemetry.program_values import CACHE_KINDS

__all__ = ["Census", "kind_of"]

_MODULE: Final = "mlx_lm.models.cache"

# Slots that one row of an object holds, of so many that its arrays have room for.
_HELD: Final[dict[str, Callable[[Any, int], int]]] = {
    "KVCache": lambda cache, _: cache.offset,
    "QuantizedKVCache": lambda cache, _: cache.offset,
    "ConcatenateKVCache": lambda cache, _: cache.offset,
    "RotatingKVCache": lambda cache, capacity: min(cache.offset, capacity),
    "ChunkedKVCache": lambda cache, _: cache.offset - cache.start_position,
    # `offset` of a batch is an array, one for each row; these are the plain numbers beside it.
    "BatchKVCache": lambda cache, _: cache._idx,  # noqa: SLF001
    "BatchRotatingKVCache": lambda cache, capacity: min(cache._offset, capacity),  # noqa: SLF001
}


def kind_of(cls: type) -> str:
    """The kind that objects of `cls` count as."""
    for base in cls.__mro__:
        if base.__module__ == _MODULE and base.__name__ in CACHE_KINDS:
            return base.__name__
    return "other"


class Census(Listener):
    """Knows every cache object from its creation to its end, and holds none of them."""

    def __init__(self) -> None:
        # By id, so that neither a class's __eq__ nor its __hash__ is ever called.
        self._live: dict[int, weakref.ref[Any]] = {}
        self._kinds: dict[type, str] = {}

    def on_cache_created(self, cache: Any) -> None:
        """Remember it until it is gone."""
        key = id(cache)

        def gone(ref: weakref.ref[Any], live: dict[int, weakref.ref[Any]] = self._live) -> None:
            # The id may be another object's by now.
            if live.get(key) is ref:
                del live[key]

        self._live[key] = weakref.ref(cache, gone)

    def count(self, failed: Callable[[], None] = lambda: None) -> dict[str, CacheCensus]:
        """All kinds, also those of which there is nothing; evaluates no array.

        Args:
            failed: Called in the except clause for each object that cannot be read.
        """
        sums = {kind: [0, 0, 0, 0, 0] for kind in CACHE_KINDS}
        for ref in list(self._live.values()):
            cache = ref()
            if cache is None:
                continue
            try:
                kind = self._kind(type(cache))
                total = sums[kind]
                total[0] += 1
                _add(total, kind, cache)
            except Exception:  # noqa: BLE001 - one odd object costs its own bytes only
                failed()
        names = ("n_objects", "slots_held", "slots_capacity", "n_bytes", "waste_bytes")
        return {
            kind: CacheCensus(**dict(zip(names, total, strict=True)))
            for kind, total in sums.items()
        }

    def _kind(self, cls: type) -> str:
        kind = self._kinds.get(cls)
        if kind is None:
            kind = self._kinds[cls] = kind_of(cls)
        return kind


def _add(total: list[int], kind: str, cache: Any) -> None:
    """Add an object's slots and bytes; the caches of a list are objects of their own."""
    held_of = _HELD.get(kind)
    if held_of is None:
        total[3] += _bytes_of(kind, cache)
        return
    # An object that is being made, or copied, has no attributes yet.
    keys = getattr(cache, "keys", None)
    if keys is None:
        return
    values = cache.values
    if type(keys) is tuple or type(keys) is list:  # quantised: codes, scales, biases
        n_bytes = sum(one.nbytes for one in keys) + sum(one.nbytes for one in values)
        shape = keys[0].shape
    else:
        n_bytes = keys.nbytes + values.nbytes
        shape = keys.shape
    rows, room = shape[0], shape[-2]
    held = held_of(cache, room)
    total[1] += rows * held
    total[2] += rows * room
    total[3] += n_bytes
    if held < room:
        total[4] += n_bytes * (room - held) // room


def _bytes_of(kind: str, cache: Any) -> int:
    if kind == "CacheList":
        return 0
    if kind == "ArraysCache":
        return sum(one.nbytes for one in getattr(cache, "cache", ()) if one is not None)
    return int(cache.nbytes)
