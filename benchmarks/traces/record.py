"""Record the committed traces anew, through generation by mlx-lm with pooled caches.

    python benchmarks/traces/record.py [chat] [long_context] [churn] [--out FOLDER]

The models are tiny and have random weights: what the pool sees depends on their layers and on the lengths
of prompts and answers alone. Two recordings make the same calls; only the times differ.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, Final

HERE: Final = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parents[1] / "exporters")]

import mlx.core as mx  # noqa: E402

from veloxquant_exporters.demo.model import tiny_llama  # noqa: E402
from veloxquant_exporters.demo.traffic import Traffic  # noqa: E402
from veloxquant_exporters.demo.workload import plan_requests  # noqa: E402
from veloxquant_mlx.memory.block_pool import BlockPoolAllocator, PoolConfig  # noqa: E402
from veloxquant_mlx.memory.pool_backed_cache import build_pooled_caches  # noqa: E402
from veloxquant_mlx.telemetry import record, uninstrument  # noqa: E402

SEED: Final = 11
LONG: Final = 16_384  # tokens


def chat(pool: BlockPoolAllocator) -> None:
    """Questions, summaries and stories side by side, in a pool with room for them."""
    serve(pool, n_requests=64, n_at_once=6, step=32)


def churn(pool: BlockPoolAllocator) -> None:
    """More requests at once than the pool has room for; it grows to its limit and is shrunk again."""
    serve(pool, n_requests=48, n_at_once=12, step=16, shrink_every=400)


def serve(
    pool: BlockPoolAllocator, n_requests: int, n_at_once: int, step: int, shrink_every: int = 0
) -> None:
    """Traffic of the demo until all of it is served."""
    traffic = Traffic(tiny_llama(SEED), pool, n_at_once=n_at_once, seed=SEED, step=step)
    traffic.add(plan_requests(SEED, 1, n_requests))
    n_done = 0
    while traffic.busy:
        traffic.advance()
        n_done += 1
        if shrink_every and not n_done % shrink_every:
            for stream in ("k", "v"):
                pool.shrink(stream, 16)


def long_context(pool: BlockPoolAllocator) -> None:
    """A long document read, an answer, the document's end taken back, another answer; chat beside."""
    model = tiny_llama(SEED).model
    generate_step: Any = import_module("mlx_lm.generate").generate_step
    trim: Any = import_module("mlx_lm.models.cache").trim_prompt_cache
    tokens = (mx.arange(LONG) ** 2 + 7 * mx.arange(LONG)) % 97 + 1

    def answer(caches: Any, prompt: mx.array, n_tokens: int) -> None:
        for _ in generate_step(
            prompt, model, max_tokens=n_tokens, prompt_cache=caches, prefill_step_size=512
        ):
            pass

    with build_pooled_caches(model, pool, "document") as caches:
        answer(caches, tokens, 64)
        trim(caches, 4096)
        for number in range(8):
            with build_pooled_caches(model, pool, f"chat-{number}", 64) as short:
                answer(short, tokens[: 100 + 50 * number], 48)
        answer(caches, tokens[:2048], 64)


SCENARIOS: Final[dict[str, tuple[Callable[[BlockPoolAllocator], None], PoolConfig]]] = {
    "chat": (chat, PoolConfig(16, 8192)),
    "long_context": (long_context, PoolConfig(16, 16_384)),
    "churn": (churn, PoolConfig(16, 256, grow_on_exhaustion=True, max_blocks=1024)),
}


def main() -> None:
    """Record what is asked for, or all."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(SCENARIOS))
    parser.add_argument("--out", type=Path, default=HERE, help="folder to write into")
    options = parser.parse_args()
    for name in options.names or SCENARIOS:
        run, config = SCENARIOS[name]
        pool = BlockPoolAllocator(config)
        path = options.out / f"{name}.vqtrace"
        # One flush at the end: few large chunks take less room than many small ones.
        recorder = record(pool, path, capacity=1 << 18, flush_s=3600, snapshot_s=3600)
        try:
            run(pool)
        finally:
            recorder.stop()
            uninstrument(pool)
        print(f"{path}: {path.stat().st_size} bytes, {pool!r}")


if __name__ == "__main__":
    main()
