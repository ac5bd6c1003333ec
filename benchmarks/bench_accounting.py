"""What charging a program's caches to a pool costs, on top of watching it: CPU time a token.

    python benchmarks/bench_accounting.py [--quick] [--check] [--json FILE]

As `bench_serving.py` measures: "wrappers" are the hooks around functions that do nothing, on caches
that are there; "by turns" are whole batches without us, watched, and watched and charged. The bound
is on watching and charging together.

Exit status: 0, or with `--check` 1 if a bound is missed by the wrappers.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any, Final

HERE: Final = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent / "exporters")]

import mlx.core as mx  # noqa: E402
from bench_end_to_end import small_llama  # noqa: E402
from bench_serving import (  # noqa: E402
    ROWS,
    SHARE,
    _cost_us,
    _wrapped,
    batch_cpu_s,
    conclude,
    handler_us,
    many_caches,
    parsed,
    single_token_s,
    step_us,
    stream_us,
)
from bench_telemetry import Row, by_turns, ratio  # noqa: E402
from mlx_lm.models.cache import BatchKVCache, KVCache, LRUPromptCache  # noqa: E402

from veloxquant_mlx.memory.block_pool import BlockPoolAllocator, PoolConfig  # noqa: E402
from veloxquant_mlx.serving import Watch  # noqa: E402
from veloxquant_mlx.serving.accounting import Accounting  # noqa: E402

LAYERS: Final = 32


def _accounting(n_blocks: int = 1 << 20) -> Accounting:
    return Accounting(BlockPoolAllocator(PoolConfig(block_size=16, n_blocks=n_blocks)), "bench")


@contextmanager
def _charged() -> Iterator[Watch]:
    """This process watched and charged; with the plain hooks of the watch listening as well."""
    watch = Watch(accounting=_accounting())
    watch.start()
    try:
        yield watch
    finally:
        watch.stop()


# -- the wrappers by themselves --------------------------------------------------------------------


def _grow(caches: list[Any], n_rows: int, n_tokens: int) -> None:
    """Let them hold `n_tokens`, in arrays of whole steps."""
    arrays = mx.zeros((n_rows, 1, -(-n_tokens // 256) * 256, 4))
    for cache in caches:
        cache.keys = cache.values = arrays
        setattr(cache, "_idx" if isinstance(cache, BatchKVCache) else "offset", n_tokens)


def sequence_us() -> float:
    """A token of `generate_step`, between two steps of growth."""
    n = 5000
    with _charged() as watch:
        caches = [KVCache() for _ in range(LAYERS)]
        _grow(caches, 1, 200)

        def steps(**_: Any) -> Iterator[int]:
            yield from range(n)

        def drained(call: Any) -> Any:
            def run() -> None:
                for _ in call(prompt_cache=caches):
                    pass

            return run

        return _cost_us(drained(steps), drained(_wrapped(watch, "generate_step", steps)), n)


def _generator(n_rows: int, n_tokens: int) -> Any:
    """What the listener reads of a `BatchGenerator`."""
    caches = [BatchKVCache([0] * n_rows) for _ in range(LAYERS)]
    _grow(caches, n_rows, n_tokens)
    running = SimpleNamespace(uids=list(range(n_rows)), prompt_cache=caches)
    return SimpleNamespace(
        _generation_batch=running, _prompt_batch=SimpleNamespace(uids=[], prompt_cache=[])
    )


def round_us(n_rows: int) -> float:
    """A round of a batch generator: what the account adds to the listeners of the watch."""
    n = 3000
    with _charged() as watch:
        generator = _generator(n_rows, 200)
        batches = watch.accounting.listeners[1]  # type: ignore[union-attr]
        batches.on_responses(generator, [], [])
        began = time.thread_time_ns()
        for _ in range(n):
            batches.on_responses(generator, [], [])
        return (time.thread_time_ns() - began) / n / 1e3


def growth_us(n_rows: int, rounds: int) -> float:
    """A step of 256 tokens by which all layers and rows of a batch grow."""
    samples = []
    with _charged() as watch:
        batches = watch.accounting.listeners[1]  # type: ignore[union-attr]
        for _ in range(rounds):
            generator = _generator(n_rows, 200)
            for _ in range(2):
                watch.accounting.refresh()  # type: ignore[union-attr]
            _grow(generator._generation_batch.prompt_cache, n_rows, 300)
            began = time.thread_time_ns()
            batches.on_responses(generator, [], [])
            samples.append((time.thread_time_ns() - began) / 1e3)
            held = watch.accounting.pool.stats.blocks_in_use()  # type: ignore[union-attr]
            assert held >= 2 * LAYERS * n_rows * 512 // 16
            del generator
    return median(samples)


def share_rows(model: Any, name: str, n_tokens: int, rounds: int) -> list[Row]:
    """What watching and charging take of a token's time, which is shortest by itself."""
    token_us = single_token_s(model, n_tokens) * 1e6
    growth = {n: growth_us(n, rounds) / 256 for n in (1, ROWS)}
    charged = {
        "sequence by itself": (stream_us(), sequence_us() + growth[1]),
        "server, one request": (handler_us() + step_us(1), round_us(1) + growth[1]),
        f"server, a row of {ROWS}": (
            handler_us() + step_us(ROWS) / ROWS,
            (round_us(ROWS) + growth[ROWS]) / ROWS,
        ),
    }
    return [
        Row(
            f"wrappers, {what}, {name}",
            (watched + added) / token_us * 100,
            SHARE,
            "%",
            None,
            f"{watched:.2f} us watched + {added:.2f} us charged, of a token of {token_us:.0f} us",
        )
        for what, (watched, added) in charged.items()
    ]


# -- by turns --------------------------------------------------------------------------------------


def by_turn_rows(model: Any, name: str, n_tokens: int, rounds: int) -> list[Row]:
    """Whole batches: with requests that come and go, and arrays that are merged and grow."""

    def lane(make: Any) -> float:
        if make is None:
            return batch_cpu_s(model, n_tokens)
        watch = make()
        watch.start()
        try:
            return batch_cpu_s(model, n_tokens)
        finally:
            watch.stop()

    lanes = {
        "off": lambda: lane(None),
        "off again": lambda: lane(None),
        "watched": lambda: lane(Watch),
        "charged": lambda: lane(lambda: Watch(accounting=_accounting())),
    }
    samples = by_turns(lanes, rounds)
    noise = abs(ratio(samples["off again"], samples["off"]) - 1) * 100
    note = f"{median(samples['off']) * 1e6:.0f} us CPU a token, batches of {ROWS}"
    return [
        Row(f"by turns, batch, {name}: {what}", (ratio(samples[what], samples["off"]) - 1) * 100,
            None, "%", noise, note)
        for what in ("watched", "charged")
    ]  # fmt: skip


# -- a scrape, and a request -----------------------------------------------------------------------


def scrape_rows(rounds: int) -> list[Row]:
    """What the account adds to a scrape, with caches that may grow and with entries, which do not."""
    rows = []
    with _charged() as watch:
        caches = many_caches()
        for what in ("caches of the program's own", "entries of a prompt cache"):
            if what.startswith("entries"):
                kept = LRUPromptCache(max_size=1 << 30)
                for at in range(0, len(caches), 50):
                    kept.insert_cache("m", [at], caches[at : at + 50])
            times = []
            for _ in range(rounds + 2):
                began = time.thread_time()
                watch.accounting.refresh()  # type: ignore[union-attr]
                times.append((time.thread_time() - began) * 1e3)
            label = f"scrape, {len(caches):,} {what}: the account"
            rows.append(Row(label, median(times[2:]), None, "ms", None, "CPU"))
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and judge if asked to."""
    options = parsed("Measure what charging mlx-lm's caches costs.", arguments)
    n = 1 if options.quick else 4
    model = small_llama()
    for rows_of in (1, ROWS):
        print(f"growth of {LAYERS} layers x {rows_of} rows by 256 tokens: "
              f"{growth_us(rows_of, 5 * n):.0f} us")  # fmt: skip
    rows = scrape_rows(5 * n)
    rows += share_rows(model, "8 layers of 128", 128, 5 * n)
    rows += by_turn_rows(model, "8 layers of 128", 64, 6 * n)
    folder = os.environ.get("VELOXQUANT_TEST_MODEL")
    if folder:
        from mlx_lm import load

        real = load(folder)[0]
        rows += share_rows(real, Path(folder).name, 12, 5 * n)
        if not options.quick:  # a token of a real model takes long on a CPU
            rows += by_turn_rows(real, Path(folder).name, 4, n)
    return conclude(rows, options)


if __name__ == "__main__":
    sys.exit(main())
