"""Wrappers around mlx-lm's cache classes and its server's prompt cache."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, Final

from veloxquant_mlx.serving.events import Seams
from veloxquant_mlx.serving.wrap_batches import argument

__all__ = [
    "evict_oldest",
    "load_prompt_cache",
    "make_prompt_cache",
    "new_cache",
    "prompt_cache_fetch",
    "prompt_cache_init",
    "prompt_cache_insert",
    "prompt_cache_trim",
    "trie_add",
    "trie_pop",
    "trie_pop_prefixes",
]

_Function = Callable[..., Any]


def new_cache(original: _Function, seams: Seams) -> _Function:
    """`_BaseCache.__new__`: the one way that construction, copies and unpickling all take."""
    created = seams.event("on_cache_created")
    plain = original is object.__new__

    def __new__(cls: type, *args: Any, **kwargs: Any) -> Any:  # noqa: N807 - it is put there
        if not plain:
            cache = original(cls, *args, **kwargs)
        elif (args or kwargs) and cls.__init__ is object.__init__:  # type: ignore[misc]
            raise TypeError(f"{cls.__name__}() takes no arguments")  # as without us
        else:
            cache = object.__new__(cls)
        created(cache)
        return cache

    __new__.original = original  # type: ignore[attr-defined]
    return __new__


def make_prompt_cache(original: _Function, seams: Seams) -> _Function:
    """`make_prompt_cache`: caches that belong to one request."""
    made = seams.event("on_caches_made")

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        caches = original(*args, **kwargs)
        if made:
            made(argument(args, kwargs, 0, "model"), caches)
        return caches

    return wrapper


def load_prompt_cache(original: _Function, seams: Seams) -> _Function:
    """`load_prompt_cache`: caches out of a file, alone or with its metadata."""
    loaded = seams.event("on_caches_loaded")

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        loaded(result[0] if isinstance(result, tuple) else result)
        return result

    return wrapper


# -- LRUPromptCache ------------------------------------------------------------------------------

# Which prompt cache this thread is inside, and whether it is making room for the batch: the trie,
# where entries come and go, knows neither.
_inside: Final = threading.local()


def evict_oldest(prompt_cache: Any, reason: str) -> None:
    """Let a prompt cache drop one entry, by its own order; listeners are told `reason`.

    To be called on the prompt cache's own thread, outside of its methods.
    """
    _inside.reason = reason
    try:
        prompt_cache.trim_to(n_sequences=len(prompt_cache) - 1)
    finally:
        _inside.reason = None


def _within(original: _Function, reason: str | None) -> _Function:
    @functools.wraps(original)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        before = getattr(_inside, "at", None)
        _inside.at = (self, getattr(_inside, "reason", None) or reason)
        try:
            return original(self, *args, **kwargs)
        finally:
            _inside.at = before

    return wrapper


def prompt_cache_insert(original: _Function, seams: Seams) -> _Function:
    """`LRUPromptCache.insert_cache`: what comes and goes meanwhile is told by the trie."""
    changed = seams.event("on_prompt_cache_changed")
    within = _within(original, None)

    @functools.wraps(original)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = within(self, *args, **kwargs)
        changed(self)
        return result

    return wrapper


def prompt_cache_trim(original: _Function, _seams: Seams) -> _Function:
    """`LRUPromptCache.trim_to`: as `prompt_cache_insert`."""
    return _within(original, "trimmed")


def prompt_cache_init(original: _Function, seams: Seams) -> _Function:
    """`LRUPromptCache.__init__`."""
    opened = seams.event("on_prompt_cache_opened")

    @functools.wraps(original)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        opened(self)

    return wrapper


def prompt_cache_fetch(original: _Function, seams: Seams) -> _Function:
    """`LRUPromptCache.fetch_nearest_cache`."""
    fetched = seams.event("on_prompt_cache_fetched")

    @functools.wraps(original)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        try:
            caches, rest = result
            tokens = argument(args, kwargs, 1, "tokens")
            n = len(tokens) - len(rest)
        except Exception:  # noqa: BLE001 - another mlx-lm, another result
            seams.count(fetched.hook)
        else:
            fetched(self, tokens, caches, n)
        return result

    return wrapper


def trie_add(original: _Function, seams: Seams) -> _Function:
    """`PromptTrie.add`: an entry, which may replace one of the same tokens."""
    inserted, removed = seams.event("on_entry_inserted"), seams.event("on_entry_removed")

    @functools.wraps(original)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        before = original(self, *args, **kwargs)
        at = getattr(_inside, "at", None)
        if at is not None and len(args) > 2:
            inserted(at[0], args[1], args[2])
            if before is not None:
                removed(at[0], before, "replaced")
        return before

    return wrapper


def trie_pop(original: _Function, seams: Seams) -> _Function:
    """`PromptTrie.pop`: the least recently used entry goes."""
    removed = seams.event("on_entry_removed")

    def reason(prompt_cache: Any) -> str:
        # The order has forgotten the entry already: at the limit now, it was over the limit.
        return "entries" if len(prompt_cache) >= prompt_cache.max_size else "bytes"

    @functools.wraps(original)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        entry = original(self, *args, **kwargs)
        at = getattr(_inside, "at", None)
        if at is not None:
            try:
                why = at[1] or reason(at[0])
            except Exception:  # noqa: BLE001
                seams.count(removed.hook)
                why = "entries"
            removed(at[0], entry, why)
        return entry

    return wrapper


def trie_pop_prefixes(original: _Function, seams: Seams) -> _Function:
    """`PromptTrie.pop_prefixes`: shorter entries of which the new one has all."""
    removed = seams.event("on_entry_removed")

    @functools.wraps(original)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        entries = original(self, *args, **kwargs)
        at = getattr(_inside, "at", None)
        if at is not None:
            try:
                gone = [entry for _, entry in entries]
            except Exception:  # noqa: BLE001
                seams.count(removed.hook)
                gone = []
            for entry in gone:
                removed(at[0], entry, "prefix")
        return entries

    return wrapper
