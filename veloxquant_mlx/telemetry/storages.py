"""Storages: the bytes of a pool's storages together."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from veloxquant_mlx.memory.block_pool import BlockPoolAllocator

__all__ = ["NO_BYTES", "STORAGE_KINDS", "StorageBytes", "Storages"]

STORAGE_KINDS: Final = (
    "resident",
    "written",
    "evaluated",
    "in_use",
    "free_cached",
    "retired",
    "logical",
    "fp16_equivalent",
)


@dataclass(frozen=True, slots=True)
class StorageBytes:
    """Bytes by kind and by format; both empty without a storage."""

    by_kind: Mapping[str, int] = field(default_factory=dict)
    by_format: Mapping[str, int] = field(default_factory=dict)


NO_BYTES: Final = StorageBytes()


class Storages:
    """What was named to `instrument`, and what listens to the pool's shrink; held weakly."""

    def __init__(self) -> None:
        self._named: tuple[weakref.ref[Any], ...] = ()

    def add(self, storage: Any) -> None:
        """Count `storage` with the pool; it must offer `usage()` in constant time."""
        if all(known() is not storage for known in self._named):
            self._named = (*self._named, weakref.ref(storage))

    def usage(self, pool: BlockPoolAllocator, errors: dict[str, int]) -> StorageBytes:
        """The bytes of all; what fails is counted in `errors`."""
        storages = self._all(pool)
        if not storages:
            return NO_BYTES
        kinds: Counter[str] = Counter()
        formats: Counter[str] = Counter()
        for storage in storages:
            try:
                usage = storage.usage()
                by_kind = {kind: int(getattr(usage, f"{kind}_bytes")) for kind in STORAGE_KINDS}
                by_format = dict(usage.bytes_by_format)
            except Exception:  # noqa: BLE001 - a storage's fault costs its own bytes only
                errors["storage"] += 1
                continue
            kinds.update(by_kind)
            formats.update(by_format)
        return StorageBytes(dict(kinds), dict(formats))

    def _all(self, pool: BlockPoolAllocator) -> list[Any]:
        found = [storage for weakly in self._named if (storage := weakly()) is not None]
        if pool._listeners:
            found += [x for x in _copied(pool._listeners) if hasattr(x, "usage") and x not in found]
        return found


def _copied(listeners: weakref.WeakSet[Any]) -> list[Any]:
    # A set that another thread adds to meanwhile cannot be walked.
    for _ in range(3):
        try:
            return list(listeners)
        except RuntimeError:
            continue
    return []
