"""For tests of watched programs: a tiny model on disk, and mlx-lm's real server under `vqmon run`."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

__all__ = ["Page", "Served", "free_port", "read_page", "served", "vqmon", "write_tiny_model"]

LAYERS = 3
EOS = 511
TEMPLATE = (
    "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }}|{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


def write_tiny_model(folder: Path) -> Path:
    """A Llama of three layers with random weights and a tokenizer of single letters; 1 MB."""
    import mlx.core as mx
    from mlx.utils import tree_flatten
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    from veloxquant_exporters.demo.model import tiny_llama

    model = tiny_llama(0).model
    config = {
        key: value
        for key, value in vars(model.args).items()
        if isinstance(value, int | float | str) and not key.startswith("_")
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": EOS}))
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    vocabulary = {chr(n) if 32 <= n < 127 else f"<{n}>": n for n in range(256)}
    vocabulary |= {f"w{n} ": n for n in range(256, EOS)} | {"</s>": EOS}
    tokenizer: Any = Tokenizer(models.WordLevel(vocabulary, unk_token="</s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "</s>",
        "unk_token": "</s>",
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def free_port() -> int:
    """One that nobody listens on now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def vqmon(*arguments: str) -> list[str]:
    """The command line of `vqmon`."""
    return [sys.executable, "-m", "veloxquant_exporters.cli", *arguments]


Page = dict[tuple[str, frozenset[tuple[str, str]]], float]


def read_page(url: str) -> Page:
    """Every sample of a metrics page."""
    with urllib.request.urlopen(url, timeout=20) as answer:
        text = answer.read().decode()
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


class Served:
    """A running server; `api` and `metrics` are its addresses."""

    def __init__(self, process: subprocess.Popen[str], api: str, log: list[str]) -> None:
        self.process = process
        self.api = api
        self.log = log
        self.metrics = ""

    def value(self, name: str, **labels: str) -> float:
        """The sum of the series of that name that have these labels."""
        wanted = set(labels.items())
        found = [
            value
            for (sample, has), value in read_page(self.metrics).items()
            if sample == f"veloxquant_{name}" and wanted <= has
        ]
        assert found, (name, labels)
        return sum(found)

    def ask(self, **body: Any) -> dict[str, Any]:
        """One chat, without a client library."""
        request = urllib.request.Request(
            f"{self.api}/v1/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            found: dict[str, Any] = json.load(answer)
            return found


@contextlib.contextmanager
def served(
    program: Sequence[str], options: Sequence[str] = (), *, port: int | None = None
) -> Iterator[Served]:
    """`program`, which serves on `port`, under `vqmon run`; ends it at the end."""
    port = free_port() if port is None else port
    process = subprocess.Popen(
        vqmon("run", "--port", "0", *options, "--", *program, "--port", str(port)),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    log: list[str] = []
    found = threading.Event()
    running = Served(process, f"http://127.0.0.1:{port}", log)

    def read() -> None:
        assert process.stderr is not None
        for line in process.stderr:
            log.append(line)
            if address := re.search(r"vqmon: metrics at (http://\S+?)/?(,|$)", line):
                running.metrics = f"{address[1]}/metrics"
                found.set()
        found.set()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        assert found.wait(60) and running.metrics, "".join(log)
        _await(running)
        yield running
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        reader.join(10)
        if process.stderr is not None:
            process.stderr.close()


def _await(running: Served) -> None:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        assert running.process.poll() is None, "".join(running.log)
        with contextlib.suppress(OSError):
            urllib.request.urlopen(f"{running.api}/health", timeout=5).close()
            return
        threading.Event().wait(0.05)
    raise AssertionError("".join(running.log))
