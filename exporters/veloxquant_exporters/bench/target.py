"""Target: the allocator under test, named as `package.module:factory`."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

__all__ = ["BLOCK_SIZE", "Factory", "TargetError", "load", "package_of"]

BLOCK_SIZE: Final = 16

Factory = Callable[[int], Any]  # number of blocks -> a new pool with one free list


class TargetError(ValueError):
    """The target cannot be loaded, or makes no pool."""


def load(target: str) -> Factory:
    """A function from a number of blocks to a new pool, from the target's name.

    Args:
        target: `package.module:name`. The name is a function of one argument, the number of blocks;
            or an allocator class, whose constructor takes a `PoolConfig` if its own module or one of
            its bases' has one, and a number of blocks otherwise.

    Raises:
        TargetError: Nothing of that name can be imported or called, or it makes no pool.
    """
    module_name, colon, name = target.partition(":")
    if not (module_name and colon and name):
        raise TargetError(f"a target is written package.module:factory, got {target!r}")
    here = str(Path.cwd())
    if "" not in sys.path and here not in sys.path:
        # As `python -m` does: an allocator is most often in the folder where one stands.
        sys.path.insert(0, here)
    try:
        found = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise TargetError(f"target {target!r} cannot be loaded: {error}") from error
    if not callable(found):
        raise TargetError(f"target {target!r} is a {type(found).__name__}, not callable")
    factory = _from_class(found) if inspect.isclass(found) else found
    try:
        pool = factory(2)
    except Exception as error:
        raise TargetError(f"target {target!r} makes no pool of 2 blocks: {error!r}") from error
    missing = [name for name in ("allocate", "free_all", "n_free") if not hasattr(pool, name)]
    if missing:
        raise TargetError(f"target {target!r} makes a pool without {', '.join(missing)}")
    return factory


def package_of(target: str) -> str:
    """The top package of the target's module, e.g. "veloxquant_mlx"."""
    return target.partition(":")[0].partition(".")[0]


def _from_class(cls: type) -> Factory:
    for base in cls.__mro__:
        config = getattr(importlib.import_module(base.__module__), "PoolConfig", None)
        if config is not None:
            return lambda n_blocks: cls(
                config(block_size=BLOCK_SIZE, n_blocks=n_blocks, separate_kv=False)
            )
    return cls
