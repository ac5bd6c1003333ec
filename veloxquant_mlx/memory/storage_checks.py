"""Checks of the blocks and rows that a storage is given. Importing this module imports MLX."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import mlx.core as mx

from veloxquant_mlx.core.exceptions import ArgumentTypeError
from veloxquant_mlx.memory.block import Block

if TYPE_CHECKING:
    from veloxquant_mlx.memory.block import Owner
    from veloxquant_mlx.memory.block_pool import BlockPoolAllocator
    from veloxquant_mlx.memory.storage_format import StorageFormat

__all__ = [
    "check_block",
    "check_dtype",
    "check_flag",
    "check_held",
    "check_range",
    "checked_end",
    "stored",
]

_REASONS: Final = {
    "free": "it is checked out to nobody",
    "foreign": "it belongs to another pool, or to none",
    "copied": "it is a copy; use the Block that allocate or blocks_for returned",
    "retired": "shrink took it out of the pool",
    "stale": "it is another owner's now",
}

_FLOATS: Final = (mx.float16, mx.bfloat16, mx.float32)
# (from, to) whose range is the same or wider: a plain cast makes no infinity.
_WIDENING: Final = {
    ("float16", "bfloat16"),
    ("float16", "float32"),
    ("bfloat16", "float32"),
}


def check_block(block: object) -> None:
    """Refuse what is no Block.

    Raises:
        ArgumentTypeError: `block` is something else.
    """
    if not isinstance(block, Block):
        raise ArgumentTypeError(f"block must be a Block, got {block!r}")


def check_held(pool: BlockPoolAllocator, block: Block, owner: Owner | None) -> None:
    """Refuse a block that the pool's books do not hold out, to `owner` if given; they count it.

    Raises:
        ValueError: With the reason.
    """
    reason = pool.refusal(block, owner=owner)
    if reason is not None:
        raise ValueError(f"block {block.block_id} is refused as {reason}: {_REASONS[reason]}")


def check_flag(validate: object) -> bool:
    """`validate` as it is.

    Raises:
        ArgumentTypeError: It is no bool.
    """
    if not isinstance(validate, bool):
        raise ArgumentTypeError(f"validate must be True or False, got {validate!r}")
    return validate


def checked_end(offset: int, values: mx.array, block_size: int, head_dim: int) -> int:
    """One past the last row that `values`, written from row `offset`, would take.

    Raises:
        ArgumentTypeError: An argument has the wrong type.
        ValueError: `offset` is negative, or `values` is not ``(n, head_dim)`` with
            1 <= n <= block_size - offset.
    """
    if type(offset) is not int:
        raise ArgumentTypeError(f"offset must be an int in 0..{block_size - 1}, got {offset!r}")
    if not isinstance(values, mx.array):
        raise ArgumentTypeError(f"values must be an mlx.core.array, got {type(values).__name__}")
    if not 0 <= offset < block_size:
        raise ValueError(f"offset must be in 0..{block_size - 1}, got {offset}")
    room = block_size - offset
    shape = values.shape
    if len(shape) != 2 or shape[1] != head_dim or not 1 <= shape[0] <= room:
        raise ValueError(
            f"values at offset {offset} must have shape (n, {head_dim}) with n in 1..{room}, "
            f"got {shape}"
        )
    return offset + shape[0]


def check_dtype(spec: StorageFormat, values: mx.array) -> None:
    """Refuse values whose dtype the format does not take.

    Raises:
        ValueError: A float format was given other than float16, bfloat16 or float32, or an integer
            format other than uint8.
    """
    if spec.is_float:
        if values.dtype not in _FLOATS:
            raise ValueError(
                f"format {spec.name!r} takes float16, bfloat16 or float32 values, "
                f"got {_name(values)}"
            )
    elif values.dtype != mx.uint8:
        raise ValueError(
            f"format {spec.name!r} takes uint8 codes in 0..{spec.limit}, got {_name(values)}"
        )


def check_range(spec: StorageFormat, values: mx.array) -> None:
    """Refuse values that the format cannot represent. Evaluates them: a device sync.

    Raises:
        ValueError: Some are NaN, infinite or beyond the format's largest value; it says how many.
    """
    if spec.name == "int8":
        return  # every uint8 is a code
    sizes = mx.abs(values.astype(mx.float32)) if spec.is_float else values
    # Not `sizes > limit`: NaN must be found too.
    n_bad = mx.sum(mx.logical_not(sizes <= spec.limit)).item()
    if n_bad:
        allowed = f"finite and within +-{spec.limit:g}" if spec.is_float else f"0..{spec.limit}"
        raise ValueError(
            f"{n_bad} of {values.size} values do not fit format {spec.name!r}: they must be "
            f"{allowed}"
        )


def stored(spec: StorageFormat, values: mx.array) -> mx.array:
    """`values` in the dtype of the format, lazily; what lies beyond its range is clipped."""
    dtype = getattr(mx, spec.dtype)
    if values.dtype == dtype:
        return values
    if (_name(values), spec.dtype) in _WIDENING:
        return values.astype(dtype)
    # In float32, because bfloat16 has no 65504: it would round up and overflow after all.
    return mx.clip(values.astype(mx.float32), -spec.limit, spec.limit).astype(dtype)


def _name(values: mx.array) -> str:
    return str(values.dtype).removeprefix("mlx.core.")
