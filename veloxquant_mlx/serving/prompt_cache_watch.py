"""PromptCacheWatch: what the server keeps of earlier requests, and whether it was worth it."""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any, Final

from veloxquant_mlx.serving.events import Listener
from veloxquant_mlx.telemetry.program import PromptCacheSnapshot
from veloxquant_mlx.telemetry.program_values import (
    ENTRY_TYPES,
    EVICTION_REASONS,
    LOOKUP_OUTCOMES,
)

__all__ = ["PromptCacheWatch"]

# What mlx-lm has for "no limit".
UNLIMITED: Final = 1 << 62


class PromptCacheWatch(Listener):
    """Counts look-ups and evictions, which one thread does, and reads the rest off the cache."""

    def __init__(self) -> None:
        self._caches: list[weakref.ref[Any]] = []
        self._any = False
        self._lookups = dict.fromkeys(LOOKUP_OUTCOMES, 0)
        self._evictions = dict.fromkeys(EVICTION_REASONS, 0)
        self._lookup_tokens = self._hit_tokens = self._insertions = 0

    def on_prompt_cache_opened(self, prompt_cache: Any) -> None:
        """Remember it until it is gone."""
        self._any = True
        self._caches[:] = [ref for ref in self._caches if ref() is not None]
        self._caches.append(weakref.ref(prompt_cache))

    def on_prompt_cache_fetched(
        self, prompt_cache: Any, tokens: list[int], caches: list[Any] | None, n: int
    ) -> None:
        """Count a look-up."""
        self._lookups["miss" if caches is None else "hit"] += 1
        self._lookup_tokens += len(tokens)
        self._hit_tokens += n

    def on_entry_inserted(self, prompt_cache: Any, tokens: list[int], entry: Any) -> None:
        """Count an entry."""
        self._insertions += 1

    def on_entry_removed(self, prompt_cache: Any, entry: Any, reason: str) -> None:
        """Count an eviction."""
        self._evictions[reason] += 1

    def snapshot(self) -> PromptCacheSnapshot | None:
        """The caches of this moment and the counts so far; None where there never was one.

        Raises:
            Exception: Another mlx-lm keeps its entries in another way.
        """
        if not self._any:
            return None
        entries, tokens, sizes = (Counter(dict.fromkeys(ENTRY_TYPES, 0)) for _ in range(3))
        limits: list[tuple[int, int]] = []
        for ref in list(self._caches):
            cache = ref()
            if cache is None:
                continue
            limits.append((cache.max_size, cache.max_bytes))
            sizes.update(dict(cache._n_bytes_by_type))  # noqa: SLF001
            for kind, order in dict(cache._lru._lrus).items():  # noqa: SLF001
                kept = list(order)
                entries[kind] += len(kept)
                tokens[kind] += sum(len(one[1]) for one in kept)
        return PromptCacheSnapshot(
            entries=dict(entries),
            tokens=dict(tokens),
            n_bytes=dict(sizes),
            max_entries=_sum(limit for limit, _ in limits),
            max_bytes=_sum(limit for _, limit in limits),
            lookups=dict(self._lookups),
            lookup_tokens=self._lookup_tokens,
            hit_tokens=self._hit_tokens,
            insertions=self._insertions,
            evictions=dict(self._evictions),
        )


def _sum(limits: Any) -> int | None:
    """All together; None where there is no limit, or nothing that it limits."""
    total = sum(limits)
    return total if 0 < total < UNLIMITED else None
