"""Traffic: requests that come by chance, take blocks as they grow, and give them back."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from dashboards.drill.stage import Part, Stage
from veloxquant_mlx.core.exceptions import BlockPoolExhaustedError
from veloxquant_mlx.memory.block_pool import BlockPoolAllocator

__all__ = ["Shape", "Traffic"]

# Requests vary by so much around their mean.
SPREAD = 0.5
# With few requests, how long until the rate is asked for again.
LOOK_AGAIN_S = 30.0
# How often a request that waits to be admitted looks for room.
ADMISSION_S = 5.0

Call = Callable[[BlockPoolAllocator, str], None]


def give_back(pool: BlockPoolAllocator, owner: str) -> None:
    """How a request should end."""
    pool.free_all(owner)


@dataclass(frozen=True, slots=True)
class Shape:
    """What requests are like, on average.

    Attributes:
        prompt, output: Tokens.
        seconds: From the first token to the last.
        step: Tokens that are taken together while it decodes.
        is_exact: Every request is the same.
    """

    prompt: int = 256
    output: int = 128
    seconds: float = 40.0
    step: int = 64
    is_exact: bool = False

    def mean_blocks(self, block_size: int) -> float:
        """Blocks that a request holds, averaged over its time, in both streams."""
        n_steps = max(0, -(-self.output // self.step))
        by_step = -(-self.step // block_size)
        return 2 * (-(-self.prompt // block_size) + by_step * n_steps / 2)


class Traffic:
    """Requests on one pool.

    Args:
        stage: Where.
        pool: Whose blocks.
        shape: What requests are like; a function of the seconds since the beginning, or one shape.
        load: Share of `n_blocks` that is held on average; the same.
        n_blocks: None is what the pool has now.
        most: Share of the blocks from which on requests are made to wait, as a server's admission
            does; None admits all.
        end: What a request does at its end.
        take: How blocks are taken.
    """

    def __init__(
        self,
        stage: Stage,
        pool: BlockPoolAllocator,
        shape: Shape | Callable[[float], Shape] = Shape(),
        load: float | Callable[[float], float] = 0.5,
        *,
        n_blocks: int | None = None,
        most: float | None = None,
        end: Call = give_back,
        take: Callable[[BlockPoolAllocator, str, int], None] | None = None,
    ) -> None:
        self.stage = stage
        self.pool = pool
        self.is_on = True
        self._shape = shape if callable(shape) else lambda _: shape
        self._load = load if callable(load) else lambda _: load
        self._n_blocks = pool.stats.n_blocks if n_blocks is None else n_blocks
        self._most = math.inf if most is None else most * self._n_blocks
        self._end = end
        self._take = take or _take_both
        stage.play(self._arrivals())

    def _arrivals(self) -> Part:
        while self.is_on:
            now_s = self.stage.now_s
            shape = self._shape(now_s)
            held = shape.mean_blocks(self.pool.config.block_size)
            a_second = self._load(now_s) * self._n_blocks / (held * shape.seconds)
            wait_s = self.stage.random.uniform(0, 2) / a_second if a_second > 0 else LOOK_AGAIN_S
            if wait_s >= LOOK_AGAIN_S:
                yield LOOK_AGAIN_S
                continue
            yield wait_s
            self.stage.play(self._request(shape))

    def _request(self, shape: Shape) -> Part:
        pool, owner = self.pool, self.stage.fresh_id()
        by = 1.0 if shape.is_exact else self.stage.random.uniform(1 - SPREAD, 1 + SPREAD)
        n_steps = -(-int(shape.output * by) // shape.step)
        while pool.stats.blocks_in_use() >= self._most:
            yield ADMISSION_S
        try:
            self._take(pool, owner, max(1, int(shape.prompt * by)))
            for _ in range(n_steps):
                yield shape.seconds * by / n_steps
                self._take(pool, owner, shape.step)
            if not n_steps:
                yield shape.seconds * by
        except BlockPoolExhaustedError:
            pool.free_all(owner)  # a server fails the request
            return
        self._end(pool, owner)


def _take_both(pool: BlockPoolAllocator, owner: str, n_tokens: int) -> None:
    pool.allocate_kv(n_tokens, owner)
