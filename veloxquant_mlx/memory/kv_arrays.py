"""Shapes and dtypes of the arrays in an mlx-lm `KVCache`: what fits, and how they will grow.

Arrays are (batch, heads, tokens, dim); keys and values differ in dim at most. Only shapes and dtypes
are read, nothing is evaluated.
"""

from __future__ import annotations

from operator import index
from typing import TYPE_CHECKING

import mlx.core as mx

from veloxquant_mlx.core.exceptions import ArgumentTypeError

if TYPE_CHECKING:
    State = tuple[mx.array | None, mx.array | None, int]

__all__ = [
    "check_input",
    "checked_count",
    "checked_state",
    "checked_step",
    "format_of",
    "grown_capacity",
]

_FORMATS = {mx.float16: "fp16", mx.bfloat16: "bf16", mx.float32: "fp32"}


def check_input(
    shape: tuple[int, ...],
    v_shape: tuple[int, ...],
    keys: mx.array | None,
    values: mx.array | None,
) -> None:
    """Refuse new keys and values that mlx-lm would broadcast, or fail at half way.

    Args:
        shape: Shape of the new keys.
        v_shape: Shape of the new values.
        keys: The keys that are held, if any.
        values: The values that are held.

    Raises:
        ValueError: They do not fit each other, or what is held.
    """
    if len(shape) != 4 or len(v_shape) != 4 or shape[:3] != v_shape[:3]:
        raise ValueError(
            "keys and values must be (batch, heads, tokens, dim) and differ in dim at most, "
            f"got {shape} and {v_shape}"
        )
    if keys is not None and values is not None:
        held, v_held = keys.shape, values.shape
        if (shape[:2], shape[3], v_shape[3]) != (held[:2], held[3], v_held[3]):
            raise ValueError(
                f"got keys {shape} and values {v_shape}, which differ from the {held} and "
                f"{v_held} that are held in more than the number of tokens"
            )


def checked_state(state: State) -> State:
    """`state`, if it is one that a cache can have.

    Raises:
        ArgumentTypeError: The offset is no int.
        ValueError: Keys and values do not fit each other, or the offset is outside of them.
    """
    keys, values, offset = state
    offset = checked_count("offset", offset)
    if keys is None and values is None and offset == 0:
        return keys, values, offset
    if (
        keys is None
        or values is None
        or keys.ndim != 4
        or values.ndim != 4
        or keys.shape[:3] != values.shape[:3]
    ):
        raise ValueError(
            "a state is (None, None, 0), or keys and values of (batch, heads, tokens, dim) "
            "that differ in dim at most, and the number of tokens used"
        )
    if not 0 <= offset <= keys.shape[2]:
        raise ValueError(f"offset must be 0..{keys.shape[2]}, the length of keys, got {offset}")
    return keys, values, offset


def checked_count(name: str, value: object) -> int:
    """`value` as a plain int. A float would pass for one until the pool is told the fill.

    Raises:
        ArgumentTypeError: Not an int, or a bool.
    """
    try:
        if not isinstance(value, bool):
            return index(value)  # type: ignore[arg-type]
    except TypeError:
        pass
    raise ArgumentTypeError(f"{name} must be an int, got {value!r}")


def checked_step(step: object) -> int:
    """`step`, if arrays can grow by it.

    Raises:
        ArgumentTypeError: Not an int, or a bool.
        ValueError: Below 1.
    """
    if type(step) is not int:
        raise ArgumentTypeError(f"step must be an int >= 1 or None, got {step!r}")
    if step < 1:
        raise ValueError(f"step must be >= 1, got {step}")
    return step


def grown_capacity(keys: mx.array | None, offset: int, n_new: int, step: int) -> int:
    """Tokens that the arrays will have room for once mlx-lm has put `n_new` more into them.

    mlx-lm adds whole steps, to the tokens in use where these end between two steps, else to all the
    room there is.
    """
    held = 0 if keys is None else keys.shape[2]
    if offset + n_new <= held:
        return held
    kept = offset if offset % step else held
    return kept + -(-n_new // step) * step


def format_of(array: mx.array) -> str:
    """Format tag of an array: "fp16", "bf16", "fp32", or MLX's name of another dtype."""
    return _FORMATS.get(array.dtype) or str(array.dtype).rpartition(".")[2]
