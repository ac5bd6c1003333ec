"""The watch over mlx-lm in one process: what it counts, and that the program never notices."""

from __future__ import annotations

import gc
import logging
import os
import queue
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests.serving_help import write_tiny_model
from veloxquant_exporters.demo.model import tiny_llama
from veloxquant_mlx.serving import Listener, Watch, stop_watching, watch
from veloxquant_mlx.serving.events import EVENTS
from veloxquant_mlx.telemetry import CATALOGUE, take_snapshot
from veloxquant_mlx.telemetry.histogram import HistogramSnapshot
from veloxquant_mlx.telemetry.program import AccountSnapshot, ProgramSnapshot
from veloxquant_mlx.telemetry.program_values import EVICTION_REASONS, OUTCOMES

mx = pytest.importorskip("mlx.core")
pytest.importorskip("mlx_lm")
lm: Any = import_module("mlx_lm.generate")
caches: Any = import_module("mlx_lm.models.cache")
NONE: dict[str, int] = dict.fromkeys(OUTCOMES, 0)
PROMPTS = [[5, 6, 7, 8, 9], [10, 11], list(range(20, 60))]


@pytest.fixture
def watched() -> Iterator[Watch]:
    """A watch of the test's own."""
    gc.collect()
    stop_watching()
    yield watch()
    stop_watching()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model on disk."""
    return write_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def loaded(folder: Path) -> tuple[Any, Any]:
    """The tiny model and its tokenizer, loaded without anybody watching."""
    model, tokenizer = import_module("mlx_lm").load(str(folder))
    return model, tokenizer


def now(watched: Watch) -> ProgramSnapshot:
    """The snapshot, of which nothing may have failed."""
    snapshot = watched.snapshot()
    assert set(snapshot.hook_errors.values()) <= {0}
    return snapshot


def streamed(model: Any, tokenizer: Any, n: int = 12, **options: Any) -> list[int]:
    """Tokens of one sequence by itself."""
    responses = lm.stream_generate(model, tokenizer, PROMPTS[2], max_tokens=n, **options)
    return [int(response.token) for response in responses]


def batched(model: Any) -> dict[int, list[int]]:
    """Tokens of three sequences in a batch that one leaves early and one joins late."""
    batch = lm.BatchGenerator(model, max_tokens=9)
    batch.insert(PROMPTS[:2], max_tokens=[4, 9])
    tokens: dict[int, list[int]] = {}
    late = True
    while responses := batch.next_generated():
        for response in responses:
            tokens.setdefault(response.uid, []).append(int(response.token))
        if late:
            batch.insert(PROMPTS[2:], max_tokens=[6])
            late = False
    batch.close()
    return tokens


class Angry(Listener):
    """Raises whatever it is told."""


def _raise(*_: object) -> None:
    raise RuntimeError("ours")


for _name in EVENTS:
    setattr(Angry, _name, _raise)


def test_the_same_tokens_with_and_without_us(loaded: tuple[Any, Any]) -> None:
    """By itself, quantised, and in batches; also when every hook fails."""

    def generated() -> list[Any]:
        model, tokenizer = loaded
        quantised = streamed(model, tokenizer, kv_bits=4, kv_group_size=32, quantized_kv_start=0)
        return [streamed(model, tokenizer), quantised, batched(model)]

    stop_watching()
    plain = generated()
    assert len(plain[2]) == 3
    watched = watch()
    try:
        assert generated() == plain
        now(watched)
        watched.seams.add(Angry())
        assert generated() == plain
        errors = watched.snapshot().hook_errors
        assert errors["cache_census"] > 0 and errors["batches"] > 0 and errors["streams"] > 0
    finally:
        stop_watching()
    assert generated() == plain


# -- requests --------------------------------------------------------------------------------------


def test_a_sequence_by_itself_is_a_request(watched: Watch, loaded: tuple[Any, Any]) -> None:
    """Its tokens and times; one that is left is cancelled, one that raises has failed."""
    model, tokenizer = loaded
    n = len(streamed(model, tokenizer))
    left = lm.stream_generate(model, tokenizer, PROMPTS[0], max_tokens=12)
    next(left), next(left)
    assert now(watched).active_requests["single"] == 1
    left.close()

    def fails(tokens: Any, logits: Any) -> Any:
        raise RuntimeError("theirs")

    with pytest.raises(RuntimeError, match="theirs"):
        streamed(model, tokenizer, logits_processors=[fails])
    found = (now(watched).requests or {})["text_completion"]
    assert found.finished == NONE | {"ok": 1, "cancelled": 1, "failed": 1}
    assert found.generated_tokens == n + 2
    assert found.prompt_tokens == len(PROMPTS[2]) + len(PROMPTS[0])
    assert found.first_token is not None and found.first_token.n_observed == 2
    assert found.between_tokens is not None and found.between_tokens.n_observed == n - 1 + 1
    assert found.per_token is not None and found.per_token.n_observed == 1
    assert found.duration["failed"].n_observed == 1
    assert now(watched).active_requests == {"queued": 0, "prefill": 0, "decode": 0, "single": 0}


def test_rows_of_a_batch_without_a_server_are_requests(
    watched: Watch, loaded: tuple[Any, Any]
) -> None:
    """Each to its end; those that are removed, or whose generator is closed, are cancelled."""
    tokens = batched(loaded[0])
    found = (now(watched).requests or {})["text_completion"]
    assert found.finished == NONE | {"ok": 3}
    assert found.generated_tokens == sum(map(len, tokens.values()))
    assert found.prompt_tokens == sum(map(len, PROMPTS))
    rows = now(watched).decode_batch
    assert rows is not None and rows.total == found.generated_tokens

    batch = lm.BatchGenerator(loaded[0], max_tokens=50)
    uids = batch.insert(PROMPTS)
    assert now(watched).active_requests["queued"] == 3
    batch.next_generated()
    assert sum(now(watched).active_requests.values()) == 3
    batch.remove(uids[:1])
    assert (now(watched).requests or {})["text_completion"].finished["cancelled"] == 1
    batch.close()
    del batch
    gc.collect()
    assert (now(watched).requests or {})["text_completion"].finished["cancelled"] == 3
    assert sum(now(watched).active_requests.values()) == 0


# -- the prompt cache ------------------------------------------------------------------------------


def entry(n: int) -> list[Any]:
    """Caches of a request of `n` tokens."""
    made = [caches.KVCache() for _ in range(2)]
    for cache in made:
        keys = mx.zeros((1, 2, n, 16))
        cache.update_and_fetch(keys, keys)
    return made


def test_entries_come_and_go_for_reasons(watched: Watch) -> None:
    """All of them; what is kept equals what mlx-lm itself says."""
    lru = caches.LRUPromptCache(max_size=2)
    lru.insert_cache("m", [1, 2, 3], entry(3))
    lru.insert_cache("m", [1, 2, 3], entry(3))  # replaced
    lru.insert_cache("m", [1, 2, 3, 4], entry(4), cache_type="user")  # the shorter is its prefix
    lru.insert_cache("m", [7, 8], entry(2), cache_type="system")
    lru.insert_cache("m", [9], entry(1))  # one over the limit
    lru.trim_to(n_sequences=1)
    lru.max_bytes = 0
    lru.insert_cache("m", [5, 5], entry(2))  # both over the limit of bytes
    found = now(watched).prompt_cache
    assert found is not None
    assert found.evictions == {
        **dict.fromkeys(EVICTION_REASONS, 0),
        "replaced": 1,
        "prefix": 1,
        "entries": 1,
        "trimmed": 1,
        "bytes": 2,
    }
    assert found.insertions == 6
    assert sum(found.entries.values()) == len(lru) == 0 == sum(found.n_bytes.values())
    assert found.max_entries == 2


def test_lookups_count_tokens_that_were_there(watched: Watch) -> None:
    """A hit is any prefix; its length is what the request need not compute."""
    lru = caches.LRUPromptCache(max_size=8, max_bytes=1 << 20)
    lru.insert_cache("m", [1, 2, 3], entry(3), cache_type="system")
    lru.insert_cache("m", [7, 8, 9], entry(3))
    for tokens, hit in (([1, 2, 3, 4, 5], 3), ([4, 4], 0), ([7, 8, 9], 3), ([1, 2, 9, 9], 2)):
        found, rest = lru.fetch_nearest_cache("m", tokens)
        assert len(tokens) - len(rest) == hit and (found is None) == (hit == 0)
    snapshot = now(watched).prompt_cache
    assert snapshot is not None
    assert snapshot.lookups == {"hit": 3, "miss": 1}
    assert (snapshot.lookup_tokens, snapshot.hit_tokens) == (5 + 2 + 3 + 4, 3 + 3 + 2)
    assert snapshot.entries == {"assistant": 1, "user": 0, "system": 1}
    assert snapshot.tokens == {"assistant": 3, "user": 0, "system": 3}
    assert sum(snapshot.n_bytes.values()) == lru.nbytes > 0
    assert snapshot.max_bytes == 1 << 20
    del lru, found
    gone = now(watched).prompt_cache
    assert gone is not None and sum(gone.entries.values()) == 0
    assert gone.lookups == snapshot.lookups, "what was counted stays"


# -- weights, and the whole ------------------------------------------------------------------------


def test_weights_are_those_of_the_models_that_live(watched: Watch, folder: Path) -> None:
    """Summed up at load, and gone with the model."""
    assert now(watched).weights_bytes is None
    model, _ = import_module("mlx_lm").load(str(folder))
    flat: Any = import_module("mlx.utils").tree_flatten(model.parameters())
    n_bytes = sum(array.nbytes for _, array in flat)
    assert now(watched).weights_bytes == n_bytes > 900_000
    other, _ = import_module("mlx_lm.utils").load(str(folder), lazy=True)
    assert now(watched).weights_bytes == 2 * n_bytes
    del model, other, flat
    gc.collect()
    assert now(watched).weights_bytes == 0


def test_the_program_is_part_of_the_snapshot_and_every_row_can_be_read(
    watched: Watch, loaded: tuple[Any, Any]
) -> None:
    """By the catalogue, with as many labels as it says."""
    lru = caches.LRUPromptCache()
    streamed(*loaded)
    snapshot = take_snapshot()
    assert snapshot.program is not None and snapshot.program.mlx_lm
    whole = replace(
        snapshot,
        mlx_device_total_bytes=9,
        program=replace(
            snapshot.program, generation_thread_alive=True, account=AccountSnapshot(), weights_bytes=5,
            prompt_cache=replace(snapshot.program.prompt_cache, max_bytes=7),  # type: ignore[type-var]
        ),
    )  # fmt: skip
    for row in CATALOGUE:
        if row.name.startswith("veloxquant_program_"):
            assert row.read_process is not None
            samples = list(row.read_process(whole))
            assert samples, row.name
            assert len({labels for labels, _ in samples}) == len(samples)
            for labels, value in samples:
                assert len(labels) == len(row.labels)
                assert isinstance(value, HistogramSnapshot) == (row.kind == "histogram")
            assert not list(row.read_process(replace(snapshot, program=None)))
    assert len(lru) == 0


def test_without_the_census_the_rest_is_there(loaded: tuple[Any, Any]) -> None:
    """And no cache is kept count of."""
    stop_watching()
    watched = watch(census=False)
    try:
        streamed(*loaded)
        found = watched.snapshot()
        assert found.caches is None and found.kv_bytes is None
        assert (found.requests or {})["text_completion"].finished["ok"] == 1
        assert watch() is watched, "asked again, the same one"
    finally:
        stop_watching()
    assert take_snapshot().program is None


@pytest.mark.parametrize("flush", ["server", "model"])
def test_an_unknown_version_is_warned_of_once(
    watched: Watch, monkeypatch: pytest.MonkeyPatch, caplog: Any, flush: str, loaded: Any
) -> None:
    """With what is off, and at the first occasion after the imports."""

    class Server:
        requests: queue.Queue[int] = queue.Queue()
        _generation_thread = threading.current_thread()

    server = Server()
    monkeypatch.setattr(sys.modules["mlx_lm._version"], "__version__", "9.9.9")
    with caplog.at_level(logging.WARNING, "veloxquant_mlx.serving"):
        watched.snapshot()
        assert not caplog.records, "imports may still be going on"
        for _ in range(2):
            if flush == "model":
                watched.seams.event("on_model_loaded")(loaded[0])
            else:
                watched.seams.event("on_server_made")(server)
            watched.snapshot()
    (record,) = caplog.records
    assert "mlx-lm 9.9.9 is untested" in record.getMessage()
    assert record.getMessage().endswith("off: nothing")


def test_the_tiny_model_of_the_demo_is_no_other(loaded: tuple[Any, Any]) -> None:
    """What is on disk generates what is in memory."""
    assert streamed(tiny_llama(0).model, loaded[1]) == streamed(*loaded)


# -- over OTLP, and in a forked child --------------------------------------------------------------


def test_names_over_otlp_are_those_of_the_conventions(
    watched: Watch, loaded: tuple[Any, Any]
) -> None:
    """As the semantic-conventions package has them, with the attributes that they ask for."""
    genai = pytest.importorskip("opentelemetry.semconv._incubating.metrics.gen_ai_metrics")
    names = pytest.importorskip("opentelemetry.semconv._incubating.attributes.gen_ai_attributes")
    from veloxquant_exporters.opentelemetry.naming import HISTOGRAMS
    from veloxquant_exporters.opentelemetry.points import points
    from veloxquant_exporters.sources import LiveSource

    streamed(*loaded)
    reading = LiveSource().read()
    found = {
        str(row.otel): [attributes for _, attributes, _ in points(row, reading, "semantic")]
        for row in HISTOGRAMS
    }
    conventions = {value for key, value in vars(genai).items() if key.startswith("GEN_AI_")}
    ours = {name for name in found if name.startswith("gen_ai.")}
    assert len(ours) == 4 and ours <= conventions
    common = {names.GEN_AI_PROVIDER_NAME: "mlx_lm", names.GEN_AI_OPERATION_NAME: "text_completion"}
    assert common in found[genai.GEN_AI_SERVER_TIME_TO_FIRST_TOKEN]
    assert common in found[genai.GEN_AI_SERVER_TIME_PER_OUTPUT_TOKEN]
    for kind in ("input", "output"):
        assert {**common, names.GEN_AI_TOKEN_TYPE: kind} in found[genai.GEN_AI_CLIENT_TOKEN_USAGE]


def test_a_child_that_is_forked_while_a_thread_counts_does_not_hang(watched: Watch) -> None:
    """The thread that held the lock is not there to let it go."""
    held, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with watched._requests._lock, watched._batches._lock, watched.seams._lock:
            held.set()
            leave.wait(20)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(20)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # a fork beside threads is the point
        child = os.fork()
    if child == 0:
        signal.alarm(20)
        watched.snapshot()
        watched.seams.count("x")
        os._exit(7)
    _, status = os.waitpid(child, 0)
    leave.set()
    thread.join(20)
    assert os.waitstatus_to_exitcode(status) == 7
