"""mlx-lm's real server under `vqmon run`, with the openai client, beside a real Prometheus."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.real_prometheus import running_prometheus, until
from tests.serving_help import Served, free_port, read_page, served, write_tiny_model
from veloxquant_mlx.serving import POINTS

openai = pytest.importorskip("openai")
pytest.importorskip("mlx_lm")
pytestmark = pytest.mark.timeout(120)

ROOT = Path(__file__).resolve().parent.parent
# The real server, which on SIGUSR1 sums up what the census should find, the slow way.
SERVER = """
import gc, json, signal, sys
from mlx_lm.models import cache as lm
from mlx_lm.server import main

def add_up(*_):
    caches = [c for c in gc.get_objects() if isinstance(c, lm._BaseCache)]
    sums = {}
    for c in caches:
        n, n_bytes = sums.get(type(c).__name__, (0, 0))
        sums[type(c).__name__] = (n + 1, n_bytes + c.nbytes)
    with open(OUT, "w") as file:
        json.dump(sums, file)

signal.signal(signal.SIGUSR1, add_up)
main()
"""
SYSTEM = "You are the keeper of a lighthouse, and answer in the fewest words that will do. " * 2


@dataclass
class Counted:
    """What a client was told of its request."""

    prompt: int = 0
    cached: int = 0
    generated: int = 0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the tiny model."""
    return write_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server that can be asked for the truth."""
    folder = tmp_path_factory.mktemp("server")
    script = folder / "serve.py"
    script.write_text(f"OUT = {str(folder / 'truth.json')!r}\n{SERVER}")
    program = ["python", str(script), "--model", str(model), "--log-level", "WARNING"]
    with served(program, port=free_port()) as running:
        yield running


def client_of(server: Served) -> Any:
    """A client that tries once."""
    return openai.OpenAI(base_url=f"{server.api}/v1", api_key="none", max_retries=0, timeout=60)


def chat(client: Any, n: int, *, stream: bool) -> Counted:
    """One chat to its end: the same beginning as all others, and an end of its own."""
    options: dict[str, Any] = {
        "model": "default_model",
        "messages": [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": f"How far is ship number {n}?"},
        ],
        "max_tokens": 16 + n % 5,
        "temperature": 0.0,
    }
    if not stream:
        usage = client.chat.completions.create(**options).usage
    else:
        chunks = client.chat.completions.create(
            **options, stream=True, stream_options={"include_usage": True}
        )
        usage = [chunk.usage for chunk in chunks if chunk.usage][-1]
    details = usage.prompt_tokens_details
    cached = details.cached_tokens if details else 0
    return Counted(usage.prompt_tokens, cached, usage.completion_tokens)


def test_the_numbers_are_those_of_the_clients(server: Served) -> None:
    """Twenty chats at once with one beginning: tokens, hits and outcomes as the clients count."""
    client = client_of(server)
    names = ("prompt_tokens_total", "cached_prompt_tokens_total", "generated_tokens_total")
    before = [server.value(f"program_{name}", operation="chat") for name in names]
    done = server.value("program_requests_total", operation="chat", outcome="ok")
    counts = [chat(client, 20, stream=False)]  # leaves the beginning in the prompt cache
    with ThreadPoolExecutor(20) as threads:
        counts += threads.map(lambda n: chat(client, n, stream=n % 2 == 0), range(20))
    after = [server.value(f"program_{name}", operation="chat") for name in names]
    seen = [sum(c.prompt for c in counts), sum(c.cached for c in counts)]
    seen.append(sum(c.generated for c in counts))
    assert [b - a for a, b in zip(before, after, strict=True)] == seen
    assert min(seen) > 0
    assert server.value("program_requests_total", operation="chat", outcome="ok") == done + 21
    assert server.value("program_requests_total", outcome="failed") == 0
    assert server.value("program_request_tokens_sum", kind="input", operation="chat") >= seen[0]
    hits = server.value("program_prompt_cache_hit_tokens_total")
    assert hits == server.value("program_cached_prompt_tokens_total")
    assert server.value("program_decode_batch_rows_sum") >= seen[2]


def test_bytes_are_those_of_the_arrays(server: Served, tmp_path_factory: Any) -> None:
    """Objects and bytes of each kind equal `nbytes` summed over all objects of the process."""
    chat(client_of(server), 77, stream=False)
    truth = Path(_script_of(server)).parent / "truth.json"
    truth.unlink(missing_ok=True)
    until(lambda: server.value("program_active_requests") == 0)
    os.kill(server.process.pid, signal.SIGUSR1)

    def written() -> bool:
        try:
            return bool(json.loads(truth.read_text()))
        except (OSError, ValueError):
            return False

    until(written)
    sums = json.loads(truth.read_text())
    assert sums["KVCache"][1] > 0
    for kind, (n, n_bytes) in sums.items():
        assert server.value("program_caches", kind=kind) == n
        assert server.value("program_cache_bytes", kind=kind) == n_bytes
    total = server.value("program_cache_bytes")
    assert total == sum(n_bytes for _, n_bytes in sums.values())
    assert server.value("mlx_memory_account_bytes", kind="kv_cache") == total
    kept = server.value("program_prompt_cache_bytes")
    assert 0 < kept <= total


def _script_of(server: Served) -> str:
    arguments = server.process.args
    assert isinstance(arguments, list)
    return next(str(word) for word in arguments if str(word).endswith("serve.py"))


def test_the_account_adds_up(server: Served) -> None:
    """Weights, caches and the rest are the active bytes, all from one page."""
    page = read_page(server.metrics)
    parts = {
        dict(labels)["kind"]: value
        for (name, labels), value in page.items()
        if name == "veloxquant_mlx_memory_account_bytes"
    }
    assert set(parts) == {"weights", "kv_cache", "rest"}
    assert sum(parts.values()) == page["veloxquant_mlx_memory_active_bytes", frozenset()]
    assert parts["weights"] == page["veloxquant_program_weights_bytes", frozenset()] > 900_000


def test_a_client_that_leaves_is_cancelled(server: Served) -> None:
    """Three leave in the middle of their stream; the server goes on for the fourth."""
    client = client_of(server)
    before = server.value("program_requests_total", outcome="cancelled")
    tokens = server.value("program_generated_tokens_total", operation="chat")
    for n in range(3):
        stream = client.chat.completions.create(
            model="default_model",
            messages=[{"role": "user", "content": f"Count to a thousand, {n}"}],
            max_tokens=4000,
            stream=True,
        )
        for _, _chunk in zip(range(3), stream, strict=False):
            pass
        stream.close()
    until(lambda: server.value("program_requests_total", outcome="cancelled") == before + 3)
    until(lambda: server.value("program_active_requests") == 0)
    chat(client, 1, stream=True)
    assert server.value("program_generated_tokens_total", operation="chat") >= tokens + 3 * 3
    assert server.value("program_generation_thread_alive") == 1


def test_a_bad_request_is_a_failure_of_its_own(server: Served) -> None:
    """What cannot be tokenized fails, and nothing else does."""
    before = server.value("program_requests_total", outcome="failed")
    with pytest.raises(openai.APIStatusError):
        client_of(server).chat.completions.create(model="default_model", messages=[{"no": "role"}])
    assert server.value("program_requests_total", outcome="failed") == before + 1


def test_a_request_by_itself_counts_as_one(server: Served) -> None:
    """With a seed the server generates without a batch: counted where it arrives, once."""
    before = server.value("program_requests_total")
    tokens = server.value("program_generated_tokens_total")
    answer = client_of(server).chat.completions.create(
        model="default_model",
        messages=[{"role": "user", "content": "hello"}],
        max_tokens=9,
        seed=7,
    )
    assert server.value("program_requests_total") == before + 1
    assert server.value("program_generated_tokens_total") == tokens + answer.usage.completion_tokens
    assert server.value("program_active_requests", state="single") == 0


def test_a_text_completion_is_another_operation(server: Served) -> None:
    """As the conventions name it."""
    answer = client_of(server).completions.create(
        model="default_model", prompt="Once upon a time", max_tokens=5
    )
    usage = answer.usage
    for name, n in (("prompt", usage.prompt_tokens), ("generated", usage.completion_tokens)):
        found = server.value(f"program_{name}_tokens_total", operation="text_completion")
        assert found == n


def test_every_hook_is_in_place_and_none_failed(server: Served) -> None:
    """Of the mlx-lm that is installed; and nothing was warned of."""
    page = read_page(server.metrics)
    hooks = {
        dict(labels)["hook"]: value
        for (name, labels), value in page.items()
        if name == "veloxquant_program_hook_ok"
    }
    assert hooks == dict.fromkeys((point.hook for point in POINTS), 1.0)
    assert server.value("program_hook_errors_total") == 0
    assert not [line for line in server.log if "mlx-lm" in line and "off:" in line]


def board_queries() -> list[str]:
    """What the board of model servers asks, but for what it shows only above 0."""
    board = json.loads((ROOT / "dashboards" / "grafana" / "model-server.json").read_text())
    found = [t["expr"] for panel in board["panels"] for t in panel.get("targets", ())]
    for variable, value in (
        ("$job", ".*"),
        ("$instance", ".*"),
        ("$__rate_interval", "20s"),
        ("$__range", "20s"),
    ):
        found = [expression.replace(variable, value) for expression in found]
    return [e for e in found if not e.endswith("> 0") and "veloxquant_program_pool_" not in e]


def test_a_real_prometheus_gets_it(server: Served, tmp_path: Path) -> None:
    """What a scraper asks of it, in PromQL."""
    target = server.metrics.removeprefix("http://").removesuffix("/metrics")
    client = client_of(server)
    with running_prometheus(tmp_path, target) as prometheus:
        until(lambda: prometheus.value('up{job="veloxquant"}') == 1.0)
        first = prometheus.value("sum(veloxquant_program_generated_tokens_total)")
        assert first is not None
        n = sum(chat(client, n, stream=True).generated for n in range(3))
        until(
            lambda: prometheus.value("sum(veloxquant_program_generated_tokens_total)") == first + n
        )
        until(lambda: not [q for q in board_queries() if not prometheus.values(q)])
        for query in (
            "histogram_quantile(0.95, sum by (le)(veloxquant_program_time_to_first_token_seconds_bucket))",
            "sum by (kind)(veloxquant_mlx_memory_account_bytes)",
            "veloxquant_program_generation_thread_alive",
        ):
            assert prometheus.values(query), query


BREAKS = """
import os
from mlx_lm.models import cache as lm
from mlx_lm.server import main

update = lm.BatchKVCache.update_and_fetch

def may_break(self, keys, values):
    if os.path.exists(SWITCH):
        raise RuntimeError("broken on purpose")
    return update(self, keys, values)

lm.BatchKVCache.update_and_fetch = may_break
main()
"""


def test_a_dead_generation_thread_shows(model: Path, tmp_path: Path) -> None:
    """An exception in a cache ends it for good, while the process and its page live on."""
    switch = tmp_path / "switch"
    (tmp_path / "serve.py").write_text(f"SWITCH = {str(switch)!r}\n{BREAKS}")
    program = ["python", str(tmp_path / "serve.py"), "--model", str(model)]
    with served([*program, "--log-level", "CRITICAL"]) as server:
        client = client_of(server)
        chat(client, 0, stream=False)
        assert server.value("program_generation_thread_alive") == 1
        switch.touch()
        for _ in range(2):
            with pytest.raises(openai.APIError):
                chat(client, 1, stream=False)
        until(lambda: server.value("program_generation_thread_alive") == 0)
        assert server.value("program_requests_total", outcome="failed") == 2
        assert server.value("program_requests_total", outcome="ok") == 1


def test_run_as_a_module_there_is_one_copy_of_the_server(model: Path) -> None:
    """`-m mlx_lm.server` would put a second one past the hooks, under the name `__main__`."""
    program = ["python", "-m", "mlx_lm.server", "--model", str(model), "--log-level", "CRITICAL"]
    with served(program) as server:
        n = chat(client_of(server), 0, stream=True).generated
        assert server.value("program_generated_tokens_total", operation="chat") == n
        assert server.value("program_hook_ok", hook="requests") == 1


@pytest.mark.timeout(200)
def test_a_real_model_is_watched_too() -> None:
    """Two chats at temperature 0: the same text twice, and numbers as the client has them."""
    folder = os.environ.get("VELOXQUANT_TEST_MODEL")
    if not folder:
        pytest.skip("VELOXQUANT_TEST_MODEL names no folder with a model that mlx_lm.load takes")
    program = ["python", "-m", "mlx_lm", "server", "--model", folder, "--log-level", "WARNING"]
    with served(program) as server:
        client = client_of(server)
        answers = [
            client.chat.completions.create(
                model="default_model",
                messages=[{"role": "user", "content": "Hi"}],
                max_tokens=4,
                temperature=0.0,
            )
            for _ in range(2)
        ]
        assert answers[0].choices[0].message.content == answers[1].choices[0].message.content
        generated = sum(answer.usage.completion_tokens for answer in answers)
        assert server.value("program_generated_tokens_total") == generated
        on_disk = (Path(folder) / "model.safetensors").stat().st_size
        assert 0.99 * on_disk < server.value("program_weights_bytes") <= on_disk
