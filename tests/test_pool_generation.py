"""Generation through build_pooled_caches: tokens as with the stock caches, blocks always back."""

from __future__ import annotations

import functools
import gc
import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import pytest

from veloxquant_mlx.core.exceptions import BlockPoolExhaustedError, OwnerAlreadyActiveError
from veloxquant_mlx.memory.block_pool import BlockPoolAllocator, PoolConfig
from veloxquant_mlx.memory.pool_backed_cache import (
    PoolBackedKVCache,
    PooledCaches,
    build_pooled_caches,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# mlx-lm has no annotations, and a function in the place of its module `generate`.
lm: Any = import_module("mlx_lm.generate")
stock: Any = import_module("mlx_lm.models.cache")

LAYERS = 2


def made(arch: str, seed: int = 3, **args: Any) -> Any:
    """A model of mlx-lm with random weights."""
    module = import_module(f"mlx_lm.models.{arch}")
    mx.random.seed(seed)
    model = module.Model(module.ModelArgs(model_type=arch, **args))
    mx.eval(model.parameters())
    return model


@functools.cache
def tiny_llama(seed: int = 3, layers: int = LAYERS) -> Any:
    """Two layers, hidden size 64, one key head of 32."""
    return made(
        "llama",
        seed,
        hidden_size=64,
        num_hidden_layers=layers,
        intermediate_size=96,
        num_attention_heads=2,
        num_key_value_heads=1,
        rms_norm_eps=1e-5,
        vocab_size=128,
        tie_word_embeddings=False,  # tied, random weights say one token for ever
    )


def prompt_of(n: int, vocab: int = 128) -> mx.array:
    """`n` token ids that do not repeat in a short period."""
    return (mx.arange(n) ** 2 + 7 * mx.arange(n)) % (vocab - 3) + 1


def generated(model: Any, prompt: mx.array, caches: Any, n: int = 32, **options: Any) -> list[int]:
    """The greedy continuation of a prompt."""
    steps = lm.generate_step(prompt, model, max_tokens=n, prompt_cache=caches, **options)
    return [int(token) for token, _ in steps]


def stock_tokens(model: Any, prompt: mx.array, n: int = 32, **options: Any) -> list[int]:
    """The same with mlx-lm's own caches."""
    return generated(model, prompt, stock.make_prompt_cache(model), n, **options)


def filled(pool: BlockPoolAllocator) -> list[int]:
    """Token slots of each stream that hold tokens, by the pool's books."""
    size = pool.config.block_size
    return [(s.managed - s.n_free) * size - s.slack for s in pool._streams]


def blocks_for(pool: BlockPoolAllocator, model: Any, n_tokens: int, step: int = 256) -> int:
    """Blocks of a request that grows from an empty cache to `n_tokens` in whole steps."""
    capacity = -(-n_tokens // step) * step
    return 2 * len(model.layers) * -(-capacity // pool.config.block_size)


# -- tokens as with the stock cache ----------------------------------------------------------------


@pytest.mark.parametrize("separate_kv", [True, False])
@pytest.mark.parametrize("prefill_step_size", [512, 2048])
@pytest.mark.parametrize("n_prompt", [1, 42, 1500])
def test_A03_A14_tokens_equal_the_stock_cache_and_blocks_are_reused(
    n_prompt: int, prefill_step_size: int, separate_kv: bool
) -> None:
    """Short and long prompts, in one chunk and in several; the next request takes no new block."""
    model, prompt = tiny_llama(), prompt_of(n_prompt)
    pool = BlockPoolAllocator(PoolConfig(n_blocks=2048, separate_kv=separate_kv))
    expected = stock_tokens(model, prompt, prefill_step_size=prefill_step_size)
    for request in range(2):
        before = pool.stats.snapshot()
        caches = build_pooled_caches(model, pool, owner=request)
        mx.eval([c.state for c in caches])  # A14: before there is any
        got = generated(model, prompt, caches, prefill_step_size=prefill_step_size)
        assert got == expected
        assert {c.offset for c in caches} == {n_prompt + 32}
        assert sum(filled(pool)) == 2 * LAYERS * (n_prompt + 32)
        taken = pool.stats.n_allocations - before.n_allocations
        assert taken == pool.stats.blocks_in_use() >= blocks_for(pool, model, n_prompt + 32)
        assert pool.stats.n_reused - before.n_reused == taken * request
        caches[-1].release()
        assert pool.stats.blocks_in_use() == 0


@pytest.mark.timeout(280)
def test_A03_a_real_model_answers_as_with_the_stock_cache() -> None:
    """60 and 20 prompt tokens, 8 generated; the second request reuses blocks of the first."""
    folder = os.environ.get("VELOXQUANT_TEST_MODEL")
    if not folder:
        pytest.skip("VELOXQUANT_TEST_MODEL names no folder with a model that mlx_lm.load takes")
    model: Any = import_module("mlx_lm.utils").load(folder)[0]
    pool = BlockPoolAllocator(PoolConfig(n_blocks=8192))
    n_made = 8  # a token takes long on a CPU
    for request, n_prompt in enumerate([60, 20]):
        prompt = prompt_of(n_prompt, vocab=30_000)
        before = pool.stats.snapshot()
        with build_pooled_caches(model, pool, owner=request) as caches:
            got = generated(model, prompt, caches, n_made)
            taken = pool.stats.n_allocations - before.n_allocations
            assert taken == blocks_for(pool, model, n_prompt + n_made)
            assert pool.stats.n_reused - before.n_reused == taken * request
        assert got == stock_tokens(model, prompt, n_made)
        assert pool.stats.blocks_in_use() == 0


def test_U67_quantising_in_generate_step_works_and_gives_the_charge_back() -> None:
    """kv_bits quantises as with the stock caches, from the start and part way through."""
    model, prompt = tiny_llama(), prompt_of(600)
    pool = BlockPoolAllocator(PoolConfig(n_blocks=2048))
    for start in (0, 610):
        options = {"kv_bits": 4, "kv_group_size": 32, "quantized_kv_start": start}
        pool.register_owner("q")
        ours, theirs = build_pooled_caches(model, pool, "q"), stock.make_prompt_cache(model)
        got = generated(model, prompt, ours, prefill_step_size=256, **options)
        assert got == generated(model, prompt, theirs, prefill_step_size=256, **options)
        assert [type(c) for c in ours] == [type(c) for c in theirs]
        assert [c.nbytes for c in ours] == [c.nbytes for c in theirs]
        assert pool.stats.n_allocations > 0
        assert pool.stats.blocks_in_use() == 0
        ours.release()


def test_U67_a_batch_generator_takes_pooled_caches_as_history() -> None:
    """Two prompts of their own length go on in a batch, whose caches are mlx-lm's."""
    model = tiny_llama()
    pool = BlockPoolAllocator(PoolConfig(n_blocks=2048))

    def run(make: Callable[[], Any]) -> dict[int, list[int]]:
        histories = []
        for n_prompt in (50, 9):
            caches = make()
            generated(model, prompt_of(n_prompt), caches, n=4)
            histories.append(caches)
        batch = lm.BatchGenerator(model, max_tokens=6)
        tokens: dict[int, list[int]] = {}
        batch.insert([[5, 6, 7], [8, 9]], caches=histories)
        del histories, caches
        while responses := batch.next_generated():
            for response in responses:
                tokens.setdefault(response.uid, []).append(int(response.token))
                if response.prompt_cache is not None:
                    assert {type(c) for c in response.prompt_cache} == {stock.KVCache}
        batch.close()
        return tokens

    expected = run(lambda: stock.make_prompt_cache(model))
    assert [len(tokens) for tokens in expected.values()] == [6, 6]
    assert run(lambda: build_pooled_caches(model, pool, None)) == expected
    # The histories were copied into the batch and dropped.
    assert pool.stats.n_allocations > 0
    assert pool.stats.blocks_in_use() == 0


def test_speculative_decoding_trims_as_with_stock_caches() -> None:
    """A model and its draft share a request; refused draft tokens lower the fill."""
    model, draft, prompt = tiny_llama(), tiny_llama(seed=4, layers=1), prompt_of(42)
    pool = BlockPoolAllocator(PoolConfig(n_blocks=2048))

    def run(caches: Any) -> list[int]:
        steps = lm.speculative_generate_step(
            prompt, model, draft, max_tokens=32, num_draft_tokens=3, prompt_cache=caches
        )
        return [int(token) for token, _, _ in steps]

    theirs = stock.make_prompt_cache(model) + stock.make_prompt_cache(draft)
    ours = build_pooled_caches(model, pool, "r")
    ours += build_pooled_caches(draft, pool, "r")
    assert run(ours) == run(theirs) == stock_tokens(model, prompt)
    assert [c.offset for c in ours] == [c.offset for c in theirs]
    assert filled(pool) == [sum(c.offset for c in ours)] * 2
    ours.release()
    assert pool.stats.blocks_in_use() == 0
    assert [c.offset for c in ours] == [0, 0, 0]


# -- models with other caches ----------------------------------------------------------------------

OTHERS: dict[str, dict[str, Any]] = {
    "gemma3_text": {
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "intermediate_size": 48,
        "num_attention_heads": 2,
        "head_dim": 16,
        "num_key_value_heads": 1,
        "query_pre_attn_scalar": 16,
        "vocab_size": 128,
        "sliding_window": 8,
        "sliding_window_pattern": 2,
    },
    "mamba": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "intermediate_size": 48,
        "vocab_size": 128,
        "state_size": 8,
        "conv_kernel": 4,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_rank": 4,
        "tie_word_embeddings": False,
    },
    "falcon_h1": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "intermediate_size": 48,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "vocab_size": 128,
        "mamba_d_ssm": 64,
        "mamba_d_head": 16,
        "mamba_n_heads": 4,
        "mamba_d_state": 8,
        "tie_word_embeddings": False,
    },
}


def kinds(caches: Any) -> list[Any]:
    """Types of caches, layer by layer."""
    return [
        [type(c), kinds(c.caches)] if isinstance(c, stock.CacheList) else type(c) for c in caches
    ]


@pytest.mark.parametrize(
    ("arch", "n_charged"), [("gemma3_text", 2), ("mamba", 0), ("falcon_h1", 2)]
)
def test_U68_only_plain_caches_are_wrapped(arch: str, n_charged: int) -> None:
    """Sliding windows, recurrent states and lists of caches stay what the model made them."""
    model, prompt = made(arch, **OTHERS[arch]), prompt_of(42)
    pool = BlockPoolAllocator(PoolConfig(n_blocks=2048))
    caches = build_pooled_caches(model, pool, 1)
    expected = kinds(stock.make_prompt_cache(model))
    assert str(kinds(caches)).replace("veloxquant_mlx.memory.pool_backed_cache.PoolBacked", "") == (
        str(expected).replace("mlx_lm.models.cache.KVCache", "KVCache")
    )
    assert generated(model, prompt, caches) == stock_tokens(model, prompt)
    assert pool.stats.blocks_in_use() == n_charged * 2 * 16
    assert filled(pool) == [n_charged * 74] * 2
    caches.release()
    assert pool.stats.blocks_in_use() == 0


def test_U68_saved_lists_of_caches_load_again(tmp_path: Any) -> None:
    """U60 inside a CacheList: mlx-lm finds the class by its name."""
    model = made("falcon_h1", **OTHERS["falcon_h1"])
    pool = BlockPoolAllocator(PoolConfig(n_blocks=2048))
    caches = build_pooled_caches(model, pool, 1)
    first = generated(model, prompt_of(42), caches, n=4)
    stock.save_prompt_cache(str(tmp_path / "c.safetensors"), caches)
    loaded = stock.load_prompt_cache(str(tmp_path / "c.safetensors"))
    assert kinds(loaded) == kinds(caches)
    prompt = mx.array(first[-1:])
    assert generated(model, prompt, loaded, n=8) == generated(model, prompt, caches, n=8)


def test_build_checks_its_arguments_even_for_models_without_plain_caches() -> None:
    """A step or owner that is wrong is refused whatever the layers are."""
    model = made("mamba", **OTHERS["mamba"])
    pool = BlockPoolAllocator()
    with pytest.raises(ValueError, match="step"):
        build_pooled_caches(model, pool, 1, step=0)
    with pytest.raises(TypeError, match="owner"):
        build_pooled_caches(model, pool, 1.5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="pool"):
        build_pooled_caches(model, None, 1)  # type: ignore[arg-type]


def test_building_twice_for_an_idle_owner_makes_two_requests(pool: BlockPoolAllocator) -> None:
    """One that failed before its first token may be released late."""
    model = tiny_llama()
    early, late = (build_pooled_caches(model, pool, 7) for _ in range(2))
    pool.register_owner(7)
    early.release()
    with pytest.raises(OwnerAlreadyActiveError):
        pool.register_owner(7)
    generated(model, prompt_of(42), late, n=2)
    early.release()
    assert [c.offset for c in late] == [44] * LAYERS
    assert pool.stats.blocks_in_use() == 2 * LAYERS * 16
    late.release()
    assert pool.stats.blocks_in_use() == 0


# -- blocks come back, whatever happens ------------------------------------------------------------


@pytest.fixture
def pool() -> BlockPoolAllocator:
    """Room for two tiny requests."""
    return BlockPoolAllocator(PoolConfig(n_blocks=2 * 2 * LAYERS * 16))


@pytest.fixture
def idle(pool: BlockPoolAllocator) -> Iterator[None]:
    """After the test nothing is held, and every block can be had."""
    yield
    assert pool.stats.blocks_in_use() == 0
    assert filled(pool) == [0, 0]
    pool.allocate_kv(pool.n_free("k") * 16, "all of it")


def test_B10_a_generator_closed_early(pool: BlockPoolAllocator, idle: None) -> None:
    """The client went away after three tokens."""
    with build_pooled_caches(tiny_llama(), pool, "r") as caches:
        steps = lm.generate_step(prompt_of(42), tiny_llama(), prompt_cache=caches)
        for _ in range(3):
            next(steps)
        steps.close()
        assert pool.stats.blocks_in_use() == 2 * LAYERS * 16


def test_B10_a_generator_that_outlives_its_caches(pool: BlockPoolAllocator, idle: None) -> None:
    """Released first, closed later: nothing is charged again."""
    with build_pooled_caches(tiny_llama(), pool, "r") as caches:
        steps = lm.generate_step(prompt_of(42), tiny_llama(), prompt_cache=caches)
        next(steps)
    assert pool.stats.blocks_in_use() == 0
    steps.close()


@pytest.mark.parametrize("at", [0, 1, 2])
def test_B10_ctrl_c_in_the_progress_callback(at: int, pool: BlockPoolAllocator, idle: None) -> None:
    """Before, between and after the chunks of the prefill."""
    calls = iter(range(100))

    def interrupted(done: int, total: int) -> None:
        if next(calls) == at:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), build_pooled_caches(tiny_llama(), pool, 9) as caches:
        generated(
            tiny_llama(),
            prompt_of(42),
            caches,
            prefill_step_size=30,
            prompt_progress_callback=interrupted,
        )


def test_B10_ctrl_c_between_tokens(pool: BlockPoolAllocator, idle: None) -> None:
    """The loop that prints tokens is interrupted."""

    def printing() -> None:
        with build_pooled_caches(tiny_llama(), pool, 9) as caches:
            steps = lm.generate_step(prompt_of(42), tiny_llama(), prompt_cache=caches)
            for n, _ in enumerate(steps):
                if n == 2:
                    raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        printing()


def test_B10_caches_dropped_without_release(pool: BlockPoolAllocator, idle: None) -> None:
    """Nobody kept the list, the generator or the caches."""
    caches = build_pooled_caches(tiny_llama(), pool, "r")
    steps = lm.generate_step(prompt_of(42), tiny_llama(), prompt_cache=caches)
    next(steps)
    assert pool.stats.blocks_in_use() == 2 * LAYERS * 16
    del caches, steps
    gc.collect()


def test_an_exhausted_pool_stops_one_request_and_not_the_other(
    pool: BlockPoolAllocator, idle: None
) -> None:
    """The third request is refused in its second layer at the latest; the first two go on."""
    model, prompt = tiny_llama(), prompt_of(42)
    expected = stock_tokens(model, prompt)
    first, second = (build_pooled_caches(model, pool, n) for n in (1, 2))
    assert generated(model, prompt, first) == expected
    pool.allocate("v", 16 * 20, "somebody else")
    with pytest.raises(BlockPoolExhaustedError), second:
        generated(model, prompt, second)
    assert pool.stats.blocks_in_use() == 2 * LAYERS * 16 + 20
    pool.free_all("somebody else")
    with second:
        assert generated(model, prompt, second) == expected
    first.release()


def test_B14_requests_of_one_token_leave_nothing_behind(
    pool: BlockPoolAllocator, idle: None
) -> None:
    """100 prefill-only requests, half of them released and half dropped."""
    model, prompt = tiny_llama(), prompt_of(20)
    for n in range(100):
        caches = build_pooled_caches(model, pool, n % 5)
        assert len(generated(model, prompt, caches, n=1)) == 1
        if n % 2:
            caches.release()
        del caches
        assert pool.stats.blocks_in_use() == 0


def test_A12_sequential_requests_return_to_baseline() -> None:
    """50 requests: blocks, and the memory that MLX holds, are where they were after the first."""
    model, prompt = tiny_llama(), prompt_of(60)
    pool = BlockPoolAllocator(PoolConfig(n_blocks=2 * LAYERS * 16))
    baseline = 0
    for n in range(50):
        with build_pooled_caches(model, pool, n) as caches:
            generated(model, prompt, caches, n=4)
        assert pool.stats.blocks_in_use() == 0
        if n == 0:
            mx.clear_cache()
            baseline = mx.get_active_memory()
    mx.clear_cache()
    one_request = 2 * LAYERS * 256 * 32 * 4
    assert mx.get_active_memory() < baseline + one_request
    assert pool.stats.n_reused == pool.stats.n_allocations * 49 // 50


def test_prompt_cache_entries_are_charged_until_evicted() -> None:
    """A server's LRUPromptCache: a hit is a request of its own, an evicted entry gives back."""
    model = tiny_llama()
    pool = BlockPoolAllocator(PoolConfig(n_blocks=2048))
    a_request = 2 * LAYERS * 16
    lru = stock.LRUPromptCache(max_size=2)
    prompts: list[Any] = [prompt_of(n).tolist() for n in (30, 31, 32)]
    for n, ids in enumerate(prompts):
        ids[0] = n + 1
        caches = build_pooled_caches(model, pool, n)
        generated(model, mx.array(ids), caches, n=2)
        lru.insert_cache("m", ids, caches)
    del caches
    assert pool.stats.blocks_in_use() == 2 * a_request
    found, rest = lru.fetch_nearest_cache("m", [*prompts[2], 5, 6])
    assert rest == [5, 6]
    assert isinstance(found, PooledCaches)
    assert {type(c) for c in found} == {PoolBackedKVCache}
    assert pool.stats.blocks_in_use() == 3 * a_request
    found.release()
    assert pool.stats.blocks_in_use() == 2 * a_request
    lru.trim_to(n_sequences=0)
    assert pool.stats.blocks_in_use() == 0
