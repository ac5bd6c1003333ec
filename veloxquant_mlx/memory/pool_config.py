"""PoolConfig: the frozen, checked settings of a `BlockPoolAllocator`."""

from __future__ import annotations

from dataclasses import dataclass

from veloxquant_mlx.core.exceptions import ArgumentTypeError

__all__ = ["PoolConfig"]


# Without slots, so that the defaults can be read off the class as the API page shows them, and that
# setting a name that is no field is the same FrozenInstanceError as setting a field.
@dataclass(frozen=True)
class PoolConfig:
    """Size and behaviour of a block pool. Immutable, so safe to share between threads.

    Attributes:
        block_size: Token slots per block, an int >= 1.
        n_blocks: Blocks managed at first, an int >= 0. With `separate_kv` the keys get the odd one.
        separate_kv: True: keys and values have a free list each. False: one list ("kv") for both.
        grow_on_exhaustion: True: an allocation that finds too few free blocks adds just enough.
        max_blocks: Most blocks over all streams after growth, an int >= 0; None is no limit.
            Ignored unless `grow_on_exhaustion`.

    Raises:
        ArgumentTypeError: A field has the wrong type (bool is no int here).
        ValueError: A number is below its minimum.
    """

    block_size: int = 16
    n_blocks: int = 1024
    separate_kv: bool = True
    grow_on_exhaustion: bool = False
    max_blocks: int | None = None

    def __post_init__(self) -> None:
        _check_int("block_size", self.block_size, minimum=1)
        _check_int("n_blocks", self.n_blocks, minimum=0)
        _check_bool("separate_kv", self.separate_kv)
        _check_bool("grow_on_exhaustion", self.grow_on_exhaustion)
        if self.max_blocks is not None:
            _check_int("max_blocks", self.max_blocks, minimum=0)


def _check_int(name: str, value: object, *, minimum: int) -> None:
    if type(value) is not int:
        raise ArgumentTypeError(f"{name} must be an int >= {minimum}, got {value!r}")
    if value < minimum:
        raise ValueError(f"{name} must be >= {minimum}, got {value}")


def _check_bool(name: str, value: object) -> None:
    if type(value) is not bool:
        raise ArgumentTypeError(f"{name} must be True or False, got {value!r}")
