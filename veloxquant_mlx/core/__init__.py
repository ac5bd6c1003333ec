"""What the rest of the package is built on: the error tree and the cache interface."""

from __future__ import annotations

from veloxquant_mlx.core.abstractions import KVCache
from veloxquant_mlx.core.exceptions import (
    ArgumentTypeError,
    BlockPoolExhaustedError,
    OwnerAlreadyActiveError,
    PoolError,
    PoolReentryError,
)

__all__ = [
    "ArgumentTypeError",
    "BlockPoolExhaustedError",
    "KVCache",
    "OwnerAlreadyActiveError",
    "PoolError",
    "PoolReentryError",
]
