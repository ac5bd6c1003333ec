"""mlx-lm's real server charged to a pool: openai's client, budgets too small, and what is left."""

from __future__ import annotations

import contextlib
import os
import subprocess
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.real_prometheus import until
from tests.serving_help import Served, free_port, served, vqmon, write_tiny_model
from veloxquant_exporters.cli.run import command
from veloxquant_mlx.telemetry.snapshot_json import parse_file

openai = pytest.importorskip("openai")
pytest.importorskip("mlx_lm")
pytestmark = pytest.mark.timeout(120)

SIZE, LAYERS = 16, 3
STEP = 2 * LAYERS * 256 // SIZE
BLOCK_BYTES = SIZE * 128 * 4  # two heads of 64 floats
SYSTEM = "You are the keeper of a lighthouse, and answer in the fewest words that will do. " * 2


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the tiny model."""
    return write_tiny_model(tmp_path_factory.mktemp("model"))


def server_of(model: Path, *options: str, n_blocks: int = 1 << 16) -> Any:
    """A server whose caches are charged."""
    program = ["python", "-m", "mlx_lm", "server", "--model", str(model), "--log-level", "WARNING"]
    pool = f"blocks={n_blocks},block-size={SIZE},name=kv"
    return served(program, ["--pool", pool, *options], port=free_port())


@pytest.fixture(scope="module")
def roomy(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Room for everything."""
    with server_of(model) as running:
        yield running


def client_of(server: Served, **options: Any) -> Any:
    """A client that tries once."""
    options = {"max_retries": 0, "timeout": 60, **options}
    return openai.OpenAI(base_url=f"{server.api}/v1", api_key="none", **options)


def chat(client: Any, n: int, *, stream: bool = False, **options: Any) -> str:
    """One chat to its end: the same beginning as all others, and an end of its own."""
    options = {
        "model": "default_model",
        "messages": [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": f"How far is ship number {n}?"},
        ],
        "max_tokens": 16 + n % 5,
        "temperature": 0.0,
        **options,
    }
    if not stream:
        return str(client.chat.completions.create(**options).choices[0].message.content)
    chunks = client.chat.completions.create(**options, stream=True)
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def check_that_what_lives_is_charged(server: Served) -> None:
    """Once no request runs: charges are those of the entries, and of what the server itself forgot.

    A variable of its loop holds the last copy of a row until the next one, another the last answer.
    Entries are cut to length, so that a block of each stream and cache object is not quite full.
    """
    until(lambda: server.value("program_active_requests") == 0)
    n_entries = server.value("program_prompt_cache_entries")
    n_caches = server.value("program_caches", kind="KVCache")
    assert LAYERS * n_entries <= n_caches <= LAYERS * (n_entries + 2)
    assert server.value("program_caches", kind="BatchKVCache") == 0
    for blocks, n_bytes in (
        ("blocks_in_use", server.value("program_cache_bytes")),
        ("cached_blocks", server.value("program_prompt_cache_bytes")),
    ):
        charged = server.value(f"block_pool_{blocks}", pool="kv") * BLOCK_BYTES
        assert 0 < n_bytes <= charged < n_bytes + n_caches * 2 * BLOCK_BYTES
    stored = server.value("block_pool_storage_bytes", pool="kv")
    assert stored == server.value("program_cache_bytes", kind="KVCache")


def test_all_blocks_but_cached_ones_come_back(roomy: Served) -> None:
    """Twenty chats at once, streamed or not, three clients that leave, one that runs by itself."""
    client = client_of(roomy)
    chat(client, 20)  # leaves the beginning in the prompt cache
    with ThreadPoolExecutor(20) as threads:
        list(threads.map(lambda n: chat(client, n, stream=n % 2 == 0), range(20)))
    for n in range(3):
        options: Any = {"messages": [{"role": "user", "content": f"Count, {n}"}]}
        stream = client.chat.completions.create(
            model="default_model", max_tokens=4000, stream=True, **options
        )
        next(iter(stream))
        stream.close()
    chat(client, 3, seed=7)
    check_that_what_lives_is_charged(roomy)
    assert roomy.value("program_pool_excess_blocks") == 0
    assert roomy.value("program_pool_uncharged_blocks_total") == 0
    assert roomy.value("program_hook_errors_total") == 0
    assert roomy.value("block_pool_invariant_violations_total", pool="kv") == 0
    peak = roomy.value("block_pool_peak_blocks_in_use", pool="kv")
    assert peak > roomy.value("block_pool_cached_blocks", pool="kv") + 2 * STEP


def test_tokens_are_those_without_us(model: Path, roomy: Served) -> None:
    """The same text, one request after the other, at temperature 0."""
    client = client_of(roomy)
    with_us = [chat(client, n, max_tokens=24) for n in (101, 102)]
    assert with_us == [chat(client, n, max_tokens=24) for n in (101, 102)]  # out of the cache
    port = free_port()
    words = ["python", "-m", "mlx_lm", "server", "--model", str(model), "--port", str(port)]
    process = subprocess.Popen(
        [vqmon()[0], *words[1:]],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        plain = Served(process, f"http://127.0.0.1:{port}", [])
        until(lambda: _answers(plain))
        client = client_of(plain)
        assert with_us == [chat(client, n, max_tokens=24) for n in (101, 102)]
    finally:
        process.kill()
        process.wait()


def _answers(server: Served) -> bool:
    try:
        urllib.request.urlopen(f"{server.api}/health", timeout=5).close()
    except OSError:
        return False
    return True


def test_over_budget_the_prompt_cache_goes_first(model: Path, tmp_path: Path) -> None:
    """Room for two requests: entries are evicted, the rest is counted, and every chat is served.

    Then SIGKILL in the middle of a request: the file is whole, and says what was charged.
    """
    folder = tmp_path / "snapshots"
    options = ["--snapshot-dir", str(folder)]
    with server_of(model, *options, n_blocks=2 * STEP) as server:
        client = client_of(server)
        for n in range(4):
            chat(client, n, messages=[{"role": "user", "content": f"{n} " * 60}])
        assert server.value("program_prompt_cache_evictions_total", reason="budget") > 0
        assert server.value("program_pool_uncharged_blocks_total") == 0
        with ThreadPoolExecutor(8) as threads:
            answers = list(threads.map(lambda n: chat(client, n, stream=True), range(8)))
        assert all(answers)
        until(lambda: server.value("program_active_requests") == 0)
        assert server.value("program_pool_uncharged_blocks_total") > 0
        assert server.value("program_pool_excess_blocks") == 0
        check_that_what_lives_is_charged(server)
        assert server.value("program_requests_total", outcome="ok") == 12
        assert server.value("program_requests_total", outcome="rejected") == 0
        assert server.value("program_generation_thread_alive") == 1
        assert server.value("program_hook_errors_total") == 0
        _kill_in_the_middle(server, folder)


def _kill_in_the_middle(server: Served, folder: Path) -> None:
    stream = client_of(server).chat.completions.create(
        model="default_model",
        messages=[{"role": "user", "content": "Count to a thousand"}],
        max_tokens=4000,
        stream=True,
    )
    next(iter(stream))

    def charged() -> int:
        pools = [
            pool
            for file in folder.glob("*.snapshot.json")
            for pool in parse_file(file.read_bytes()).snapshot.pools
        ]
        return sum(pool.blocks_in_use - pool.cached_blocks for pool in pools)

    until(lambda: charged() >= STEP)
    server.process.kill()
    server.process.wait()
    with contextlib.suppress(openai.APIError, OSError):
        list(stream)
    assert charged() >= STEP


def test_enforce_sends_away_what_does_not_fit(model: Path) -> None:
    """Of ten at once some are served and the others get 503, as openai's client reads it."""
    with server_of(model, "--enforce", n_blocks=2 * STEP) as server:
        client = client_of(server)
        chat(client, 0)

        refused: list[Any] = []

        def tried(n: int) -> int:
            try:
                chat(client, n, stream=True, max_tokens=60)
            except openai.APIStatusError as error:
                refused.append(error)
                return int(error.status_code)
            return 200

        with ThreadPoolExecutor(10) as threads:
            codes = list(threads.map(tried, range(10)))
        assert set(codes) == {200, 503}
        for error in refused:
            assert (error.code, error.type) == ("pool_over_budget", "server_error")
            assert "over its budget" in error.message
            assert int(error.response.headers["Retry-After"]) >= 1
        rejected = server.value("program_requests_total", outcome="rejected")
        assert rejected == codes.count(503)
        assert server.value("program_requests_total", outcome="ok") == 1 + codes.count(200)
        check_that_what_lives_is_charged(server)
        # Those that wait and come back are served.
        patient = client_of(server, max_retries=8)
        with ThreadPoolExecutor(3) as threads:
            assert all(threads.map(lambda n: chat(patient, n), range(3)))


@pytest.mark.timeout(200)
def test_a_real_model_is_charged_too() -> None:
    """Two chats on the model of CI: blocks and bytes are those of the census."""
    folder = os.environ.get("VELOXQUANT_TEST_MODEL")
    if not folder:
        pytest.skip("VELOXQUANT_TEST_MODEL names no folder with a model that mlx_lm.load takes")
    with server_of(Path(folder)) as server:
        client = client_of(server)
        answers = [chat(client, 1, max_tokens=4) for _ in range(2)]
        assert answers[0] == answers[1]
        until(lambda: server.value("program_active_requests") == 0)
        n_bytes = server.value("program_cache_bytes", kind="KVCache")
        assert server.value("block_pool_storage_bytes", pool="kv") == n_bytes > 0
        in_use = server.value("block_pool_blocks_in_use", pool="kv")
        slots = server.value("program_cache_slots", kind="KVCache")
        n_caches = server.value("program_caches", kind="KVCache")
        assert 2 * slots <= in_use * SIZE < 2 * (slots + n_caches * SIZE)
        assert 0 < server.value("block_pool_cached_blocks", pool="kv") <= in_use
        assert server.value("program_hook_errors_total") == 0


def run_program(model: Path, *program: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """A program under `vqmon run`, to its end."""
    pool = f"blocks=4096,block-size={SIZE}"
    return subprocess.run(
        vqmon("run", "--port", "0", "--pool", pool, "--", *program),
        input=stdin,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )


def test_chat_and_generate_run_as_without_us(model: Path) -> None:
    """The two programs that people type, one of them with its input from a pipe."""
    options = ["--model", str(model), "--max-tokens", "8"]
    done = run_program(model, "mlx_lm.generate", *options, "--prompt", "hello", "--temp", "0")
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
    assert "Generation: 8 tokens" in done.stdout
    done = run_program(model, "python", "-m", "mlx_lm", "chat", *options, stdin="hello\nq\n")
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
    assert "bye" in done.stdout


def test_wrong_options_are_told_in_one_line() -> None:
    """Before the program is started."""
    for options, reason in (
        (["--enforce"], "--enforce needs --pool"),
        (["--pool", "blocks=x"], "whole number"),
        (["--pool", "blocks=4,name=other"], "other"),
    ):
        done = CliRunner().invoke(command, ["--port", "0", *options, "--", "python", "-c", "1"])
        assert done.exit_code == 2
        assert reason in done.output
