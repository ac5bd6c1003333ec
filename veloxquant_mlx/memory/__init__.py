"""The paged memory system: allocator, MLX storage and the caches on top.

Names load on first use, so that importing this package imports no MLX.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from veloxquant_mlx.core.exceptions import BlockPoolExhaustedError, OwnerAlreadyActiveError
from veloxquant_mlx.memory.block_pool import (
    AllocationStats,
    Block,
    BlockPoolAllocator,
    PoolConfig,
)

if TYPE_CHECKING:
    from veloxquant_mlx.memory.mlx_storage import MLXBlockStorage
    from veloxquant_mlx.memory.pool_backed_cache import PoolBackedKVCache, build_pooled_caches
    from veloxquant_mlx.memory.pooled_cache import PooledKVCache

__all__ = [
    "AllocationStats",
    "Block",
    "BlockPoolAllocator",
    "BlockPoolExhaustedError",
    "MLXBlockStorage",
    "OwnerAlreadyActiveError",
    "PoolBackedKVCache",
    "PoolConfig",
    "PooledKVCache",
    "build_pooled_caches",
]

_NEEDS_MLX = {
    "MLXBlockStorage": "mlx_storage",
    "PoolBackedKVCache": "pool_backed_cache",
    "PooledKVCache": "pooled_cache",
    "build_pooled_caches": "pool_backed_cache",
}


def __getattr__(name: str) -> object:
    if name not in _NEEDS_MLX:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = import_module(f"{__name__}.{_NEEDS_MLX[name]}")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("mlx", "mlx_lm"):
            raise
        raise ModuleNotFoundError(
            f"{name} needs MLX and mlx-lm. Try: pip install 'veloxquant-mlx-monitor[cpu]', or "
            "[apple], [cuda], [cuda12]",
            name=error.name,
        ) from error
    return getattr(module, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
