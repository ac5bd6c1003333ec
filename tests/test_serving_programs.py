"""Programs of mlx-lm that are no server, under `vqmon run`: they do what they did, and are seen."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.otlp_receiver import OtlpReceiver, values
from tests.serving_help import vqmon, write_tiny_model
from veloxquant_mlx.telemetry.program import ProgramSnapshot
from veloxquant_mlx.telemetry.snapshot_json import FILE_SUFFIX, parse_file

pytest.importorskip("mlx_lm")
pytestmark = pytest.mark.timeout(120)

SCRIPT = """
import sys
from mlx_lm import load, batch_generate
model, tokenizer = load(sys.argv[1])
prompts = [[5, 6, 7], [8, 9]]
print(batch_generate(model, tokenizer, prompts, max_tokens=4, return_token_ids=True).token_ids)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the tiny model."""
    return write_tiny_model(tmp_path_factory.mktemp("model"))


def run(words: Sequence[str], stdin: str = "") -> subprocess.CompletedProcess[str]:
    """A command, offline."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "COLUMNS": "80"}
    return subprocess.run(
        words, capture_output=True, text=True, input=stdin, env=environment, check=False, timeout=90
    )


def program_of(directory: Path) -> ProgramSnapshot:
    """The last snapshot that was published."""
    (file,) = directory.glob(f"[!.]*{FILE_SUFFIX}")
    found = parse_file(file.read_bytes()).snapshot.program
    assert found is not None
    return found


@pytest.mark.parametrize("how", [["-m", "mlx_lm", "generate"], ["-m", "mlx_lm.generate"]])
def test_generate_says_what_it_says_without_us(model: Path, tmp_path: Path, how: list[str]) -> None:
    """Word by word; its one request is counted."""
    command = [*how, "--model", str(model), "--prompt", "-", "--max-tokens", "9"]
    command += ["--verbose", "False"]
    plain = run([sys.executable, *command], "hello")
    options = ["run", "--snapshot-dir", str(tmp_path)]
    mine = run(vqmon(*options, "--", "python", *command), "hello")
    assert plain.stdout and (mine.returncode, mine.stdout) == (0, plain.stdout), mine.stderr
    found = program_of(tmp_path)
    requests = (found.requests or {})["text_completion"]
    assert requests.finished["ok"] == 1 and requests.generated_tokens == 9
    assert requests.prompt_tokens == len("u:hello|a:")
    assert found.weights_bytes == 0, "the model went with the end of main()"
    assert "server" not in found.hooks
    assert set(found.hook_errors.values()) == {0}


def test_a_chat_that_reads_its_questions_goes_on_as_ever(model: Path, tmp_path: Path) -> None:
    """Two questions from standard input; the cache grows with the conversation."""
    words = vqmon("run", "--snapshot-dir", str(tmp_path), "--")
    words += ["python", "-m", "mlx_lm", "chat", "--model", str(model), "--max-tokens", "5"]
    done = run(words, "hello\nhow are you\nq\n")
    assert done.returncode == 0, done.stderr
    found = program_of(tmp_path)
    requests = (found.requests or {})["text_completion"]
    assert requests.finished["ok"] == 2 and requests.generated_tokens == 10


def test_a_script_is_pushed_over_otlp_before_it_ends(model: Path, tmp_path: Path) -> None:
    """By the conventions' names, all of it, although it ran for a moment only."""
    (tmp_path / "script.py").write_text(SCRIPT)
    with OtlpReceiver() as receiver:
        words = vqmon("run", "--otlp-endpoint", receiver.url, "--")
        done = run([*words, "python", str(tmp_path / "script.py"), str(model)])
        assert done.returncode == 0, done.stderr
        got = values(receiver.metrics[-1])
    plain = run([sys.executable, str(tmp_path / "script.py"), str(model)])
    assert plain.stdout == done.stdout
    attributes = {"gen_ai.operation.name": "text_completion", "gen_ai.provider.name": "mlx_lm"}
    first = got["gen_ai.server.time_to_first_token", frozenset(attributes.items())]
    assert sum(first[1]) == 2
    tokens = {"gen_ai.operation.name": "text_completion"}
    assert got["veloxquant.program.generated_tokens", frozenset(tokens.items())] == 8
