"""End to end: decoding with stock caches, pooled ones, and pooled and instrumented ones, paired.

The three run in turn, a short generation each, so that all of them meet the same machine; the samples
are then replayed into pytest-benchmark, which gives its table and its JSON. Read the ratios: the
median of paired ratios stands in `extra_info`.
"""

from __future__ import annotations

from statistics import median
from time import perf_counter
from typing import Any

import pytest

mx = pytest.importorskip("mlx.core", reason="an MLX backend is an extra")
pytest.importorskip("mlx_lm", reason="what is decoded with is mlx-lm")

from mlx_lm.generate import generate_step  # noqa: E402
from mlx_lm.models import llama  # noqa: E402
from mlx_lm.models.cache import make_prompt_cache  # noqa: E402

from veloxquant_mlx.memory.block_pool import BlockPoolAllocator, PoolConfig  # noqa: E402
from veloxquant_mlx.memory.pool_backed_cache import build_pooled_caches  # noqa: E402
from veloxquant_mlx.telemetry import instrument  # noqa: E402

TOKENS, ROUNDS = 64, 9
KINDS = ("stock", "pooled", "instrumented")


class ReplayClock:
    """A timer that only moves when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        """Now."""
        return self.now

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds


CLOCK = ReplayClock()


def small_llama() -> Any:
    """Eight layers, so that a step has a serving model's number of cache calls, and little else."""
    mx.random.seed(0)
    model = llama.Model(
        llama.ModelArgs(
            model_type="llama",
            hidden_size=128,
            num_hidden_layers=8,
            intermediate_size=256,
            num_attention_heads=4,
            num_key_value_heads=4,
            rms_norm_eps=1e-5,
            vocab_size=512,
        )
    )
    mx.eval(model.parameters())
    return model


class Lane:
    """One kind of cache, and its samples."""

    def __init__(self, kind: str, model: Any) -> None:
        self.kind, self.model = kind, model
        self.pool = BlockPoolAllocator(PoolConfig(16, 2 * 8 * 64))
        if kind == "instrumented":
            self.probe = instrument(self.pool)
        self.seconds: list[float] = []
        self.tokens: list[int] = []

    def decode(self) -> None:
        """One generation, timed by the wall clock."""
        began = perf_counter()
        stock = self.kind == "stock"
        caches: Any = (
            make_prompt_cache(self.model)
            if stock
            else build_pooled_caches(self.model, self.pool, 1)
        )
        prompt = mx.arange(16)
        steps = generate_step(prompt, self.model, max_tokens=TOKENS, prompt_cache=caches)
        self.tokens = [int(token) for token, _ in steps]
        if not stock:
            caches.release()
        self.seconds.append(perf_counter() - began)


@pytest.fixture(scope="module")
def lanes() -> dict[str, Lane]:
    """Samples of all three, in turn, the order rotating."""
    model = small_llama()
    found = [Lane(kind, model) for kind in KINDS]
    for number in range(ROUNDS + 2):
        for place in range(len(found)):
            found[(place + number) % len(found)].decode()
    for lane in found:
        del lane.seconds[:2]  # warming up
        assert lane.tokens == found[0].tokens, "another cache must not decode another text"
        assert lane.pool.stats.blocks_in_use() == 0
    return {lane.kind: lane for lane in found}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.benchmark(group="end to end: 64 tokens", timer=CLOCK)
def test_decode(benchmark: Any, lanes: dict[str, Lane], kind: str) -> None:
    """A generation of 64 tokens; a call is a token."""
    lane = lanes[kind]
    samples = iter(lane.seconds)
    paired = [
        mine / stock for mine, stock in zip(lane.seconds, lanes["stock"].seconds, strict=True)
    ]
    benchmark.extra_info.update(
        n_blocks=1, calls=TOKENS, ratio_to_stock=round(median(paired), 4),
        device=str(mx.default_device()),
    )  # fmt: skip
    benchmark.pedantic(lambda: CLOCK.advance(next(samples)), rounds=len(lane.seconds))
    assert benchmark.stats.stats.rounds == ROUNDS
