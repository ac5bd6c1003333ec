"""Locks that a forked child gets anew: a thread that held one in the parent does not exist there."""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any, Final, Protocol

__all__ = ["lock_of"]


class _Owner(Protocol):
    _lock: Any


_owners: Final[weakref.WeakSet[Any]] = weakref.WeakSet()


def lock_of(owner: _Owner) -> Any:
    """A new lock for `owner._lock`. Reentrant: a finalizer may come in the middle of anything."""
    _owners.add(owner)
    return threading.RLock()


def _renew() -> None:
    for owner in list(_owners):
        owner._lock = threading.RLock()  # noqa: SLF001 - what it asked for


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)
