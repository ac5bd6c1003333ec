"""The ledger against a naive model: charges, excess, fill and marks, in pools of every shape."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from veloxquant_mlx.core.exceptions import BlockPoolExhaustedError
from veloxquant_mlx.memory.block_pool import BlockPoolAllocator, PoolConfig
from veloxquant_mlx.serving.accounting import PoolSettings
from veloxquant_mlx.serving.accounting.ledger import Ledger, Share, room

if TYPE_CHECKING:
    from veloxquant_mlx.serving.accounting.account import Account

pytestmark = pytest.mark.timeout(60)

CONFIGS = st.builds(
    PoolConfig,
    block_size=st.sampled_from([1, 4]),
    n_blocks=st.integers(0, 60),
    separate_kv=st.booleans(),
    grow_on_exhaustion=st.booleans(),
    max_blocks=st.one_of(st.none(), st.integers(0, 90)),
)
# Which share, whose its rows are, blocks a row, filled slots a row in percent of those.
PUTS = st.tuples(
    st.integers(0, 3),
    st.lists(st.integers(0, 3), max_size=3),
    st.integers(0, 9),
    st.integers(0, 100),
)
MARKS = st.tuples(st.integers(0, 3), st.booleans())


def filled(pool: BlockPoolAllocator) -> list[int]:
    """Token slots of each stream that hold tokens, by the pool's books."""
    size = pool.config.block_size
    return [(s.managed - s.n_free) * size - s.slack for s in pool._streams]


class Naive:
    """What each account takes up, added up anew from all shares."""

    def __init__(self) -> None:
        self.shares: dict[int, tuple[list[int], int, int]] = {}

    def wanted(self) -> Counter[int]:
        """Blocks in each stream by account."""
        return Counter({i: n for i, n in self._sums(1).items() if n})

    def filled(self) -> Counter[int]:
        """Filled slots in each stream by account."""
        return self._sums(2)

    def _sums(self, field: int) -> Counter[int]:
        sums: Counter[int] = Counter()
        for share in self.shares.values():
            for i in share[0]:
                sums[i] += share[field]  # type: ignore[operator]
        return sums


@given(config=CONFIGS, steps=st.lists(st.one_of(PUTS, MARKS), max_size=25))
@settings(max_examples=150, deadline=None)
def test_the_ledger_is_the_naive_sum(config: PoolConfig, steps: list[Any]) -> None:
    """After each change: what is held and what is short make up what is taken up, and no more."""
    pool = BlockPoolAllocator(config)
    ledger, naive = Ledger(pool), Naive()
    accounts: list[Account] = [ledger.open() for _ in range(4)]
    shares = [Share() for _ in range(4)]
    excess, total = 0, 0
    for step in steps:
        if len(step) == 2:
            ledger.keep(accounts[step[0]], cached=step[1])
        else:
            at, rows, n_blocks, percent = step
            n_filled = n_blocks * config.block_size * percent // 100
            naive.shares[at] = (rows, n_blocks, n_filled)
            ledger.put(shares[at], tuple([accounts[i] for i in rows]), n_blocks, n_filled)
        ledger.settle()
        ledger.count_excess()
        total += max(0, ledger.n_excess - excess)
        excess = ledger.n_excess
        check(pool, ledger, naive, accounts)
        assert ledger.n_excess_total == total
    for share in shares:
        ledger.put(share, (), 0, 0)
    ledger.settle()
    assert pool.stats.blocks_in_use() == 0
    assert (ledger.n_excess, ledger.n_running, ledger.n_cached()) == (0, 0, 0)
    assert not pool._owners


def check(pool: BlockPoolAllocator, ledger: Ledger, naive: Naive, accounts: list[Account]) -> None:
    """Compare all there is to compare."""
    wanted = naive.wanted()
    held = {i: len(pool.blocks_for(account.owner)) for i, account in enumerate(accounts)}
    for i, account in enumerate(accounts):
        assert account.n_wanted == wanted[i]
        assert held[i] == 2 * account.n_held <= 2 * wanted[i]
    assert sum(held.values()) == pool.stats.blocks_in_use()
    assert sum(held.values()) + ledger.n_excess == 2 * wanted.total()
    assert ledger.n_excess == 0 or room(pool) == 0
    size = pool.config.block_size
    told = sum(min(n, held[i] // 2 * size) for i, n in naive.filled().items())
    assert sum(filled(pool)) == 2 * told
    cached = {a.owner for i, a in enumerate(accounts) if a.is_cached and held[i]}
    marked = pool._cached.marks.items()
    assert {owner for owner, first in marked if pool._owners.get(owner) is first} == cached
    assert pool._cached.n_blocks() == ledger.n_cached()
    assert ledger.n_running + len(ledger._cached) == len(wanted)


@given(config=CONFIGS, n_taken=st.integers(0, 30), n_keys=st.integers(0, 30))
@settings(max_examples=100, deadline=None)
def test_room_is_what_can_be_had(config: PoolConfig, n_taken: int, n_keys: int) -> None:
    """So many blocks in each stream can be allocated, and not one more."""
    pool = BlockPoolAllocator(config)
    size = config.block_size
    n = min(n_taken, room(pool))
    if n:
        pool.allocate_kv(n * size, "some")
    stream = "k" if config.separate_kv else "kv"
    if free := min(n_keys, pool.n_free(stream)):
        pool.allocate(stream, free * size, "keys alone")
    n = room(pool)
    if config.grow_on_exhaustion and config.max_blocks is None:
        n = 1000
    else:
        with pytest.raises(BlockPoolExhaustedError):
            pool.allocate_kv((n + 1) * size, "too many")
    if n:
        pool.allocate_kv(n * size, "all")
    assert pool.stats.n_exhausted <= 1


def test_the_first_to_be_short_is_the_first_to_be_charged() -> None:
    """What comes free goes to whoever waits the longest."""
    pool = BlockPoolAllocator(PoolConfig(block_size=1, n_blocks=8))
    ledger = Ledger(pool)
    accounts = [ledger.open() for _ in range(3)]
    shares = [Share() for _ in range(3)]
    for account, share in zip(accounts, shares, strict=True):
        ledger.put(share, (account,), 3, 0)
        ledger.settle()
    assert [account.n_held for account in accounts] == [3, 1, 0]
    assert ledger.n_excess == 10
    ledger.put(shares[0], (), 0, 0)
    ledger.settle()
    assert [account.n_held for account in accounts] == [0, 3, 1]
    assert ledger.n_excess == 4


# -- --pool ----------------------------------------------------------------------------------------


def test_settings_say_all_that_a_pool_has() -> None:
    """Every key, and what is left out is as in a pool's own defaults."""
    text = "blocks=64, block-size=8,separate-kv=no,grow=yes,max-blocks=128,name=kv"
    parsed = PoolSettings.parse(text)
    assert parsed.name == "kv"
    assert parsed.config == PoolConfig(8, 64, False, True, 128)
    assert PoolSettings.parse("blocks=5") == PoolSettings(PoolConfig(n_blocks=5))
    assert PoolSettings.parse("blocks=5,max-blocks=9").config.grow_on_exhaustion


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "blocks, block-size"),
        ("block-size=4", "blocks=... must be given"),
        ("blocks=many", "whole number"),
        ("blocks=4,blocks=5", "twice"),
        ("blocks=4,grow=maybe", "yes or no"),
        ("blocks=4,size=4", "'size=4' is none of"),
        ("blocks=-4", ">= 0"),
        ("blocks=4,grow=no,max-blocks=9", "may not"),
    ],
)
def test_settings_say_what_is_wrong(text: str, reason: str) -> None:
    """One line, and what would be right."""
    with pytest.raises(ValueError, match=reason):
        PoolSettings.parse(text)
