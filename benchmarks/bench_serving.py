"""What watching a program of mlx-lm costs: CPU time added to a generated token, and to a scrape.

    python benchmarks/bench_serving.py [--quick] [--check] [--json FILE]
    python -m pytest benchmarks/bench_serving.py     # the census of 10,000 caches alone

Two ways that check each other. "wrappers": the hooks around functions that do nothing, which is all
that they add, to the nanosecond. "by turns": the same tokens generated with and without the watch in
one process, in an order that changes, CPU time of the generating thread a token, the median of the
paired ratios; its noise is what the same code differs by when it is compared with itself. With
VELOXQUANT_TEST_MODEL the token time of the model of that folder is measured as well.

Exit status: 0, or with `--check` 1 if a bound is missed by the wrappers or by the census.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any, Final

HERE: Final = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent / "exporters")]

import mlx.core as mx  # noqa: E402
from bench_end_to_end import small_llama  # noqa: E402
from bench_telemetry import Row, by_turns, ratio, render  # noqa: E402
from mlx_lm.generate import BatchGenerator, generate_step  # noqa: E402
from mlx_lm.models.cache import KVCache  # noqa: E402

from veloxquant_exporters.sources import LiveSource  # noqa: E402
from veloxquant_mlx.serving import Watch  # noqa: E402
from veloxquant_mlx.serving.points import POINTS  # noqa: E402

ROWS: Final = 8
N_CACHES: Final = 10_000
SHARE: Final = 1.0  # per cent of a token's time


# -- the wrappers by themselves --------------------------------------------------------------------


def _watched() -> Watch:
    """A watch of which only the listeners are used: nothing of mlx-lm is wrapped."""
    return Watch()


def _wrapped(watch: Watch, target: str, original: Callable[..., Any]) -> Callable[..., Any]:
    (point,) = (point for point in POINTS if point.target == target)
    return point.make(original, watch.seams)


def _cost_us(plain: Callable[[], object], wrapped: Callable[[], object], n: int) -> float:
    """Microseconds that one call of `wrapped` takes more, each call being `n` of something."""

    def timed(call: Callable[[], object]) -> float:
        began = time.thread_time_ns()
        call()
        return (time.thread_time_ns() - began) / n / 1e3

    samples = by_turns({"plain": lambda: timed(plain), "wrapped": lambda: timed(wrapped)}, 15)
    return median(samples["wrapped"]) - median(samples["plain"])


def handler_us() -> float:
    """A token on the thread that answers a client of the server."""
    n = 5000
    response = SimpleNamespace(token=1)

    def generate(_self: object, _request: object) -> tuple[object, Iterator[object]]:
        return SimpleNamespace(prompt=[1], prompt_cache_count=0), iter([response] * n)

    def drained(call: Callable[..., Any]) -> Callable[[], None]:
        def run() -> None:
            for _ in call(None, request)[1]:
                pass

        return run

    request = SimpleNamespace(request_type="chat")
    wrapped = _wrapped(_watched(), "ResponseGenerator.generate", generate)
    return _cost_us(drained(generate), drained(wrapped), n)


def step_us(n_rows: int) -> float:
    """A decoding step of a batch, on the generation thread."""
    n = 3000
    watch = _watched()
    responses = [SimpleNamespace(uid=uid, finish_reason=None) for uid in range(n_rows)]
    generator = BatchGenerator(small_llama())

    def both(step: Callable[..., Any], following: Callable[..., Any]) -> Callable[[], None]:
        def run() -> None:
            for _ in range(n):
                step(generator)
                following(generator)

        return run

    def step(_self: object) -> None: ...

    def following(_self: object) -> tuple[list[Any], list[Any]]:
        return [], responses

    wrapped = both(
        _wrapped(watch, "GenerationBatch._step", step),
        _wrapped(watch, "BatchGenerator._next", following),
    )
    return _cost_us(both(step, following), wrapped, n)


def stream_us() -> float:
    """A token of a sequence by itself."""
    n = 5000
    response = SimpleNamespace(prompt_tokens=4)

    def stream() -> Iterator[object]:
        return iter([response] * n)

    def drained(call: Callable[[], Any]) -> Callable[[], None]:
        def run() -> None:
            for _ in call():
                pass

        return run

    return _cost_us(drained(stream), drained(_wrapped(_watched(), "stream_generate", stream)), n)


# -- with a model ----------------------------------------------------------------------------------


def single_token_s(model: Any, n_tokens: int) -> float:
    """Wall seconds a token of a sequence by itself: the fastest tenth, as other load only adds."""
    steps = generate_step(mx.arange(8), model, max_tokens=n_tokens)
    times = [time.perf_counter() for _ in steps]
    return sorted(b - a for a, b in pairwise(times))[len(times) // 10]


def batch_cpu_s(model: Any, n_tokens: int) -> float:
    """CPU seconds of the generating thread a token, of a batch from its beginning to its end."""
    batch = BatchGenerator(model, max_tokens=n_tokens)
    batch.insert([list(range(1, 9 + n)) for n in range(ROWS)])
    began = time.thread_time()
    n = 0
    while responses := batch.next_generated():
        n += len(responses)
    took = time.thread_time() - began
    batch.close()
    return took / n


def by_turn_rows(model: Any, name: str, n_tokens: int, rounds: int) -> list[Row]:
    """Whole batches with and without the watch: what the wrappers' sum leaves out, if anything."""

    def lane(watch: Watch | None) -> float:
        if watch is None:
            return batch_cpu_s(model, n_tokens)
        watch.start()
        try:
            return batch_cpu_s(model, n_tokens)
        finally:
            watch.stop()

    lanes = {
        "off": lambda: lane(None),
        "off again": lambda: lane(None),
        "on": lambda: lane(Watch()),
    }
    samples = by_turns(lanes, rounds)
    noise = abs(ratio(samples["off again"], samples["off"]) - 1) * 100
    added = (ratio(samples["on"], samples["off"]) - 1) * 100
    row_us = median(samples["off"]) * 1e6
    note = f"{added / 100 * row_us:.1f} us of {row_us:.0f} us a row and token, batches of {ROWS}"
    return [Row(f"by turns, batch, {name}: CPU a token", added, None, "%", noise, note)]


def share_rows(model: Any, name: str, n_tokens: int) -> list[Row]:
    """What the wrappers take of a token's time, which is shortest by itself."""
    token_us = single_token_s(model, n_tokens) * 1e6
    note = f"of a token of {token_us:.0f} us"
    parts = {
        "sequence by itself": stream_us(),
        "server, one request": handler_us() + step_us(1),
        f"server, a row of {ROWS}": handler_us() + step_us(ROWS) / ROWS,
    }
    return [
        Row(
            f"wrappers, {what}, {name}",
            us / token_us * 100,
            SHARE,
            "%",
            None,
            f"{us:.2f} us {note}",
        )
        for what, us in parts.items()
    ]


# -- a scrape --------------------------------------------------------------------------------------


def many_caches() -> list[Any]:
    """As many caches as a busy server has in its prompt cache and batches."""
    keys = mx.zeros((1, 2, 256, 64))
    caches = [KVCache() for _ in range(N_CACHES)]
    for cache in caches:
        cache.keys, cache.values, cache.offset = keys[:], keys[:], 100
    return caches


def scrape_rows(rounds: int) -> list[Row]:
    """The census alone, and all that a scrape reads."""
    watch = Watch()
    watch.start()
    caches = many_caches()
    rows = []
    source = LiveSource()
    for what, target, call in (
        ("census", 20.0, watch.snapshot),
        ("whole snapshot", None, source.read),
    ):
        cpu, wall = [], []
        for _ in range(rounds):
            began, began_wall = time.thread_time(), time.perf_counter()
            call()
            cpu.append((time.thread_time() - began) * 1e3)
            wall.append((time.perf_counter() - began_wall) * 1e3)
        times = cpu
        note = f"CPU; wall {median(wall):.1f} ms, at best {min(wall):.1f} ms"
        rows.append(Row(f"scrape, {len(caches):,} live caches: {what}", median(times), target, "ms",
                        None, note))  # fmt: skip
    watch.stop()
    return rows


def parsed(description: str, arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options that the serving benchmarks share."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a bound is missed")
    parser.add_argument("--json", type=Path, help="write the rows there")
    return parser.parse_args(arguments)


def conclude(rows: Sequence[Row], options: argparse.Namespace) -> int:
    """Print the rows, write them where asked to, and judge; returns the exit status."""
    print(render(rows))
    print(f"{os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}; Python {sys.version.split()[0]}")
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    return int(options.check and not all(row.holds for row in rows))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and judge if asked to."""
    options = parsed("Measure what watching mlx-lm costs.", arguments)
    n = 1 if options.quick else 4
    model = small_llama()
    rows = scrape_rows(10 * n)
    rows += share_rows(model, "8 layers of 128", 128)
    rows += by_turn_rows(model, "8 layers of 128", 64, 6 * n)
    folder = os.environ.get("VELOXQUANT_TEST_MODEL")
    if folder:
        from mlx_lm import load

        real = load(folder)[0]
        rows += share_rows(real, Path(folder).name, 12)
    return conclude(rows, options)


# -- with pytest-benchmark -------------------------------------------------------------------------


def test_census(benchmark: Any) -> None:
    """10,000 live caches."""
    watch = Watch()
    watch.start()
    caches = many_caches()
    found = benchmark(watch.snapshot).caches
    watch.stop()
    assert found is not None
    assert found["KVCache"].n_objects == len(caches)


if __name__ == "__main__":
    sys.exit(main())
