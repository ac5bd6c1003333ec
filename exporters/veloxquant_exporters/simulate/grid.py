"""Grid: the configurations to try, from what was asked for and what was recorded."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Final

from veloxquant_mlx.memory.pool_config import PoolConfig

__all__ = ["BLOCK_SIZES", "MAX_CONFIGS", "Grid", "GridError"]

BLOCK_SIZES: Final = (8, 16, 32, 64)
# More than a table can be read for, and a guard against a slip of the keyboard.
MAX_CONFIGS: Final = 256


class GridError(ValueError):
    """What was asked for makes no configuration; the message says what would."""


@dataclass(frozen=True, slots=True)
class Grid:
    """Every combination of these; an empty tuple is "as recorded".

    Attributes:
        block_sizes: Token slots a block.
        n_blocks: Blocks at the beginning. As recorded is as many token slots: the number is scaled
            with the block size, up to a whole block.
        separate_kv: Two streams or one.
        grow: Whether the pool may grow.
        max_blocks: Blocks that it may grow to; scaled as `n_blocks` is.
    """

    block_sizes: tuple[int, ...] = BLOCK_SIZES
    n_blocks: tuple[int, ...] = ()
    separate_kv: tuple[bool, ...] = ()
    grow: tuple[bool, ...] = ()
    max_blocks: tuple[int, ...] = ()

    def configs(self, recorded: PoolConfig) -> tuple[PoolConfig, ...]:
        """The configurations, each once, the recorded one first.

        Raises:
            GridError: A value that no pool can have, or more than `MAX_CONFIGS` of them.
        """
        axes = (
            self.block_sizes or (recorded.block_size,),
            self.n_blocks or (None,),
            self.separate_kv or (recorded.separate_kv,),
            self.grow or (recorded.grow_on_exhaustion,),
            self.max_blocks or (None,),
        )
        found = dict.fromkeys([recorded])
        for point in itertools.product(*axes):
            found[_config(recorded, *point)] = None
            if len(found) > MAX_CONFIGS:
                raise GridError(
                    f"these values make more than {MAX_CONFIGS} configurations; ask for fewer at once"
                )
        return tuple(found)


def _config(
    recorded: PoolConfig,
    block_size: int,
    n_blocks: int | None,
    separate_kv: bool,
    grow: bool,
    max_blocks: int | None,
) -> PoolConfig:
    if block_size < 1:
        raise GridError(f"a block size must be at least 1, got {block_size}")
    if n_blocks is None:
        n_blocks = _scaled(recorded.n_blocks, recorded.block_size, block_size)
    if max_blocks is None and recorded.max_blocks is not None:
        max_blocks = max(n_blocks, _scaled(recorded.max_blocks, recorded.block_size, block_size))
    try:
        return PoolConfig(
            block_size=block_size,
            n_blocks=n_blocks,
            separate_kv=separate_kv,
            grow_on_exhaustion=grow,
            max_blocks=max_blocks if grow else None,
        )
    except ValueError as error:
        raise GridError(str(error)) from error


def _scaled(n_blocks: int, old_size: int, new_size: int) -> int:
    return -(-n_blocks * old_size // new_size)
