"""The account of programs without a server: scripts, generators, drafts, files, and other mlx-lms."""

from __future__ import annotations

import gc
import logging
import threading
import weakref
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mlx_lm")

from tests.test_pool_generation import filled, made, prompt_of, tiny_llama
from veloxquant_mlx.memory.block_pool import BlockPoolAllocator, PoolConfig
from veloxquant_mlx.serving import Watch
from veloxquant_mlx.serving.accounting import Accounting, PoolSettings, account_for
from veloxquant_mlx.serving.accounting.books import _mend
from veloxquant_mlx.telemetry import take_snapshot

pytestmark = pytest.mark.timeout(60)

lm: Any = import_module("mlx_lm.generate")
stock: Any = import_module("mlx_lm.models.cache")

SIZE = 16
STEP = 2 * 2 * 256 // SIZE  # two streams, two layers, 256 tokens


class Watched:
    """This process, watched and charged to a pool of its own."""

    def __init__(self, n_blocks: int = 1 << 16, **options: Any) -> None:
        text = f"blocks={n_blocks},block-size={SIZE}"
        self.accounting = account_for(PoolSettings.parse(text), **options)
        self.pool = self.accounting.pool
        self.watch = Watch(accounting=self.accounting)
        self.books = self.accounting._books
        self.watch.start()

    def in_use(self) -> int:
        """Blocks that are charged as of the last event."""
        return self.pool.stats.blocks_in_use()

    def owners(self) -> list[str]:
        """Who is charged."""
        return [str(owner) for owner in self.pool._owners]

    def owner_of(self, cache: Any) -> str:
        """Whose a cache of one row is."""
        holding = self.books.holdings.of(cache)
        assert holding is not None and holding.owners is not None
        (account,) = holding.owners
        return account.owner


@pytest.fixture
def watched() -> Iterator[Watched]:
    """With room for everything."""
    one = Watched()
    yield one
    one.watch.stop()


# -- sequences by themselves -----------------------------------------------------------------------


def test_a_sequence_is_charged_step_by_step(watched: Watched) -> None:
    """By 256 tokens as its arrays grow, on the spot; its fill at a snapshot; all back at the end."""
    steps = lm.generate_step(prompt_of(200), tiny_llama(), max_tokens=400)
    next(steps)
    assert watched.in_use() == STEP
    for n, _ in zip(range(202, 260), steps, strict=False):  # tokens in the arrays
        assert watched.in_use() == (STEP if n <= 256 else 2 * STEP)
    assert len(watched.owners()) == 1
    take_snapshot()
    assert filled(watched.pool) == [2 * 259, 2 * 259]
    (told,) = [pool for pool in take_snapshot().pools if pool.name == watched.accounting.name]
    assert told.storage["resident"] == 2 * 2 * 512 * 32 * 4
    assert told.storage["logical"] == 2 * 2 * 259 * 32 * 4
    steps.close()
    del steps
    take_snapshot()
    assert (watched.in_use(), watched.owners()) == (0, [])


def test_a_script_keeps_its_caches_charged(watched: Watched) -> None:
    """A session over several turns is one owner, until its caches are dropped."""
    caches = stock.make_prompt_cache(tiny_llama())
    for _ in range(3):
        list(lm.generate_step(prompt_of(100), tiny_llama(), max_tokens=5, prompt_cache=caches))
        assert watched.in_use() == 2 * 2 * -(-caches[0].keys.shape[2] // SIZE)
    assert watched.owners() == [watched.owner_of(caches[0])] == [watched.owner_of(caches[1])]
    del caches
    take_snapshot()
    assert watched.in_use() == 0


def test_tokens_are_the_same(watched: Watched) -> None:
    """At temperature 0, with the account and without."""
    prompt, model = prompt_of(300), tiny_llama()
    with_account = [int(t) for t, _ in lm.generate_step(prompt, model, max_tokens=40)]
    watched.watch.stop()
    assert with_account == [int(t) for t, _ in lm.generate_step(prompt, model, max_tokens=40)]


def test_a_draft_model_is_the_same_request(watched: Watched) -> None:
    """Two lists of caches, one owner, whether the program made them or mlx-lm."""
    model, draft = tiny_llama(), tiny_llama(seed=4, layers=1)
    caches = stock.make_prompt_cache(model) + stock.make_prompt_cache(draft)
    for given in (caches, None):
        steps = lm.speculative_generate_step(
            prompt_of(240), model, draft, max_tokens=40, prompt_cache=given
        )
        for _ in range(5):
            next(steps)
        assert watched.in_use() == STEP * 3 // 2
        assert len(watched.owners()) == 1
        n = sum(1 for _ in steps)
        assert (n, watched.in_use()) == (35, STEP * 3)  # the draft's arrays grew as well
        caches.clear()
        del steps
        watched.accounting.refresh()
        assert watched.in_use() == 0


def test_quantised_caches_are_charged_no_more(
    watched: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    """What mlx-lm replaces on the way gives back, and what takes its place is named."""
    model = made(
        "llama",
        hidden_size=64,
        head_dim=64,
        num_hidden_layers=2,
        intermediate_size=64,
        num_attention_heads=1,
        rms_norm_eps=1e-5,
        vocab_size=128,
    )
    caches = stock.make_prompt_cache(model)
    steps = lm.generate_step(
        prompt_of(40), model, max_tokens=60, prompt_cache=caches, kv_bits=8, quantized_kv_start=60
    )
    next(steps)
    assert watched.in_use() == STEP
    assert sum(1 for _ in steps) == 59
    assert type(caches[0]).__name__ == "QuantizedKVCache"
    take_snapshot()
    assert watched.in_use() == 0
    (said,) = [r.getMessage() for r in caplog.records if "not charged" in r.getMessage()]
    assert "QuantizedKVCache" in said


def test_files_of_caches(watched: Watched, tmp_path: Path) -> None:
    """What is loaded is charged at once, and goes on as one request."""
    path = str(tmp_path / "saved.safetensors")
    caches = stock.make_prompt_cache(tiny_llama())
    list(lm.generate_step(prompt_of(60), tiny_llama(), max_tokens=3, prompt_cache=caches))
    stock.save_prompt_cache(path, caches, {"a": "b"})
    held = watched.in_use()
    loaded, metadata = stock.load_prompt_cache(path, return_metadata=True)
    assert metadata == {"a": "b"}
    assert watched.in_use() == 2 * held
    owner = watched.owner_of(loaded[0])
    assert owner == watched.owner_of(loaded[1]) != watched.owner_of(caches[0])
    list(lm.generate_step(prompt_of(4), tiny_llama(), max_tokens=3, prompt_cache=loaded))
    assert watched.owner_of(loaded[1]) == owner
    del loaded, caches
    take_snapshot()
    assert watched.in_use() == 0


def test_lists_of_caches_and_other_kinds(watched: Watched) -> None:
    """Plain caches inside of a `CacheList` are charged, its other parts are not."""
    both = stock.CacheList(stock.KVCache(), stock.RotatingKVCache(max_size=8))
    rows = lm.mx.zeros((1, 1, 20, 4))
    for part in both.caches:
        part.update_and_fetch(rows, rows)
    for _ in range(2):
        watched.accounting.refresh()
    assert watched.in_use() == STEP // 2
    copied = stock.CacheList.merge([both, both])
    del both
    gc.collect()
    for _ in range(2):
        watched.accounting.refresh()
    assert watched.in_use() == 2 * 2 * 2  # two rows of 20 tokens, cut to length
    del copied


# -- batches ---------------------------------------------------------------------------------------


def test_a_batch_generator_by_itself(watched: Watched) -> None:
    """Rows are charged while they run; a finished row's copy is charged until it is dropped."""
    generator = lm.BatchGenerator(tiny_llama(), completion_batch_size=4)
    prompts = [prompt_of(n).tolist() for n in (300, 20, 7)]
    uids = generator.insert(prompts, max_tokens=[3, 50, 50])
    finished: list[Any] = []
    while len(generator._generation_batch.uids) < 3 and not finished:
        _, generated = generator.next()
        finished += [r for r in generated if r.finish_reason]
    while not finished:
        _, generated = generator.next()
        finished += [r for r in generated if r.finish_reason]
    copy = finished[0].prompt_cache
    assert watched.owner_of(copy[0]) == watched.owner_of(copy[1])
    assert len(watched.owners()) == 3  # two rows, and the copy of the third
    del generated, finished
    generator.remove([uids[1]])
    rows = generator._generation_batch.prompt_cache[0].keys.shape
    assert rows[0] == 1
    watched.accounting.refresh()
    expected = 2 * 2 * (-(-rows[2] // SIZE) + -(-copy[0].keys.shape[2] // SIZE))
    assert watched.in_use() == expected
    del copy, generator
    take_snapshot()
    assert watched.in_use() == 0


def test_requests_on_from_one_cache_are_two(watched: Watched) -> None:
    """`batch_generate` copies what it is given: the rows are requests of their own."""
    caches = stock.make_prompt_cache(tiny_llama())
    list(lm.generate_step(prompt_of(60), tiny_llama(), max_tokens=3, prompt_cache=caches))
    generator = lm.BatchGenerator(tiny_llama())
    generator.insert([[1, 2], [3, 4]], caches=[caches, caches], max_tokens=[9, 9])
    while len(generator._generation_batch) < 2:
        generator.next()
    holding = watched.books.holdings.of(generator._generation_batch.prompt_cache[0])
    assert holding is not None and holding.owners is not None
    names = {account.owner for account in holding.owners}
    assert len(names | {watched.owner_of(caches[0])}) == 3
    assert set(watched.owners()) == names | {watched.owner_of(caches[0])}


def test_a_new_request_has_an_owner_at_once(watched: Watched) -> None:
    """Made by mlx-lm for a request, or found in the prompt cache; a copied row has one too."""
    caches = stock.make_prompt_cache(tiny_llama())
    assert watched.owner_of(caches[0]) == watched.owner_of(caches[1])
    list(lm.generate_step(prompt_of(60), tiny_llama(), max_tokens=3, prompt_cache=caches))
    kept = stock.LRUPromptCache()
    tokens = list(range(62))
    kept.insert_cache("m", tokens, caches)
    del caches
    (owner,) = watched.owners()
    assert watched.pool._cached.n_blocks() == watched.in_use() == STEP
    found, rest = kept.fetch_nearest_cache("m", [*tokens, 1])
    assert rest == [1]
    assert watched.in_use() == 2 * STEP  # twice, as the arrays will be
    assert watched.owner_of(found[0]) == watched.owner_of(found[1]) != owner
    assert watched.pool._cached.n_blocks() == STEP
    batch = lm.PromptProcessingBatch(tiny_llama(), [0], [found])
    batch.prompt([[1]])
    row = batch.extract_cache(0)
    assert watched.owner_of(row[0]) == watched.owner_of(row[1]) != watched.owner_of(found[0])
    kept.trim_to(n_sequences=0)
    watched.accounting.refresh()
    assert watched.pool._cached.n_blocks() == 0


# -- over budget -----------------------------------------------------------------------------------


def test_an_excess_is_counted_and_nothing_fails() -> None:
    """A pool of one step: the second step is in excess, until the first sequence ends."""
    watched = Watched(n_blocks=STEP)
    try:
        first = lm.generate_step(prompt_of(10), tiny_llama(), max_tokens=9)
        next(first)
        second = lm.generate_step(prompt_of(300), tiny_llama(), max_tokens=9)
        next(second)
        told = take_snapshot().program
        assert told is not None and told.account is not None
        assert (told.account.excess_blocks, told.account.excess_blocks_total) == (2 * STEP,) * 2
        assert watched.in_use() == STEP
        assert watched.pool.stats.n_exhausted == 0
        first.close()
        del first
        told = take_snapshot().program
        assert told is not None and told.account is not None
        assert (told.account.excess_blocks, told.account.excess_blocks_total) == (STEP, 2 * STEP)
        assert sum(1 for _ in second) == 8
    finally:
        watched.watch.stop()
    assert watched.in_use() == 0


def test_a_prompt_cache_makes_room_when_it_may() -> None:
    """Oldest first, within a call of its own, and no more than is needed."""
    watched = Watched(n_blocks=3 * STEP)
    try:
        kept = stock.LRUPromptCache()
        for n in range(4):
            caches = stock.make_prompt_cache(tiny_llama())
            prompt = prompt_of(50 + n)
            list(lm.generate_step(prompt, tiny_llama(), max_tokens=2, prompt_cache=caches))
            kept.insert_cache("m", [n] * (50 + n), caches)
            del caches
        assert len(kept) == 3
        assert kept.fetch_nearest_cache("m", [0] * 50)[0] is None  # the oldest went
        assert watched.in_use() == 3 * STEP == watched.pool._cached.n_blocks()
        told = take_snapshot().program
        assert told is not None and told.account is not None and told.prompt_cache is not None
        # The fourth sequence was in excess until its caches were inserted.
        assert (told.account.excess_blocks, told.account.excess_blocks_total) == (0, STEP)
        assert told.prompt_cache.evictions["budget"] == 1
        found, _ = kept.fetch_nearest_cache("m", [3] * 53)
        assert found is not None
        assert len(kept) == 2  # the copy of what was found took the place of another
    finally:
        watched.watch.stop()


def test_ranks_of_a_distributed_server_evict_nothing() -> None:
    """Their prompt caches must stay the same, whatever each rank's pool has."""
    watched = Watched(n_blocks=STEP)
    try:
        ranked = type("Ranked", (), {"_is_distributed": True})()
        watched.watch.seams.event("on_server_made")(ranked)
        kept = stock.LRUPromptCache()
        for n in range(2):
            caches = stock.make_prompt_cache(tiny_llama())
            prompt = prompt_of(50)
            list(lm.generate_step(prompt, tiny_llama(), max_tokens=2, prompt_cache=caches))
            kept.insert_cache("m", [n] * 50, caches)
        assert len(kept) == 2
        program = take_snapshot().program
        assert program is not None and program.account is not None
        assert program.account.excess_blocks == STEP
        assert not [n for n in watched.watch.seams.errors if n != "server"]
    finally:
        watched.watch.stop()


# -- what may go wrong -----------------------------------------------------------------------------


def test_another_mlx_lm_ends_the_account_and_nothing_else(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hook that it lacks: one warning, all blocks back, and the census goes on."""
    monkeypatch.delattr(lm.GenerationBatch, "extract_cache")
    watched = Watched()
    try:
        steps = lm.generate_step(prompt_of(10), tiny_llama(), max_tokens=9)
        next(steps)
        for _ in range(2):
            program = take_snapshot().program
        assert program is not None and program.caches is not None
        assert program.account is None
        assert not watched.accounting.is_on
        assert program.caches["KVCache"].n_objects == 2
        assert watched.in_use() == 0
        said = [r for r in caplog.records if "accounting is off" in r.getMessage()]
        assert len(said) == 1 and "batches" in said[0].getMessage()
        assert sum(1 for _ in steps) == 8
    finally:
        watched.watch.stop()


def test_a_fault_of_ours_is_not_the_programs(
    watched: Watched, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The pool itself fails: tokens come all the same, and it is counted; then it is made good."""
    caplog.set_level(logging.CRITICAL)
    broken = pytest.MonkeyPatch()
    broken.setattr(type(watched.books.ledger), "settle", lambda self: 1 / 0)
    assert len(list(lm.generate_step(prompt_of(10), tiny_llama(), max_tokens=9))) == 9
    steps = lm.generate_step(prompt_of(10), tiny_llama(), max_tokens=9)
    next(steps)
    assert sum(watched.watch.seams.errors.values()) > 0
    broken.undo()
    take_snapshot()
    assert watched.in_use() == STEP
    steps.close()


def test_the_account_holds_nothing_alive(watched: Watched) -> None:
    """Neither a cache nor a generator lives longer for it."""
    caches = stock.make_prompt_cache(tiny_llama())
    refs = [weakref.ref(cache) for cache in caches]
    steps = lm.generate_step(prompt_of(10), tiny_llama(), max_tokens=9, prompt_cache=caches)
    next(steps)
    del steps, caches
    assert [ref() for ref in refs] == [None, None]
    watched.accounting.refresh()
    holdings = watched.books.holdings
    assert not (holdings._live or holdings._growing or holdings.n_pending)


def test_scrapes_meanwhile_change_nothing(watched: Watched) -> None:
    """A thread that looks all the time, beside requests that come, run and are cancelled."""
    done = threading.Event()
    n_looks = 0

    def look() -> None:
        nonlocal n_looks
        while not done.is_set():
            watched.accounting.refresh()
            n_looks += 1

    thread = threading.Thread(target=look)
    thread.start()
    try:
        generator = lm.BatchGenerator(tiny_llama(), max_tokens=6, completion_batch_size=3)
        for n in range(6):
            uids = generator.insert([prompt_of(20 + n).tolist(), prompt_of(7).tolist()])
            generator.next()
            generator.remove(uids[: n % 3])
        while generator.next() != ([], []):
            pass
    finally:
        done.set()
        thread.join(30)
    assert n_looks > 0
    assert watched.watch.seams.errors == {}
    del generator
    watched.accounting.refresh()
    assert (watched.in_use(), watched.owners()) == (0, [])


def test_a_forked_child_may_look(watched: Watched) -> None:
    """A thread that was inside at the fork does not exist in the child, which gets a new lock."""
    inside, done = threading.Event(), threading.Event()

    def stay() -> None:
        with watched.books.entered() as ready:
            assert ready
            inside.set()
            done.wait(30)

    thread = threading.Thread(target=stay)
    thread.start()
    assert inside.wait(30)
    steps = lm.generate_step(prompt_of(10), tiny_llama(), max_tokens=9)
    watched.accounting.refresh()  # gives up soon
    _mend(weakref.ref(watched.books))()  # what the child's interpreter calls
    next(steps)
    assert watched.in_use() == STEP
    done.set()
    thread.join(30)
    steps.close()


def test_a_pool_that_is_no_ones_business() -> None:
    """Without events an account charges nothing, and closes without a word."""
    pool = BlockPoolAllocator(PoolConfig(n_blocks=4))
    accounting = Accounting(pool, "alone")
    accounting.refresh()
    accounting.close()
    accounting.close()
    assert pool.stats.n_allocations == 0
    assert accounting.snapshot() is None
