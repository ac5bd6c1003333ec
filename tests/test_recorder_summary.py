"""The summary that a failed allocation carries: what is in it, and what it may cost."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import pytest

from veloxquant_mlx.core.exceptions import BlockPoolExhaustedError
from veloxquant_mlx.memory.block_pool import BlockPoolAllocator, PoolConfig
from veloxquant_mlx.memory.summary import LOOKED_AT


def refused(pool: BlockPoolAllocator, stream: str = "k") -> BlockPoolExhaustedError:
    """The error of asking for more than there is."""
    with pytest.raises(BlockPoolExhaustedError) as caught:
        pool.allocate(stream, 16 * 10_000, "greedy")
    return caught.value


def test_the_error_says_who_holds_what() -> None:
    """Streams with their fill, the top holders, the last calls: behind the first line."""
    pool = BlockPoolAllocator(PoolConfig(16, 64))
    for name, n_blocks in (("small", 1), ("large", 12), ("middle", 4), ("tiny", 1)):
        pool.allocate_kv(16 * n_blocks, name, n_filled=8 * n_blocks)
    pool.free_all("tiny")
    error = refused(pool)
    first, *rest = str(error).split("\n")
    assert first.startswith("stream 'k' has 15 of 10000 blocks that owner 'greedy' needs")
    assert "\n".join(rest) == error.summary
    assert rest == [
        "streams: k 15 of 32 blocks free, 50% filled; v 15 of 32 blocks free, 50% filled",
        "top holders of 3 owners: 'large' 24 blocks, 'middle' 8 blocks, 'small' 2 blocks",
        (
            "last events: allocate of 24 k+v for 192 tokens ('large'), allocate of 8 k+v for 64 "
            "tokens ('middle'), allocate of 2 k+v for 16 tokens ('tiny'), free_all of 2 k+v ('tiny')"
        ),
    ]
    assert "refused of 10000 k for 160000 tokens ('greedy')" in str(refused(pool).summary)


def test_it_survives_pickling_and_copying() -> None:
    """As every attribute of the error does."""
    error = refused(BlockPoolAllocator(PoolConfig(16, 0)))
    assert error.summary is not None and "none in use" in error.summary
    for other in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert other.summary == error.summary and str(other) == str(error)
    assert BlockPoolExhaustedError("x").summary is None


class Counted(dict[Any, Any]):
    """Owners, who were looked at."""

    n_seen = 0

    def items(self) -> Any:
        """Counts what is taken off it."""

        def counted() -> Iterator[tuple[Any, Any]]:
            for item in super(Counted, self).items():
                Counted.n_seen += 1
                yield item

        return counted()


@pytest.mark.parametrize("n_owners", [4, 5000])
def test_a_failed_allocation_looks_at_few_owners(n_owners: int) -> None:
    """However many there are, it looks at the oldest ones and says so."""
    pool = BlockPoolAllocator(PoolConfig(16, n_owners))
    for owner in range(n_owners):
        pool.allocate("kv"[owner % 2], 16, owner)
    pool._owners = Counted(pool._owners)
    Counted.n_seen = 0
    summary = str(refused(pool).summary)
    assert Counted.n_seen == min(n_owners, LOOKED_AT)
    assert ("among the 32 oldest" in summary) == (n_owners > LOOKED_AT)


def test_long_owner_ids_are_shortened() -> None:
    """An id may be a page of text; a log line is not."""
    pool = BlockPoolAllocator(PoolConfig(16, 64))
    pool.allocate("k", 16, "x" * 100_000)
    pool.allocate("k", 16, 10**5000)
    assert len(str(refused(pool).summary)) < 600
