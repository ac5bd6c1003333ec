"""Random histories of the block pool, side by side with the naive one.

After every step all books are compared: counters, free blocks, who holds what in which order,
the fields and the identity of every block, the leases, the history.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.naive_pool import NaiveBlock, NaiveLease, NaivePool, Owner
from veloxquant_mlx.core.exceptions import ArgumentTypeError
from veloxquant_mlx.memory.audit import audit
from veloxquant_mlx.memory.block_pool import Block, BlockPoolAllocator, PoolConfig

BLOCK_SIZE = 4
COUNTERS = (
    "n_blocks",
    "n_allocations",
    "n_frees",
    "n_reused",
    "n_exhausted",
    "n_grown",
    "n_retired",
    "peak_blocks_in_use",
)
NEVER_FALLING = tuple(name for name in COUNTERS if name != "n_blocks")

OWNERS = (0, 1, -7, 2**70, "1", "request", "r" * 80)
# A few owners do most of the work, so that their calls meet.
owners = st.sampled_from((1,) * 6 + ("1",) * 3 + OWNERS)
formats = st.sampled_from(["fp16", "int4", "x" * 64])
streams = st.sampled_from(["k", "v", "kv"])
n_tokens = st.one_of(
    st.sampled_from([1, BLOCK_SIZE]),
    st.integers(1, 2 * BLOCK_SIZE),
    st.integers(1, 14 * BLOCK_SIZE),
    st.integers(15 * BLOCK_SIZE, 60 * BLOCK_SIZE),
)

# What a caller may hold in its hand: mostly good blocks, now and then anything else.
KINDS = ("held", "freed", "retired", "foreign", "foreign copy", "copy", "deep", "pickled", "made")
picks = st.tuples(st.sampled_from(("held",) * 12 + KINDS), st.integers(0, 40))
pick_lists = st.lists(picks, max_size=8)

not_ints = st.sampled_from([None, True, False, 1.0, 2.5, float("nan"), "3", [1], (1,), b"1"])
not_owners = st.sampled_from([None, True, False, 1.0, float("nan"), b"r", ("r",), [1], object()])
not_formats = st.sampled_from([None, 16, True, b"fp16", ["fp16"], "", "x" * 65])
not_streams = st.sampled_from(["", "K", "garbage", "vk", None, 1, True, b"k", ["k"]])
not_block_lists: st.SearchStrategy[Any] = st.sampled_from(
    [None, 5, 1.5, True, "blocks", b"ab", [None], [0], ["b"], [[]]]
)


def calls(name: str, *arguments: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Draw calls of one method."""
    return st.tuples(st.just(name), st.tuples(*arguments))


not_counts = not_ints | st.integers(-3, 0)
one_block = st.just(BLOCK_SIZE)
bad_calls = st.one_of(
    calls("allocate", st.just("k"), not_counts, owners),
    calls("allocate", st.just("k"), one_block, not_owners),
    calls("allocate", st.just("k"), one_block, owners, not_formats),
    calls("allocate", not_streams, one_block, owners),
    calls("allocate_kv", not_counts, owners),
    calls("allocate_kv", one_block, not_owners),
    calls("allocate_kv", one_block, owners, not_formats),
    calls("shrink", st.just("k"), not_ints | st.just(-1)),
    calls("shrink", not_streams, st.just(0)),
    calls("n_free", not_streams),
    calls("free_all", not_owners),
    calls("blocks_for", not_owners),
    calls("register_owner", not_owners),
    calls("release_owner", not_owners),
    calls("mark_cached", not_owners),
    calls("free", not_block_lists),
    calls("mark_used", not_ints, st.just(1)),
)


@st.composite
def configs(draw: st.DrawFn) -> PoolConfig:
    """Every kind of pool: one or two free lists, odd and tiny sizes, growing, capped."""
    n_blocks = draw(st.sampled_from([0, 1, 2, 5, 16, 39, 70, 150]))
    grow = draw(st.booleans())
    spare = draw(st.sampled_from([None, 0, 3, 12, 70]))
    return PoolConfig(
        block_size=draw(st.sampled_from([1, BLOCK_SIZE])),
        n_blocks=n_blocks,
        separate_kv=draw(st.booleans()),
        grow_on_exhaustion=grow,
        max_blocks=None if spare is None else max(1, n_blocks + spare),
    )


class RetireListener:
    """Remembers the ids that a pool retired."""

    def __init__(self) -> None:
        self.block_ids: list[int] = []

    def drop_retired(self, block_ids: list[int]) -> None:
        """Take the ids of one shrink."""
        self.block_ids += block_ids


Pair = tuple[Block, NaiveBlock]


class PoolMachine(RuleBasedStateMachine):
    """Drives a real and a naive pool with the same calls."""

    @initialize(config=configs())
    def build(self, config: PoolConfig) -> None:
        """Build both pools, and a pair of strangers of the same shape."""
        self.real, self.naive = BlockPoolAllocator(config), NaivePool(config)
        self.listener = RetireListener()
        self.real.add_retire_listener(self.listener)
        self.pairs: dict[int, Pair] = {}
        self.lease_pairs: list[tuple[Any, NaiveLease]] = []
        self.n_extra_records = 0
        self.last = dict.fromkeys(NEVER_FALLING, 0)
        stranger_config = PoolConfig(n_blocks=4, separate_kv=config.separate_kv)
        self.strangers = BlockPoolAllocator(stranger_config), NaivePool(stranger_config)
        foreign = (pool.allocate("k", 32, 1) for pool in self.strangers)
        self.foreign: list[Pair] = list(zip(*foreign, strict=True))

    # -- helpers ------------------------------------------------------------------------------

    def both(self, real: Callable[[], Any], naive: Callable[[], Any]) -> tuple[Any, Any] | None:
        """Call both; the outcomes must be of the same kind. None when both raised."""
        try:
            expected = naive()
        except Exception as error:
            wanted = type(error)
            with pytest.raises(wanted) as caught:
                real()
            same_kind = ArgumentTypeError if wanted is ArgumentTypeError else ValueError
            assert isinstance(caught.value, same_kind) or type(caught.value) is wanted
            assert str(caught.value), "an error says what was wrong"
            return None
        return real(), expected

    def pick(self, kind: str, index: int) -> Pair | None:
        """Return the pair of handles that the draw stands for, if there is one."""
        if kind in ("foreign", "foreign copy"):
            real, naive = self.foreign[index % len(self.foreign)]
            return (real, naive) if kind == "foreign" else (copy.copy(real), naive.detached())
        if kind == "made":
            return Block(index, "k", "fp16", 1, 1, True), NaiveBlock(index, made=True)
        known = list(self.pairs.values())
        if kind == "held":
            known = [p for p in known if p[1].owner is not None]
        elif kind == "retired":
            known = [p for p in known if p[1].block_id in self.naive.retired]
        elif kind == "freed":
            known = [p for p in known if p[1].owner is None]
        if not known:
            return None
        real, naive = known[index % len(known)]
        copiers: dict[str, Callable[[Block], Block]] = {
            "copy": copy.copy,
            "deep": copy.deepcopy,
            "pickled": _pickled,
        }
        return (copiers[kind](real), naive.detached()) if kind in copiers else (real, naive)

    def pick_all(self, choices: list[tuple[str, int]]) -> tuple[list[Block], list[NaiveBlock]]:
        """Return the real and the naive handles of a list of draws."""
        pairs = [p for p in (self.pick(*choice) for choice in choices) if p is not None]
        return [real for real, _ in pairs], [naive for _, naive in pairs]

    def learn(self, real: Iterable[Block], naive: Iterable[NaiveBlock]) -> None:
        """Take up handles that were just handed out; one object an id for ever."""
        for block, twin in zip(real, naive, strict=True):
            assert block.block_id == twin.block_id
            assert self.pairs.setdefault(block.block_id, (block, twin)) == (block, twin)
            if not any(lease is twin.lease for _, lease in self.lease_pairs):
                assert twin.lease is not None
                assert all(block.lease is not old for old, _ in self.lease_pairs), "a new holding"
                self.lease_pairs.append((block.lease, twin.lease))

    def settle_repeats(self, naive: list[NaiveBlock]) -> None:
        """A handle given twice may be refused under either reason: adopt the real one's."""
        if len({id(b) for b in naive}) < len(naive):
            assert sum(self.real.rejected.values()) == sum(self.naive.rejected.values())
            self.naive.rejected.update(self.real.rejected)

    def allow_records(self, n_before: int, n_parts: int) -> None:
        """A call on several leases may enter the history once, or once a part."""
        n_extra = len(self.real.history) - n_before - 1
        assert 0 <= n_extra < n_parts
        self.n_extra_records += n_extra

    # -- calls that may succeed ---------------------------------------------------------------

    @rule(stream=streams, n_tokens=n_tokens, owner=owners, format=formats)
    def allocate(self, stream: str, n_tokens: int, owner: Owner, format: str) -> None:
        """Hand out blocks of one stream."""
        arguments = (stream, n_tokens, owner, format)
        outcome = self.both(
            lambda: self.real.allocate(*arguments), lambda: self.naive.allocate(*arguments)
        )
        if outcome is not None:
            assert isinstance(outcome[0], list)
            self.learn(*outcome)

    @rule(
        index=st.integers(0, 9),
        fills=st.lists(st.integers(1, BLOCK_SIZE), min_size=1, max_size=6),
        owner=owners,
    )
    def decode(self, index: int, fills: list[int], owner: Owner) -> None:
        """Grow one holding, the newest preferred, a block at a time."""
        live = self.naive.leases[::-1]
        lease = live[index % len(live)] if live else NaiveLease(owner, "k", "fp16")
        for fill in fills:
            # Equal text, another object: nothing may hang on identity.
            fmt = lease.format if fill % 2 else "".join(list(lease.format))
            self.allocate(lease.stream, fill, lease.owner, fmt)

    @rule(
        stream=st.sampled_from(["k", "v"]),
        prompt=n_tokens,
        n_steps=st.integers(0, 4),
        owner=owners,
        registered=st.booleans(),
        by_list=st.booleans(),
    )
    def serve(
        self,
        stream: str,
        prompt: int,
        n_steps: int,
        owner: Owner,
        registered: bool,
        by_list: bool,
    ) -> None:
        """One request from its prompt to its end, and whether its id is free after that."""
        if registered:
            self.register_owner(owner)
        for n in [prompt] + n_steps * [BLOCK_SIZE]:
            self.allocate(stream, n, owner, "fp16")
        if by_list:
            self.free_own(owner, reverse=True)
        else:
            self.free_all(owner)
        self.register_owner(owner)
        self.release_owner(owner)

    @rule(n_tokens=n_tokens, owner=owners, format=formats, part=st.sampled_from([None, 0, 0.5, 1]))
    def allocate_kv(self, n_tokens: int, owner: Owner, format: str, part: float | None) -> None:
        """Hand out blocks of both streams, or none."""
        n_filled = None if part is None else int(n_tokens * part)
        n_records = len(self.real.history)
        outcome = self.both(
            lambda: self.real.allocate_kv(n_tokens, owner, format, n_filled=n_filled),
            lambda: self.naive.allocate_kv(n_tokens, owner, format, n_filled=n_filled),
        )
        if outcome is not None:
            for real, naive in zip(*outcome, strict=True):
                assert isinstance(real, list)
                self.learn(real, naive)
            self.allow_records(n_records, 2)

    @rule(choices=pick_lists, shape=st.sampled_from([list, tuple, iter]), owner=owners | st.none())
    def free(self, choices: list[tuple[str, int]], shape: Any, owner: Owner | None) -> None:
        """Give back any mixture of handles, with and without naming the owner."""
        real, naive = self.pick_all(choices)
        if owner is None:
            outcome = self.both(
                lambda: self.real.free(shape(real)), lambda: self.naive.free(shape(naive))
            )
        else:
            outcome = self.both(
                lambda: self.real.free(shape(real), owner=owner),
                lambda: self.naive.free(shape(naive), owner=owner),
            )
        assert outcome == (None, None)
        self.settle_repeats(naive)

    @rule(owner=owners, reverse=st.booleans())
    def free_own(self, owner: Owner, reverse: bool) -> None:
        """Give back all that an owner holds, one list."""
        step = -1 if reverse else 1
        self.real.free(self.real.blocks_for(owner)[::step], owner=owner)
        self.naive.free(self.naive.blocks_for(owner)[::step], owner=owner)

    @rule(owner=owners)
    def free_all(self, owner: Owner) -> None:
        """Give back all that an owner holds, by name."""
        n_leases = sum(lease.owner == owner for lease in self.naive.leases)
        n_records = len(self.real.history)
        outcome = self.both(lambda: self.real.free_all(owner), lambda: self.naive.free_all(owner))
        assert outcome == (None, None)
        if n_leases:
            self.allow_records(n_records, n_leases)

    def draw_leases(self, indices: list[int]) -> tuple[list[Any], list[NaiveLease]]:
        """Return the real and the naive leases of a list of draws, dead ones among them."""
        n = len(self.lease_pairs)
        chosen = [self.lease_pairs[-1 - i % n] for i in indices] if n else []
        return [real for real, _ in chosen], [naive for _, naive in chosen]

    @rule(choices=pick_lists, indices=st.lists(st.integers(0, 5), max_size=3), later=st.booleans())
    def free_held(self, choices: list[tuple[str, int]], indices: list[int], later: bool) -> None:
        """Give back what is still held under given leases, now or at the next call."""
        real, naive = self.pick_all(choices)
        real_leases, naive_leases = self.draw_leases(indices)
        if later:
            assert self.real.free_held_later(real, *real_leases) is None
            self.naive.free_held_later(naive, *naive_leases)
        else:
            n_freed = self.real.free_held(real, *real_leases)
            assert n_freed == self.naive.free_held(naive, *naive_leases)

    @rule(owner=owners, stream=streams, n_tokens=n_tokens)
    def queue_then_allocate(self, owner: Owner, stream: str, n_tokens: int) -> None:
        """What was queued is free before the next allocation looks."""
        held = [pair for pair in self.pairs.values() if pair[1].owner == owner]
        leases = [pair for pair in self.lease_pairs if pair[1].owner == owner]
        self.real.free_held_later([b for b, _ in held], *(lease for lease, _ in leases))
        self.naive.free_held_later([b for _, b in held], *(lease for _, lease in leases))
        self.allocate(stream, n_tokens, owner, "fp16")

    @rule(stream=streams, target_free=st.integers(0, 12) | st.integers(0, 100))
    def shrink(self, stream: str, target_free: int) -> None:
        """Retire free blocks; which ones is the pool's choice, the rest keep their order."""
        seen = len(self.listener.block_ids)
        try:
            n_retired = self.real.shrink(stream, target_free)
        except ValueError:
            with pytest.raises(ValueError):
                self.naive.shrink(stream, target_free)
            return
        victims = self.listener.block_ids[seen:]
        assert n_retired == len(victims)
        assert self.naive.shrink(stream, target_free, victims=victims) == n_retired

    @rule(choice=picks, n_used=st.integers(-1, BLOCK_SIZE + 1))
    def mark_used(self, choice: tuple[str, int], n_used: int) -> None:
        """Set the fill of any handle."""
        pair = self.pick(*choice)
        if pair is not None:
            before = _fields(pair[0])
            self.both(
                lambda: self.real.mark_used(pair[0], n_used),
                lambda: self.naive.mark_used(pair[1], n_used),
            )
            if pair[1].pool is not self.naive or pair[1].block_id in self.naive.retired:
                assert _fields(pair[0]) == before, "no book of this pool: nothing changes"

    @rule(choice=picks, owner=owners | st.none())
    def refusal(self, choice: tuple[str, int], owner: Owner | None) -> None:
        """Ask the books about any handle."""
        pair = self.pick(*choice)
        if pair is not None:
            reason = self.real.refusal(pair[0], owner=owner)
            assert reason == self.naive.refusal(pair[1], owner=owner)

    @rule(owner=owners)
    def register_owner(self, owner: Owner) -> None:
        """Register by hand."""
        self.both(lambda: self.real.register_owner(owner), lambda: self.naive.register_owner(owner))

    @rule(owner=owners)
    def release_owner(self, owner: Owner) -> None:
        """Take a registration back."""
        self.both(lambda: self.real.release_owner(owner), lambda: self.naive.release_owner(owner))

    @rule(owner=owners, cached=st.booleans())
    def mark_cached(self, owner: Owner, cached: bool) -> None:
        """Say that a prompt cache keeps what an owner holds, or no longer."""
        real = self.real.mark_cached(owner, cached=cached)
        assert real is self.naive.mark_cached(owner, cached=cached)

    @rule(indices=st.lists(st.integers(0, 5), max_size=3), n_tokens=st.integers(-60, 60))
    def add_filled(self, indices: list[int], n_tokens: int) -> None:
        """Move the token fill of some leases."""
        real, naive = self.draw_leases(indices)
        self.real.add_filled(n_tokens, *real)
        self.naive.add_filled(n_tokens, *naive)

    @rule(prefix=st.sampled_from([None, "pool", "a:b_c"]))
    def to_prometheus(self, prefix: str | None) -> None:
        """The text says the same figures, unrounded."""
        arguments = () if prefix is None else (prefix,)
        text = self.real.stats.to_prometheus(*arguments)
        assert _parse(text) == self.naive.stats.samples(*arguments)

    @rule(owner=owners)
    def spoil_what_was_returned(self, owner: Owner) -> None:
        """Lists, dicts and deques that the pool returned are the caller's own."""
        self.real.blocks_for(owner).clear()
        self.real.history.clear()

    # -- calls that must raise ----------------------------------------------------------------

    @rule(call=bad_calls)
    def bad_argument(self, call: tuple[str, tuple[Any, ...]]) -> None:
        """One argument of a wrong type or out of range."""
        name, arguments = call
        self.must_raise(lambda pool: getattr(pool, name)(*arguments))

    @rule(choices=pick_lists, owner=not_owners, intruder=not_block_lists, fill=not_ints)
    def bad_company(
        self, choices: list[tuple[str, int]], owner: Any, intruder: Any, fill: Any
    ) -> None:
        """Handles, good ones among them, in calls that are wrong as a whole."""
        real, naive = self.pick_all(choices)
        if owner is not None:
            self.must_raise2(
                lambda: self.real.free(real, owner=owner),
                lambda: self.naive.free(naive, owner=owner),
            )
        if isinstance(intruder, list):
            for shape in (list, iter):
                self.must_raise2(
                    partial(self.real.free, shape([*real, *intruder])),
                    partial(self.naive.free, shape([*naive, *intruder])),
                )
        for block, twin in zip(real, naive, strict=True):
            alone: Any = block
            self.must_raise2(partial(self.real.free, alone), partial(self.naive.free, twin))
            self.must_raise2(
                partial(self.real.mark_used, block, fill), partial(self.naive.mark_used, twin, fill)
            )

    def must_raise(self, call: Callable[[Any], Any]) -> None:
        """Both pools refuse the call."""
        self.must_raise2(lambda: call(self.real), lambda: call(self.naive))

    def must_raise2(self, real: Callable[[], Any], naive: Callable[[], Any]) -> None:
        """Both calls are refused."""
        assert self.both(real, naive) is None

    # -- the books ----------------------------------------------------------------------------

    @invariant()
    def figures_agree(self) -> None:
        """Counters, sums and free blocks."""
        stats, expected = self.real.stats, self.naive.stats
        for shown in (stats, stats.snapshot()):
            _assert_same_figures(shown, expected)
        assert self.real.stats is stats, "one live object"
        managed = stats.n_blocks
        n_free = sum(self.real.n_free(s) for s in self.naive.streams)
        assert n_free + stats.blocks_in_use() == managed
        assert self.real.config.n_blocks + stats.n_grown - stats.n_retired == managed
        for stream in self.naive.streams:
            assert self.real.n_free(stream) == self.naive.n_free(stream)
        for name in NEVER_FALLING:
            assert getattr(stats, name) >= self.last[name]
            self.last[name] = getattr(stats, name)
        assert _nonzero(self.real.rejected) == _nonzero(self.naive.rejected)
        assert self.real._cached.n_blocks() == self.naive.n_cached()

    @invariant()
    def holdings_agree(self) -> None:
        """Who holds what, in which order, and what the handles say."""
        for owner in (*OWNERS, "nobody"):
            real, naive = self.real.blocks_for(owner), self.naive.blocks_for(owner)
            assert [b.block_id for b in real] == [b.block_id for b in naive]
            assert all(b is self.pairs[b.block_id][0] for b in real)
        for block, twin in self.pairs.values():
            assert (block.block_id, block.stream) == (twin.block_id, twin.stream)
            assert block.owner == twin.owner and type(block.owner) is type(twin.owner)
            assert block.ever_allocated is True
            assert type(block.n_used) is int
            if twin.block_id not in self.naive.retired:
                assert block.n_used == twin.n_used
            if twin.owner is not None:
                assert block.format == twin.format
                assert any(block.lease is r and twin.lease is n for r, n in self.lease_pairs)

    @invariant()
    def lists_and_sums_agree(self) -> None:
        """The pool's own audit, which reads its lists, finds nothing."""
        assert audit(self.real) == []

    @invariant()
    def leases_agree(self) -> None:
        """A dead lease stays dead."""
        for real, naive in self.lease_pairs:
            assert real.live is naive.live
            if naive.live:
                shown = (real.owner, real.stream, real.format)
                assert shown == (naive.owner, naive.stream, naive.format)

    @invariant()
    def histories_agree(self) -> None:
        """As many records, and the newest says the same."""
        real, naive = self.real.history, self.naive.history
        assert len(real) == len(naive) + self.n_extra_records
        if naive:
            _assert_same_figures(real[-1], naive[-1])

    @invariant()
    def strangers_are_untouched(self) -> None:
        """A pool never changes the blocks of another."""
        real, naive = self.strangers
        _assert_same_figures(real.stats, naive.stats)
        assert all(_fields(a) == _naive_fields(b) for a, b in self.foreign)

    def teardown(self) -> None:
        """Whatever happened, every block comes back once and can be handed out again."""
        if not hasattr(self, "real"):
            return
        for owner in OWNERS:
            self.free_all(owner)
        for stream in self.naive.streams:
            n = self.naive.n_free(stream)
            if n:
                self.allocate(stream, n * self.real.config.block_size, 1, "fp16")
        self.figures_agree()
        self.holdings_agree()


def _pickled(block: Block) -> Block:
    clone: Block = pickle.loads(pickle.dumps(block))
    return clone


def _nonzero(counts: Any) -> dict[str, int]:
    return {reason: n for reason, n in counts.items() if n}


def _fields(block: Block) -> tuple[object, ...]:
    return (block.block_id, block.stream, block.format, block.n_used, block.owner)


def _naive_fields(block: NaiveBlock) -> tuple[object, ...]:
    return (block.block_id, block.stream, block.format, block.n_used, block.owner)


def _assert_same_figures(real: Any, naive: Any) -> None:
    shown = {name: getattr(real, name) for name in COUNTERS}
    assert shown == {name: getattr(naive, name) for name in COUNTERS}
    assert real.blocks_in_use() == naive.blocks_in_use()
    assert real.fragmentation() == naive.fragmentation()


def _parse(text: str) -> dict[str, tuple[str, float]]:
    """Return {metric name: (type, value)}; every metric has its type line and one plain sample."""
    assert text.endswith("\n")
    types: dict[str, str] = {}
    samples: dict[str, tuple[str, float]] = {}
    for line in text.splitlines():
        words = line.split(" ")
        if words[:2] == ["#", "TYPE"]:
            assert types.setdefault(words[2], words[3]) == words[3]
        else:
            name, value = words
            assert name not in samples
            samples[name] = (types[name], float(value))
    return samples


# hypothesis makes the test case; its name is what pytest collects.
TestPoolHistories = PoolMachine.TestCase
TestPoolHistories.settings = settings(
    max_examples=250,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
# Long, since what fails is first made small. A hang is ended by it all the same.
TestPoolHistories.pytestmark = [pytest.mark.timeout(500)]  # type: ignore[attr-defined]
