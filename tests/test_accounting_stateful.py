"""The account of mlx-lm's real batch generator and prompt cache, against the caches that live."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

pytest.importorskip("mlx_lm")

from tests.test_pool_generation import made
from veloxquant_mlx.memory.block_pool import BlockPoolAllocator, PoolConfig
from veloxquant_mlx.serving import Watch, stop_watching
from veloxquant_mlx.serving.accounting import Accounting

pytestmark = pytest.mark.timeout(180)

lm: Any = import_module("mlx_lm.generate")
stock: Any = import_module("mlx_lm.models.cache")

SIZE = 16
WORDS = 8  # a small vocabulary, so that prompts have beginnings in common
LAYERS = 2
TINY: dict[str, Any] = {
    "hidden_size": 8,
    "num_hidden_layers": LAYERS,
    "intermediate_size": 8,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-5,
    "vocab_size": WORDS,
    "tie_word_embeddings": False,
}
MODEL = made("llama", **TINY)


def blocks_of(caches: list[Any]) -> int:
    """Blocks over both streams of these plain caches: rows x ceil(capacity / block size)."""
    return sum(
        2 * cache.keys.shape[0] * -(-cache.keys.shape[2] // SIZE)
        for cache in caches
        if cache.keys is not None
    )


class Machine(RuleBasedStateMachine):
    """Requests come, run, finish and are cancelled; entries are kept, hit and evicted.

    What the truth is, is read off mlx-lm's own structures, each cache object once.
    """

    n_blocks = 1 << 16

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPoolAllocator(PoolConfig(block_size=SIZE, n_blocks=self.n_blocks))
        self.accounting = Accounting(self.pool, "test")
        self.watch = Watch(accounting=self.accounting)
        self.watch.start()
        self.kept = stock.LRUPromptCache(max_size=4)
        self.held: list[list[Any]] = []
        self.owner_of: dict[int, str] = {}
        self.generator: Any = None

    @initialize(prefill=st.integers(1, 3), completion=st.integers(1, 5), step=st.integers(3, 40))
    def open(self, prefill: int, completion: int, step: int) -> None:
        """A batch generator of some size."""
        self.generator = lm.BatchGenerator(
            MODEL,
            max_tokens=4,
            prefill_batch_size=prefill,
            completion_batch_size=max(prefill, completion),
            prefill_step_size=step,
        )

    # -- requests -----------------------------------------------------------------------------

    @rule(seed=st.integers(0, 99), n=st.integers(1, 90), most=st.sampled_from([1, 3, 20, 300]))
    def ask(self, seed: int, n: int, most: int) -> None:
        """A request, which takes from the prompt cache what that has."""
        prompt = [random.Random(seed % 4).randrange(1, WORDS) for _ in range(n)]
        caches, rest = self.kept.fetch_nearest_cache("m", prompt)
        if not rest:  # as the server does: something must be left to be processed
            caches, rest = None, prompt
        done = prompt[: len(prompt) - len(rest)]
        self.generator.insert([rest], [most], caches=[caches], all_tokens=[done])

    # By index: hypothesis keeps what it draws, and caches would live for ever.

    @precondition(lambda self: self.held)
    @rule(at=st.integers(0, 3), n=st.integers(1, 3))
    def ask_with_held(self, at: int, n: int) -> None:
        """Several requests on from caches that the program keeps, and goes on keeping."""
        caches = self.held[at % len(self.held)]
        self.generator.insert([[1, 2, 3]] * n, caches=[caches] * n)

    @rule(n=st.integers(1, 12))
    def step(self, n: int) -> None:
        """Rounds; what finishes goes into the prompt cache, as in the server."""
        for _ in range(n):
            prompts, generated = self.generator.next()
            for response in prompts:
                if response.end_of_segment and not response.end_of_prompt and response.uid % 2:
                    self._keep(response.uid)
            for response in generated:
                if response.finish_reason is not None and response.uid % 3:
                    self.kept.insert_cache("m", response.all_tokens[:], response.prompt_cache)

    def _keep(self, uid: int) -> None:
        for caches, tokens in self.generator.extract_cache([uid]).values():
            self.kept.insert_cache("m", tokens[:], caches, cache_type="user")

    @precondition(lambda self: self.generator and self._uids())
    @rule(first=st.integers(0, 9), every=st.integers(1, 4))
    def cancel(self, first: int, every: int) -> None:
        """Some requests end, wherever they are."""
        uids = self._uids()
        self.generator.remove(uids[first % len(uids) :: every])

    @precondition(lambda self: self.generator and self._uids() and len(self.held) < 4)
    @rule(at=st.integers(0, 9))
    def extract(self, at: int) -> None:
        """The program takes a copy of a row, and keeps it."""
        uids = self._uids()
        for caches, _ in self.generator.extract_cache([uids[at % len(uids)]]).values():
            self.held.append(caches)

    # -- caches by themselves -----------------------------------------------------------------

    @precondition(lambda self: len(self.held) < 4)
    @rule(n=st.integers(1, 300), most=st.integers(1, 5))
    def generate(self, n: int, most: int) -> None:
        """A sequence by itself, whose caches the program keeps."""
        caches = stock.make_prompt_cache(MODEL)
        prompt = lm.mx.array([1 + i % 7 for i in range(n)])
        list(lm.generate_step(prompt, MODEL, max_tokens=most, prompt_cache=caches))
        self.held.append(caches)

    @precondition(lambda self: 0 < len(self.held) < 4)
    @rule(at=st.integers(0, 3))
    def copy(self, at: int) -> None:
        """A copy that no event tells of."""
        self.held.append(copy.deepcopy(self.held[at % len(self.held)]))

    @precondition(lambda self: self.held)
    @rule(at=st.integers(0, 3))
    def drop(self, at: int) -> None:
        """The program lets go."""
        del self.held[at % len(self.held)]

    @precondition(lambda self: self.held)
    @rule(at=st.integers(0, 3), seed=st.integers(0, 3))
    def keep_held(self, at: int, seed: int) -> None:
        """Caches that the program keeps go into the prompt cache as well."""
        caches = self.held[at % len(self.held)]
        if not any(caches[0] is cache for cache in self._entries()):
            tokens = [random.Random(seed).randrange(1, WORDS) for _ in range(caches[0].offset)]
            self.kept.insert_cache("m", tokens, caches)

    @rule(n=st.integers(0, 3))
    def evict(self, n: int) -> None:
        """The prompt cache makes room."""
        self.kept.trim_to(n_sequences=n)

    # -- what must hold -----------------------------------------------------------------------

    def _uids(self) -> list[int]:
        generator = self.generator
        waiting = [sequence[0] for sequence in generator._unprocessed_sequences]
        return [*waiting, *generator._prompt_batch.uids, *generator._generation_batch.uids]

    def _entries(self) -> list[Any]:
        return [
            cache
            for order in self.kept._lru._lrus.values()
            for model, tokens in order
            for cache in self.kept._trie.get(model, tokens).prompt_cache
        ]

    def _live(self) -> list[Any]:
        generator = self.generator
        batches = [*generator._prompt_batch.prompt_cache, *generator._generation_batch.prompt_cache]
        waiting = [c for s in generator._unprocessed_sequences for c in s[3]]
        held = [cache for caches in self.held for cache in caches]
        every = [*batches, *waiting, *held, *self._entries()]
        return list({id(cache): cache for cache in every}.values())

    @invariant()
    def charged_is_what_lives(self) -> None:
        """Every block stands for a row of a live cache, and every row is charged once."""
        if self.generator is None:
            return
        for _ in range(2):  # what nobody told of is charged at the second look
            self.accounting.refresh()
        ledger = self.accounting._books.ledger
        live = blocks_of(self._live())
        assert self.pool.stats.blocks_in_use() + ledger.n_excess == live
        assert self.pool._cached.n_blocks() == ledger.n_cached() <= blocks_of(self._entries())
        if not ledger.n_excess:
            assert ledger.n_cached() == blocks_of(self._entries())
        usage = self.accounting.bytes.usage()
        assert usage.resident_bytes == sum(cache.nbytes for cache in self._live())
        assert usage.fp16_equivalent_bytes * 2 == usage.resident_bytes  # of fp32
        assert usage.logical_bytes <= usage.resident_bytes
        assert not self.watch.seams.errors

    @invariant()
    def each_row_is_one_request(self) -> None:
        """An owner for each row, the same in all layers and for as long as it runs."""
        if self.generator is None:
            return
        holdings = self.accounting._books.holdings
        for batch in (self.generator._prompt_batch, self.generator._generation_batch):
            owners = [holdings.of(cache).owners for cache in batch.prompt_cache]  # type: ignore[union-attr]
            for of_layer in owners:
                assert of_layer == owners[0]
                assert of_layer is not None and len(of_layer) == len(batch.uids)
            names = [account.owner for account in (owners[0] or ()) if owners] if owners else []
            assert len(set(names)) == len(names)
            for uid, name in zip(batch.uids, names, strict=False):
                assert self.owner_of.setdefault(uid, name) == name

    def teardown(self) -> None:
        """All blocks come back, and nobody is left."""
        try:
            if self.generator is not None:
                self.generator.remove(self._uids())
                self.held.clear()
                self.kept.trim_to(n_sequences=0)
                self.accounting.refresh()
                assert self.pool.stats.blocks_in_use() == 0
                assert not self.pool._owners
                holdings = self.accounting._books.holdings
                assert not (holdings._live or holdings._growing or holdings.n_pending)
                assert self.accounting.snapshot().excess_blocks == 0  # type: ignore[union-attr]
        finally:
            self.watch.stop()


class SmallMachine(Machine):
    """The same, with a pool that is too small for most of it: the rest is in excess."""

    n_blocks = 160


TestAccount = Machine.TestCase
TestAccount.settings = settings(max_examples=15, stateful_step_count=25, deadline=None)
TestSmallAccount = SmallMachine.TestCase
TestSmallAccount.settings = settings(max_examples=10, stateful_step_count=25, deadline=None)


@pytest.fixture(autouse=True, scope="module")
def unwatched() -> Iterator[None]:
    """No other test's watch is in the way, and none is left."""
    stop_watching()
    yield
    stop_watching()
